"""Runs scripts of findings to their end, in processes forked from one that has loaded torch alone.

What a script and its ranks import, they import themselves; only torch is loaded already. Without fork servers they are
started in the usual way, as in a user's hands.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from verifier.processes.child import without_launcher
from verifier.processes.forks import FORKS, Forked, fork, load_ahead, servers_name

__all__ = ["TORCH_ALONE", "WITH_COMPILER", "load_scripts_ahead", "run_to_end"]

TORCH_ALONE = "verifier.processes.script_process"
"""The module of the servers that have loaded torch alone."""
WITH_COMPILER = (("importlib:import_module", "torch.distributed.tensor.debug"),)
"""What the servers of scripts do first: load torch's compiler, which otherwise each rank's first collective does."""
ENDING_LIMIT = 2.0
"""Seconds that processes get to end after each signal."""


def load_scripts_ahead() -> None:
    """Start what scripts are forked from, which loads while this process does other work."""
    load_ahead(TORCH_ALONE, WITH_COMPILER, _server_environment(), [p for p in sys.path if p], TORCH_ALONE)


def run_to_end(path: Path, limit: float, python: str | None = None) -> tuple[int | None, str]:
    """Run a script in its folder, and end all processes that it started.

    Return the exit status (None after ``limit`` seconds) and the output, stderr first.

    Parameters
    ----------
    python
        The interpreter; by default that of this process.
    """
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as out:
        process = _start(path, out, errors) if python is None else _start_anew(python, path, out, errors)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:  # after a Ctrl-C as well
            _end_group(process)
        said = ""
        for file in (errors, out):
            file.seek(0)
            said += file.read().decode(errors="replace")
    return status, said


def _start(path: Path, out: IO[bytes], errors: IO[bytes]) -> Forked | subprocess.Popen[bytes]:
    arguments = [json.dumps([str(path.parent), *_usual_path()]), str(path)]
    forked = fork(
        TORCH_ALONE, arguments, errors.fileno(), [out.fileno()], _server_environment(), [p for p in sys.path if p],
        WITH_COMPILER, TORCH_ALONE, folder=str(path.parent.absolute()),
    )  # fmt: skip
    return forked or _start_anew(sys.executable, path, out, errors)


def _server_environment() -> dict[str, str]:
    return {**_environment(), FORKS: servers_name(), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}


def _environment() -> dict[str, str]:
    environment = without_launcher()  # with torchrun's, the ranks of the script would wait for torchrun's store
    environment.pop("PYTHONPATH", None)
    return environment


def _start_anew(python: str, path: Path, out: IO[bytes], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [python, str(path)],
        cwd=path.parent,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=errors,
        start_new_session=True,  # a group with its own processes, which could outlive it
    )


@functools.cache
def _usual_path() -> tuple[str, ...]:
    """Return ``sys.path`` of a new interpreter, without the folder of what it runs and without PYTHONPATH."""
    given = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    program = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.path[1:]))"]
    said = subprocess.run(program, env=given, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    return tuple(json.loads(said.stdout.splitlines()[-1]))


def _end_group(leader: Forked | subprocess.Popen[bytes]) -> None:
    """End the processes of a group, first with SIGTERM.

    The process that unlinks their semaphores ignores SIGTERM, and ends after them.
    """
    if not leader.pid:  # it was never started
        return
    for asked in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + ENDING_LIMIT
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, asked)
            while time.monotonic() < until:
                leader.poll()
                os.killpg(leader.pid, 0)
                time.sleep(0.02)
            continue
        return
