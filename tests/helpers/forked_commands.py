"""Commands as ``python -m MODULE`` runs them, in processes that are forked from one that has loaded torch.

Loading it takes longer than most commands. What a command loads, and how soon, is tested with ``subprocess``.
"""

from __future__ import annotations

import contextlib
import gc
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from command_processes import LIMIT

from verifier.core.entry_points import load_entry_points
from verifier.processes.forks import Forked, fork

__all__ = ["run_module"]


def run_module(
    module: str, *arguments: str, folder: Path | None = None, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run a module with arguments in a folder to its end, in a process of its own.

    Its ``sys.path`` is that of this process, as are descriptors 0 to 2 of a shell: stdin is empty, stdout and stderr
    are returned.
    """
    path = [path for path in sys.path if path]
    given = {**environment, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors, contextlib.chdir(folder or Path.cwd()):
        words = [module, *arguments]
        process = fork(__name__, words, errors.fileno(), [out.fileno()], given, path, [(f"{__name__}:prepare",)])
        assert isinstance(process, Forked), "there is no fork server"
        try:
            status = process.wait(LIMIT)
        finally:
            process.kill()
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess([sys.executable, "-m", *words], status, *texts)


# ---------------------------------------------------------------------------------------------------- in the processes
def prepare() -> None:
    """Load what most commands need."""
    import verifier.cli.rules_work
    import verifier.cli.work
    import verifier.pytest_plugin  # noqa: F401

    load_entry_points("dtensor_verifier.families", object)


def main() -> None:
    """Be what ``python -m`` is."""
    out, (module, *arguments) = int(sys.argv[1]), sys.argv[2:]
    os.dup2(out, 1)
    os.close(out)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
