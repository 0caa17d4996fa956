"""What a Ctrl-C, SIGTERM and SIGHUP do while a run is recorded."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from run_factory import make_run

from verifier.campaign import campaign
from verifier.campaign import recorded as recording
from verifier.campaign.plan import Plan
from verifier.cli import main as entry
from verifier.cli import work
from verifier.core.interrupts import ENDING_SIGNALS, Interrupts, one_interrupt_at_a_time
from verifier.records.schema import RunHeader
from verifier.report import latest
from verifier.rules.campaign import recorded as rules_recording
from verifier.rules.campaign.workers import Finished
from verifier.runs.store import RunStore

START = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.path.insert(0, sys.argv.pop())
runpy.run_module("verifier", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    """Have the handlers that Python begins with, also where tests run in the background and interrupts are ignored."""
    kept = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def interrupt(number: signal.Signals = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)


ASKED = [(signal.SIGTERM, 143), (signal.SIGHUP, 129)]
"""What ends a program besides a Ctrl-C, and the exit status that shells expect of it."""


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


def test_a_later_interrupt_counts() -> None:
    with one_interrupt_at_a_time(0.05):
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        interrupt()
        time.sleep(0.1)
        with pytest.raises(KeyboardInterrupt):
            interrupt()


def test_different_signals_at_once_are_one_interrupt_and_the_last_is_known() -> None:
    with one_interrupt_at_a_time(60.0, ENDING_SIGNALS) as interrupts:
        assert (interrupts.status, str(interrupts)) == (None, "interrupted")
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        assert (interrupts.status, str(interrupts)) == (None, "interrupted")
        interrupt(signal.SIGTERM)
        assert (interrupts.status, str(interrupts)) == (143, "interrupted by SIGTERM")
        interrupt(signal.SIGHUP)
        assert interrupts.status == 129
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_that_is_ignored_as_under_nohup_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with one_interrupt_at_a_time(0.0, ENDING_SIGNALS) as interrupts:
        interrupt(signal.SIGHUP)
    assert interrupts.status is None


class InDestructor:
    """Gets a signal while it is destroyed, where Python drops what is raised."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def __del__(self) -> None:
        interrupt(self.number)


class InCollector:
    """Gets a signal when the garbage collector runs, as in the callback that Hypothesis has it call."""

    def __init__(self, number: signal.Signals) -> None:
        gc.callbacks.append(self)
        try:
            self.number = number
            gc.collect()
        finally:
            gc.callbacks.remove(self)

    def __call__(self, phase: str, _: object) -> None:
        if phase == "start":
            interrupt(self.number)


