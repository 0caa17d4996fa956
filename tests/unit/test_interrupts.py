"""What interrupts do while a run is recorded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_factory import make_run

from verifier import cli, cli_common, entry, recording
from verifier.interrupts import one_interrupt_at_a_time
from verifier.plan import Plan
from verifier.records import RunHeader
from verifier.runs import RunStore

START = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, sys.argv.pop())
runpy.run_module("verifier", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    """Have the handler that Python begins with, also where tests run in the background and interrupts are ignored."""
    kept = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, kept)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)


def test_interrupts_at_once_are_one() -> None:
    reached = 0
    with one_interrupt_at_a_time(60.0):
        try:
            interrupt()
            pytest.fail("was not interrupted")
        except KeyboardInterrupt:
            interrupt()
            interrupt()
            reached = 1
    assert reached == 1
    with pytest.raises(KeyboardInterrupt):  # as before
        interrupt()


def test_a_later_one_counts() -> None:
    with one_interrupt_at_a_time(0.05):
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        interrupt()
        time.sleep(0.1)
        with pytest.raises(KeyboardInterrupt):
            interrupt()


def test_what_handles_or_ignores_interrupts_otherwise_stays() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with one_interrupt_at_a_time():
        interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    entered: list[bool] = []
    thread = threading.Thread(target=lambda: entered.extend(one_interrupt_at_a_time().__enter__() is None for _ in [0]))
    thread.start()
    thread.join()
    assert entered == [True]


def test_one_more_while_a_run_ends_says_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted_again(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recording.Campaign, "run", interrupted_again)
    run_id = "20260101T000000-000000-aaaaaa"
    header = RunHeader(run_id, "", 0, "dev", [], [], [], "cpu", 1, None, [], {}, "", request={"patterns": []})
    plan = Plan(header, {}, {}, (), (), seed=0, max_examples=1, combinations=1, time_limit=None)

    def run() -> None:
        recording.record(plan, RunStore(tmp_path))

    assert entry._status_of(run) == 130
    said = capsys.readouterr().err
    assert said.startswith("interrupted before the record was written; what was tried is kept in ")
    assert said.endswith(f"journal.jsonl; to go on: python -m verifier run --resume {run_id} --out {tmp_path}\n")
    assert list(tmp_path.rglob("journal.jsonl"))
    assert not list(tmp_path.rglob("run.json"))


@pytest.mark.parametrize("meanwhile", ["write_report", "print_summary"])
def test_one_after_the_record_says_where_that_is_and_how_to_see_it(
    meanwhile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    run = make_run()
    monkeypatch.setattr(cli, "_make", lambda *_: run)
    monkeypatch.setattr(cli_common if meanwhile == "write_report" else cli, meanwhile, interrupted)
    monkeypatch.setattr(sys, "argv", ["verifier", "run", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"interrupted; run {run.header.id} is kept in {tmp_path}/runs/{run.header.id}; "
        f"to see it: python -m verifier report --out {tmp_path}\n"
    )


def test_one_while_the_last_files_of_a_run_are_written_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    header = make_run().header
    monkeypatch.setattr(recording.Campaign, "run", lambda _: None)
    monkeypatch.setattr(recording.Summary, "record", lambda *_: make_run())
    monkeypatch.setattr(recording.RedistributionGraph, "write_json", interrupted)
    plan = Plan(header, {}, {}, (), (), seed=0, max_examples=1, combinations=1, time_limit=None)
    store = RunStore(tmp_path)

    def run() -> None:
        recording.record(plan, store)

    assert entry._status_of(run) == 2
    assert capsys.readouterr().err == f"interrupted; {store.where_kept(header.id)}\n"
    assert store.newest() == make_run()


def test_one_while_the_program_is_loaded_is_status_2_and_a_line(tmp_path: Path) -> None:
    """In a process of its own, which has the module that it imports first interrupt it."""
    (tmp_path / "torch.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT); input()")
    started = subprocess.run(
        [sys.executable, "-c", START, str(tmp_path)], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert (started.returncode, started.stdout, started.stderr) == (2, "", "interrupted\n")


@pytest.mark.parametrize(
    ("command", "meanwhile"), [(["run", "embedding"], "make_plan"), (["replay", "ab"], "RunStore")]
)
def test_outside_of_a_run_one_is_status_2_and_a_line(
    command: list[str],
    meanwhile: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, meanwhile, interrupted)
    monkeypatch.setattr(sys, "argv", ["verifier", *command, "--out", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "interrupted\n"
