"""The process of a rank as its controller handles it, whatever becomes of it; no rank is started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable

import pytest

from verifier.meshes.worker_program import ProgramSpec, WorkerProgram
from verifier.processes.forks import FORKS

pytestmark = pytest.mark.processes

SPEC = ProgramSpec(imports=(), memory_limit=None, log_level=30, hash_seed=0)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[], WorkerProgram]:
    """Return a function that starts a program which does nothing, in the place of a worker."""
    real = subprocess.Popen

    def nothing(*_: object, **__: object) -> subprocess.Popen[bytes]:
        return real(["sleep", "60"])

    monkeypatch.setenv(FORKS, "off")
    monkeypatch.setattr(subprocess, "Popen", nothing)
    return lambda: WorkerProgram(SPEC, 0)


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGTERM, "SIGTERM"), (signal.SIGRTMIN, "SIGRTMIN"), (signal.SIGRTMIN + 2, "SIGRTMIN+2")],
)
def test_whatever_signal_ended_it_is_named(start: Callable[[], WorkerProgram], number: int, name: str) -> None:
    worker = start()
    os.kill(worker.pid, number)
    assert worker.ending() == f"signal {name}"
    worker.close()


def test_a_process_that_cannot_be_killed_is_left(
    start: Callable[[], WorkerProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start()
    before = open_files()
    popen = worker._process

    def busy(timeout: float | None = None) -> int:
        assert timeout is not None, "waits without a limit"
        raise subprocess.TimeoutExpired("worker", timeout)

    with monkeypatch.context() as patched:
        patched.setattr(popen, "wait", busy)
        worker.close()
    assert open_files() < before
    popen.wait(timeout=60)


def test_a_process_that_cannot_be_started_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setenv(FORKS, "off")
    monkeypatch.setattr(subprocess, "Popen", refused)
    before = open_files()
    with pytest.raises(BlockingIOError):
        WorkerProgram(SPEC, 0)
    assert open_files() == before


def open_files() -> set[str]:
    """Return what this process has open, by descriptor; not the folder that is read for that."""
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}
