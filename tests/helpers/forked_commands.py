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

__all__ = ["Command", "run_module", "run_python"]


class Command:
    """A command in a separate process, with the methods of :class:`subprocess.Popen` that tests need.

    It has the ``sys.path`` of this process. Its stdin is empty.

    Parameters
    ----------
    words
        What stands behind ``python``: ``-m`` and a module, ``-c`` and a program, or a file, and their arguments.
    folder
        Where the command runs; None for the folder of this process.
    errors_apart
        Whether stderr is not mixed into the output.
    fresh
        Whether Python itself is started, as a user does, instead of a fork.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path | None = None,
        environment: Mapping[str, str] = os.environ,
        errors_apart: bool = False,
        fresh: bool = False,
    ) -> None:
        self.args = [sys.executable, *words]
        self._files = [tempfile.TemporaryFile() for _ in range(1 + errors_apart)]  # noqa: SIM115 - close() does
        out, errors = self._files[0].fileno(), self._files[-1].fileno()
        path = [path for path in sys.path if path]
        given = {**environment, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        self._process: Forked | subprocess.Popen[bytes]
        if fresh:
            self._process = subprocess.Popen(
                self.args, cwd=folder, env=given, stdin=subprocess.DEVNULL, stdout=out, stderr=errors,
                preexec_fn=_heed_signals,
            )  # fmt: skip
            return
        # the server would load torch for each set of the variables that torchrun sets
        later = {name: given.pop(name) for name in [*given] if name.startswith("TORCHELASTIC_")}
        given["PYTHONHASHSEED"] = "0"
        arguments = [json.dumps(later), *words]
        with contextlib.chdir(folder or Path.cwd()):
            process = fork(__name__, arguments, errors, [out], given, path, [(f"{__name__}:prepare",)])
        assert process is not None, "there is no fork server"
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
        self.wait()
        for file in self._files:
            file.close()

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _heed_signals() -> None:
    """Handle signals as Python does, whatever a background shell, nohup or the server has had this process ignore."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run_python(
    *words: str, folder: Path | None = None, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and return its exit status, its stdout and its stderr; see :class:`Command`."""
    with Command(words, folder, environment, errors_apart=True) as command:
        out, errors = command.communicate()
        return subprocess.CompletedProcess(command.args, command.wait(), out, errors)


def run_module(
    module: str, *arguments: str, folder: Path | None = None, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run a module with arguments; see :func:`run_python`."""
    return run_python("-m", module, *arguments, folder=folder, environment=environment)


# ---------------------------------------------------------------------------------------------------- in the processes
def prepare() -> None:
    """Load what most commands load: the OpInfos, and the compiler that custom ops are called with, take a second.

    The command line itself takes 0.2 s: its modules, its options, and what typer loads for the first argument.
    """
    import torch._dynamo  # noqa: F401
    import typer._adapters  # noqa: F401

    import verifier.cli.main
    import verifier.cli.own_rules
    import verifier.cli.reading
    import verifier.cli.rules_work
    import verifier.cli.work
    import verifier.pytest_plugin
    from strategies.opinfo.source import SOURCE

    verifier.cli.main._commands()
    load_entry_points("dtensor_verifier.families", object)
    SOURCE.load()


def main() -> None:
    """Do what ``python`` does with its command line."""
    out, (variables, first, *others) = int(sys.argv[1]), sys.argv[2:]
    os.environ.update(json.loads(variables))
    os.dup2(out, 1)
    os.close(out)
    _heed_signals()
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
