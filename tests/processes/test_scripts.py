"""A script that is forked, and its ranks, are as those that start in the usual way."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from leftovers import nothing_left_behind

from verifier.processes.forks import FORKS, server_pids
from verifier.processes.scripts import load_scripts_ahead, run_to_end

pytestmark = pytest.mark.processes

SCRIPT = """
import json, multiprocessing, os, signal, sys

def about():
    handlers = [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    given = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    return [sys.argv, os.getcwd(), sys.path, handlers, given, __name__, sys.modules["__main__"].__file__]

HIDDEN = ("DTENSOR_VERIFIER_FORKS", "PYTHONHASHSEED", "OMP_NUM_THREADS")

def rank(number, connection):
    connection.send([about(), hash("text"), connection.recv()])
    print("rank", number, file=sys.stderr, flush=True)
    sys.exit(number)

if __name__ == "__main__":
    context, told, ranks = multiprocessing.get_context("spawn"), [], []
    for number in range(2):
        ours, theirs = context.Pipe()
        os.environ["PYTHONHASHSEED"] = str(number)
        ranks.append(context.Process(target=rank, args=(number, theirs), daemon=True))
        ranks[-1].start()
        theirs.close()
        ours.send(f"to {number}")
        told.append(ours.recv())
        ranks[-1].join()
    print(json.dumps([about(), told, [one.exitcode for one in ranks]]))
    sys.exit(3)
"""
HANGS = """
import multiprocessing, time

if __name__ == "__main__":
    rank = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(300,))
    rank.start()
    print("started", rank.pid, flush=True)
    rank.join()
"""


@pytest.fixture
def no_signal_ignored() -> Iterator[None]:
    """A job in the background ignores some signals, and a process that starts in the usual way inherits that."""
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def ran(path: Path) -> tuple[list[str], Any]:
    status, said = run_to_end(path, 60.0)
    assert status == 3, said
    *errors, told = said.splitlines()
    return errors, json.loads(told)


def test_a_script_and_its_ranks_are_the_same_in_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_signal_ignored: None
) -> None:
    path = tmp_path / "finding.py"
    path.write_text(SCRIPT)
    (tmp_path / "only_here").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "only_here")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "only_here"))
    for name in ("MASTER_PORT", "RANK", "TORCHELASTIC_USE_AGENT_STORE"):  # by which torch waits for torchrun's store
        monkeypatch.setenv(name, "1")
    forked = ran(path)
    monkeypatch.setenv(FORKS, "off")
    assert forked == ran(path)
    errors, (script, told, codes) = forked
    assert errors == ["rank 0", "rank 1"]
    assert codes == [0, 1]
    assert [answer for _, _, answer in told] == ["to 0", "to 1"]
    assert told[0][1] != told[1][1], "ranks have hash seeds of their own"
    assert script[1] == str(tmp_path)
    assert not {"MASTER_PORT", "RANK", "TORCHELASTIC_USE_AGENT_STORE"} & set(script[4])
    assert str(tmp_path / "only_here") not in script[2], "a user who runs the script does not have the folder"


def test_ranks_end_with_a_script_that_takes_too_long(tmp_path: Path) -> None:
    path = tmp_path / "finding.py"
    path.write_text(HANGS)
    with nothing_left_behind():
        assert run_to_end(path, 3.0) == (None, "")


def test_a_script_is_forked_from_what_was_loaded_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FORKS, raising=False)  # servers of its own
    load_scripts_ahead()
    started = server_pids()
    path = tmp_path / "script.py"
    path.write_text("import sys; print('torch._dynamo' in sys.modules)")
    assert run_to_end(path, 60.0) == (0, "True\n")
    assert started
    assert server_pids() == started


def test_without_a_server_a_script_is_run_in_the_usual_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORKS, "off")
    path = tmp_path / "finding.py"
    path.write_text(f"import os, sys\nprint(os.getppid() == {os.getpid()}, 'torch' in sys.modules)\n")
    assert run_to_end(path, 60.0) == (0, "True False\n")


def test_scripts_that_run_at_a_time_leave_this_process_in_its_folder(tmp_path: Path) -> None:
    """Each runs in its own folder; the folder of the process is shared by its threads."""
    before = Path.cwd()
    paths = [tmp_path / name / "script.py" for name in "abcd"]
    for path in paths:
        path.parent.mkdir()
        path.write_text("import os, time\ntime.sleep(0.2)\nprint(os.path.basename(os.getcwd()), flush=True)")
    with ThreadPoolExecutor(len(paths)) as threads:
        ended = list(threads.map(lambda path: run_to_end(path, 60.0), paths))
    assert ended == [(0, f"{path.parent.name}\n") for path in paths]
    assert Path.cwd() == before
