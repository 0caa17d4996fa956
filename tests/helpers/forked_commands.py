"""Runs commands, as ``python`` does, in processes forked from a process that has loaded torch.

Loading torch takes longer than most commands. What a command loads, and how soon, is tested with ``subprocess``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from command_processes import LIMIT

from verifier.core.entry_points import load_entry_points
from verifier.processes.forks import Forked, fork

__all__ = ["ForkedCommand", "run_module", "run_python"]


class ForkedCommand:
    """A command in a separate process, with methods of :class:`subprocess.Popen`.

    It has the ``sys.path`` of this process. Its stdin is empty.

    Parameters
    ----------
    words
        What stands behind ``python``: ``-m`` and a module, ``-c`` and a program, or a file, and their arguments.
    folder
        Where the command runs; None for the folder of this process.
    errors_apart
        Whether stderr is not mixed into the output.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path | None = None,
        environment: Mapping[str, str] = os.environ,
        errors_apart: bool = False,
    ) -> None:
        self.args = [sys.executable, *words]
        self._files = [tempfile.TemporaryFile() for _ in range(1 + errors_apart)]  # noqa: SIM115 - close() does
        path = [path for path in sys.path if path]
        given = {**environment, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        # the server would load torch for each set of the variables that torchrun sets
        later = {name: given.pop(name) for name in [*given] if name.startswith("TORCHELASTIC_")}
        out, errors = self._files[0].fileno(), self._files[-1].fileno()
        with contextlib.chdir(folder or Path.cwd()):
            arguments = [json.dumps(later), *words]
            process = fork(__name__, arguments, errors, [out], given, path, [(f"{__name__}:prepare",)])
        assert isinstance(process, Forked), "there is no fork server"
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float = LIMIT) -> int:
        return self._process.wait(timeout)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def printed(self) -> list[str]:
        """Return what the command has written so far to its output, and to stderr if it is apart."""
        return [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in self._files]

    def communicate(self, timeout: float = LIMIT) -> list[str]:
        """Wait for the end, and return all that was written."""
        self.wait(timeout)
        return self.printed()

    def close(self) -> None:
        """Kill the command if it has not ended."""
        self.kill()
        for file in self._files:
            file.close()

    def __enter__(self) -> ForkedCommand:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_python(
    *words: str, folder: Path | None = None, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and return its exit status, its stdout and its stderr; see :class:`ForkedCommand`."""
    with ForkedCommand(words, folder, environment, errors_apart=True) as command:
        out, errors = command.communicate()
        return subprocess.CompletedProcess(command.args, command.wait(), out, errors)


def run_module(
    module: str, *arguments: str, folder: Path | None = None, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run a module with arguments; see :func:`run_python`."""
    return run_python("-m", module, *arguments, folder=folder, environment=environment)


# ---------------------------------------------------------------------------------------------------- in the processes
def prepare() -> None:
    """Load what most commands load: the OpInfos, and the compiler that custom ops are called with, take a second."""
    import torch._dynamo

    import verifier.cli.own_rules
    import verifier.cli.reading
    import verifier.cli.rules_work
    import verifier.cli.work
    import verifier.pytest_plugin  # noqa: F401
    from strategies.opinfo.source import SOURCE

    load_entry_points("dtensor_verifier.families", object)
    SOURCE.load()


def main() -> None:
    """Do what ``python`` does with its command line."""
    out, (variables, first, *others) = int(sys.argv[1]), sys.argv[2:]
    os.environ.update(json.loads(variables))
    os.dup2(out, 1)
    os.close(out)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()
    if first == "-m":
        sys.argv = others
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *others[1:]]
        exec(compile(others[0], "<string>", "exec", dont_inherit=True), vars(sys.modules["__main__"]))
    else:
        sys.argv = [first, *others]
        sys.path[0] = str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")
