"""What a run shows while it goes on: a table on a terminal, lines in a log, a journal to be followed, log lines."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from plain_records import a_finding, a_header
from rich.console import Console

from verifier.cli.main import main
from verifier.cli.progress import ProgressDisplay
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.logs import LogLevel, log_to_stderr
from verifier.core.observation import Fate, Observation
from verifier.core.verdict import Verdict, VerdictKind
from verifier.events import FindingReported, MeshStarted, PoolRestarted, RunFinished, RunStarted, TrialFinished
from verifier.runs.journal_lines import journal_listener
from verifier.runs.store import RunStore

MESH = MeshSpec((4,))


def trials(kinds: list[VerdictKind]) -> Iterator[TrialFinished]:
    """Yield the end of one trial for each verdict, every two of them of one case."""
    case = OpCase("aten.neg.default", "torch.neg")
    for number, kind in enumerate(kinds):
        if number % 2 == 0:
            case = OpCase("aten.neg.default", "torch.neg")
        yield TrialFinished(Observation(Trial(case, MESH, ()), Fate.COMPLETED, ()), Verdict(kind), ())


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def show(terminal: bool, own_rules: Sequence[str] = ()) -> str:
    """Return what is printed of a run of 20 trials in 4 seconds, with one death, one finding and one restart."""
    out = io.StringIO()
    clock = Clock()
    console = Console(file=out, force_terminal=terminal, width=120, color_system=None)
    display = ProgressDisplay(console, clock)
    display(RunStarted(replace(a_header(), own_rules=[*own_rules])))
    display(MeshStarted(MESH, "embedding", 10))
    for event in trials([VerdictKind.PASS] * 19 + [VerdictKind.DIED]):
        clock.now += 0.2
        display(event)
    display(PoolRestarted(MESH, "died: rank 1", 0.25))
    display(FindingReported(a_finding(), "a group", "a group"))
    display(FindingReported(a_finding(), "another group", "a group"))  # it turned out to be the same
    if terminal:
        console.print(display._table())
    display(RunFinished(4.0, True))
    return out.getvalue()


def test_a_terminal_gets_a_table() -> None:
    lines = show(terminal=True).splitlines()
    header = next(line for line in lines if line.lstrip().startswith("mesh"))
    assert header.split() == ["mesh", "cases", "trials", "trials/s", "failed", "restarts", "seconds"]
    row = next(line for line in lines if "10/10" in line)
    numbers = row.split()
    assert numbers[:3] == ["embedding", "4", "10/10"]
    assert numbers[-5:] == ["20", "5", "1", "1", "4"]  # trials, trials/s, failed, restarts, seconds
    assert any("findings: 1 new, 0 known" in line and "1 restart" in line for line in lines)


def test_a_finding_under_rules_of_ones_own_is_not_called_new_before_torch_was_asked() -> None:
    assert "found WRONG_GRADIENT a1: weight.grad row 3: got 0.0, expected 1.7" in show(False, ["aten.exp.default"])
    assert "findings: 1 found, 0 known" in show(True, ["aten.exp.default"])


def test_a_log_gets_lines() -> None:
    lines = show(terminal=False).splitlines()
    assert lines[1:] == [
        "ranks of mesh 4 mended in 0.2 s: died: rank 1",
        "new WRONG_GRADIENT a1: weight.grad row 3: got 0.0, expected 1.7",
        "embedding 4: 20 trials, 1 failed, 4.0 s",
    ]


def test_the_rate_is_that_of_late() -> None:
    clock = Clock()
    display = ProgressDisplay(Console(file=io.StringIO(), force_terminal=False), clock)
    display(MeshStarted(MESH, "embedding", 1000))
    for event in trials([VerdictKind.PASS] * 100):
        clock.now += 1.0
        display(event)
    for event in trials([VerdictKind.PASS] * 1000):
        clock.now += 0.01
        display(event)
    assert display._rows[0].rate == pytest.approx(100, rel=0.02)


@pytest.mark.processes
def test_the_journal_can_be_followed(tmp_path: Path) -> None:
    """``tail -f`` shows each event before the next one happens."""
    header = a_header()
    with RunStore(tmp_path).open_run(header) as writer:
        command = ["tail", "-n", "+1", "-s", "0.05", "-f", str(writer.journal_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tail:
            assert tail.stdout is not None
            listen = journal_listener(writer)
            assert header.id in tail.stdout.readline()
            for event, word in (
                (MeshStarted(MESH, "embedding", 7), '"mesh started"'),
                (next(trials([VerdictKind.HANG])), '"HANG"'),
                (PoolRestarted(MESH, "HANG", 1.5), '"pool restarted"'),
            ):
                listen(event)
                assert word in tail.stdout.readline()  # waits for it: nothing else is written meanwhile
            tail.kill()


# ------------------------------------------------------------------------------------------------------------ log lines
@pytest.fixture
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    loggers = [root, logging.getLogger("verifier"), logging.getLogger("strategies")]
    handlers, levels = list(root.handlers), [logger.level for logger in loggers]
    yield
    root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        (LogLevel.ERROR, ["ERROR"]),
        (LogLevel.WARNING, ["ERROR", "WARNING"]),
        (LogLevel.INFO, ["ERROR", "WARNING", "INFO"]),
        (LogLevel.DEBUG, ["ERROR", "WARNING", "INFO", "DEBUG"]),
    ],
)
def test_log_lines_from_a_level_on(
    level: LogLevel, shown: list[str], capsys: pytest.CaptureFixture[str], restored_logging: None
) -> None:
    log_to_stderr(LogLevel.DEBUG)
    log_to_stderr(level)  # takes the place of the first
    for number in (logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG):
        logging.getLogger("verifier.meshes").log(number, "rank 1: a line")
        logging.getLogger("strategies.mine").log(number, "another")
        logging.getLogger("of.others").log(number, "not ours")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in lines if line.endswith("verifier.meshes: rank 1: a line")] == shown
    assert [line.split()[2] for line in lines if line.endswith("strategies.mine: another")] == shown
    others = [line.split()[2] for line in lines if line.endswith("of.others: not ours")]
    assert others == [name for name in shown if name in ("ERROR", "WARNING")]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--rank-memory", "4GB"], "did you mean 4GiB?"),
        (["--rank-memory", "much"], "--rank-memory: size 'much' is not a number of bytes"),
        (["--rank-memory", "1MiB"], "at least 256 MiB are needed"),
        (["--log-level", "loud"], "'warning'"),
    ],
)
@pytest.mark.parametrize("command", ["run", "report", "gate"])
def test_a_mistake_ends_with_status_2(
    command: str,
    options: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    restored_logging: None,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["verifier", command, *options])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
