"""However the script of a finding ends, its ranks and their semaphores end with it."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from verifier.findings.script.render import run_script
from verifier.processes.forks import FORKS, Forked

pytestmark = pytest.mark.processes

LIMIT = 30.0
"""Seconds that a busy machine may take for anything here."""

SCRIPT = """
import multiprocessing
import subprocess
import sys
from pathlib import Path

rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
lock = multiprocessing.get_context("spawn").Lock()  # as the queue of a script has
Path({path!r}).write_text(f"{{rank.pid}} {{lock._semlock.name}}")
rank.wait()
"""


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, also if its new parent does not ask how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("forks", [True, False], ids=["forked", "in the usual way"])
@pytest.mark.parametrize("error", [subprocess.TimeoutExpired("finding.py", 90.0), KeyboardInterrupt()], ids=repr)
def test_ranks_end_with_the_script(
    error: BaseException, forks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = tmp_path / "pid"
    if not forks:
        monkeypatch.setenv(FORKS, "off")

    def cut_short(*_: object, **__: object) -> None:
        until = time.monotonic() + LIMIT
        while not (noted.exists() and noted.read_text()) and time.monotonic() < until:
            time.sleep(0.01)
        raise error

    monkeypatch.setattr(Forked if forks else subprocess.Popen, "wait", cut_short)
    source = SCRIPT.format(path=str(noted))
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            run_script(source)
    else:
        assert run_script(source) == ("not run to its end within 90 s", "")
    rank, name = noted.read_text().split()
    semaphore = Path("/dev/shm", f"sem.{name.lstrip('/')}")
    until = time.monotonic() + LIMIT
    while not (has_ended(int(rank)) and not semaphore.exists()) and time.monotonic() < until:
        time.sleep(0.01)
    assert has_ended(int(rank))
    assert not semaphore.exists()
