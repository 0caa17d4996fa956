"""What is left behind is seen, also where its parent is gone, and what others have is not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import leftovers
import pytest
from leftovers import nothing_left_behind, of_others

pytestmark = pytest.mark.processes

ORPHAN = """
import os, socket, time

if os.fork():
    os._exit(0)
with socket.create_server(("127.0.0.1", 0)):
    print(os.getpid(), flush=True)
    os.close(1)  # whoever reads waits for the end of it
    time.sleep(300)
"""
USERS = {
    "open": """
import sys, tempfile
with tempfile.NamedTemporaryFile() as file:
    print(file.name, flush=True)
    sys.stdin.read()
""",
    "a semaphore": """
import multiprocessing, sys
lock = multiprocessing.get_context("spawn").Lock()
print("/dev/shm/sem." + lock._semlock.name.lstrip("/"), flush=True)
sys.stdin.read()
""",
}


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A name in shared memory that says nothing of who made it."""
    monkeypatch.setattr(leftovers, "PATIENCE", 0.2)
    path = Path(f"/dev/shm/nobody-knows-{os.getpid()}")
    yield path
    path.unlink(missing_ok=True)


def test_an_orphan_and_its_port_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "PATIENCE", 0.2)
    started = ""
    try:
        with pytest.raises(AssertionError) as caught, nothing_left_behind():
            started = subprocess.run([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True).stdout
        assert f"process {int(started)}" in str(caught.value)
        after, before = map(int, re.findall(r"(\d+) listening ports, (\d+) before", str(caught.value))[0])
        assert after == before + 1
    finally:
        if started:
            os.kill(int(started), signal.SIGKILL)


def test_a_file_in_shared_memory_is_left_whatever_its_name(shared: Path) -> None:
    with pytest.raises(AssertionError, match=shared.name), nothing_left_behind():
        shared.touch()
    shared.unlink()
    with nothing_left_behind():
        shared.touch()
        shared.unlink()


@pytest.mark.parametrize("program", USERS.values(), ids=USERS)
def test_a_file_that_another_program_uses_is_its_own(program: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        path = Path(other.stdout.readline().rstrip())
        assert path.exists()
        assert of_others(path, ours=[])
        assert not of_others(path, ours=[other.pid])
        other.communicate("")
    assert of_others(path, ours=[])  # it is gone