@pytest.mark.parametrize("dropping", [InDestructor, InCollector])
@pytest.mark.parametrize("words", [("run", "embedding", "--mesh", "2"), ("rules", "aten.neg.default", "--jobs", "1")])
def test_a_run_ends_though_python_drops_the_interrupt(
    words: tuple[str, ...], dropping: Callable[[signal.Signals], object], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    printed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    monkeypatch.setattr(campaign.Investigation, "replay_known", lambda _: dropping(signal.SIGTERM))
    monkeypatch.setattr(rules_recording.WorkerSet, "start", lambda _: dropping(signal.SIGTERM))
    monkeypatch.setattr(rules_recording.WorkerSet, "run", lambda *_: iter([Finished(0, 0)] * 9))
    monkeypatch.setattr(sys, "argv", ["verifier", *words, "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 143
    assert not printed
    run = RunStore(tmp_path).newest()
    assert run is not None
    assert not run.complete
    assert run.trials < 100


class Broken:
    """Fails while it is destroyed."""

    def __del__(self) -> None:
        raise ValueError


def test_what_else_python_drops_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: printed.append(unraisable.exc_type))
    with one_interrupt_at_a_time(60.0):
        Broken()
        InDestructor(signal.SIGINT)
    interrupted = InDestructor(signal.SIGINT)
    del interrupted
    assert printed == [ValueError, KeyboardInterrupt]


@pytest.mark.parametrize(("number", "status"), ASKED)
def test_a_run_that_a_signal_ends_is_recorded_and_has_the_status_of_it(
    number: signal.Signals, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it had found: the status says how it ended, and the record what it is."""
    monkeypatch.setattr(campaign.Investigation, "replay_known", lambda _: interrupt(number))
    monkeypatch.setattr(sys, "argv", ["verifier", "run", "embedding", "--mesh", "2", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == status
    run = RunStore(tmp_path).newest()
    assert run is not None
    assert not run.complete
    assert [one.reason for one in run.untested if one.what == "the rest of the run"] == ["interrupted"]


@pytest.mark.parametrize(("number", "status"), ASKED)
def test_a_rule_check_that_a_signal_ends_is_recorded_and_has_the_status_of_it(
    number: signal.Signals, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules_recording._RulesRun, "check", lambda _: interrupt(number))
    monkeypatch.setattr(sys, "argv", ["verifier", "rules", "aten.relu.default", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == status
    run = RunStore(tmp_path).newest()
    assert run is not None
    assert run.rules is not None
    assert not run.complete


def test_a_second_interrupt_while_a_rule_check_ends_says_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rules_recording._RulesRun, "check", interrupted)
    monkeypatch.setattr(rules_recording._RulesRun, "finish", interrupted)
    monkeypatch.setattr(sys, "argv", ["verifier", "rules", "aten.relu.default", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 130
    (journal,) = tmp_path.rglob("journal.jsonl")
    said = capsys.readouterr().err
    assert said.endswith(f"interrupted before the record was written; what was checked is listed in {journal}\n")
    assert not list(tmp_path.rglob("run.json"))


def test_what_handles_or_ignores_interrupts_otherwise_stays() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with one_interrupt_at_a_time():
        interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    entered: list[bool] = []
    thread = threading.Thread(
        target=lambda: entered.extend(one_interrupt_at_a_time().__enter__() is not None for _ in [0])
    )
    thread.start()
    thread.join()
    assert entered == [True]


def test_a_second_interrupt_while_a_run_ends_says_what_is_kept(
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

    assert entry._status_of(run, Interrupts()) == 130
    said = capsys.readouterr().err
    assert said.startswith("interrupted before the record was written; what was tried is kept in ")
    assert said.endswith(f"journal.jsonl; to go on: python -m verifier run --resume {run_id} --out {tmp_path}\n")
    assert list(tmp_path.rglob("journal.jsonl"))
    assert not list(tmp_path.rglob("run.json"))


@pytest.mark.parametrize("meanwhile", ["write_report", "print_summary"])
def test_an_interrupt_after_the_record_says_where_that_is_and_how_to_see_it(
    meanwhile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    run = make_run()
    monkeypatch.setattr(work, "make_run", lambda *_: run)
    monkeypatch.setattr(latest if meanwhile == "write_report" else work, meanwhile, interrupted)
    monkeypatch.setattr(sys, "argv", ["verifier", "run", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"interrupted; run {run.header.id} is kept in {tmp_path}/runs/{run.header.id}; "
        f"to see it: python -m verifier report --out {tmp_path}\n"
    )


def test_an_interrupt_while_the_last_files_of_a_run_are_written_says_where_they_are(
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

    assert entry._status_of(run, Interrupts()) == 2
    assert capsys.readouterr().err == f"interrupted; {store.where_kept(header.id)}\n"
    assert store.newest() == make_run()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("SIGINT", 2, "interrupted\n"),
        ("SIGTERM", 143, "interrupted by SIGTERM\n"),
        ("SIGHUP", 129, "interrupted by SIGHUP\n"),
    ],
)
def test_an_interrupt_while_the_program_is_loaded_is_a_status_and_a_line(
    name: str, status: int, said: str, tmp_path: Path
) -> None:
    """In a process of its own, which has the module that it imports first interrupt it."""
    (tmp_path / "torch.py").write_text(f"import os, signal; os.kill(os.getpid(), signal.{name}); input()")
    started = subprocess.run(
        [sys.executable, "-c", START, "run", str(tmp_path)], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert (started.returncode, started.stdout, started.stderr) == (status, "", said)


@pytest.mark.parametrize(
    ("command", "meanwhile"), [(["run", "embedding"], "make_plan"), (["replay", "ab"], "RunStore")]
)
def test_an_interrupt_outside_of_a_run_is_status_2_and_a_line(
    command: list[str],
    meanwhile: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(work, meanwhile, interrupted)
    monkeypatch.setattr(sys, "argv", ["verifier", *command, "--out", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(("number", "status"), ASKED)
def test_outside_of_a_run_a_signal_is_its_status_and_a_line(
    number: signal.Signals,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(work, "make_plan", lambda *_: interrupt(number))
    monkeypatch.setattr(sys, "argv", ["verifier", "run", "embedding", "--out", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == status
    assert capsys.readouterr().err == f"interrupted by {number.name}\n"
