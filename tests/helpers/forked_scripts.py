"""Scripts of findings, run in processes that are forked from one that has loaded torch, as are the ranks they start.

A script that runs as its user runs it loads torch once for itself and once for each rank. Some tests do so; those of
what a script decides need not.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import torch.distributed.tensor  # noqa: F401 - what is loaded once

from verifier.processes.forks import Forked, fork

__all__ = ["run_to_end"]


def run_to_end(path: Path, limit: float) -> tuple[int | None, str]:
    """Do as :func:`verifier.processes.child.run_to_end`."""
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors, contextlib.chdir(path.parent):
        process = fork(__name__, [str(path)], errors.fileno(), [out.fileno()], given, [p for p in sys.path if p])
        assert isinstance(process, Forked), "there is no fork server"
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            process.kill()
        said = ""
        for file in (errors, out):
            file.seek(0)
            said += file.read().decode()
    return status, said


def main() -> None:
    """Run a script as ``python FILE`` does, with forks in the place of new processes."""
    out, (path,) = int(sys.argv[1]), sys.argv[2:]
    os.dup2(out, 1)
    os.close(out)
    by_fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: by_fork  # type: ignore[assignment]
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")
