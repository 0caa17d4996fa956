"""What SIGTERM and SIGHUP leave of commands and of test sessions, in processes of their own: a record, and no ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from command_processes import wait_until
from forked_commands import Command
from leftovers import children, nothing_left_behind

from verifier.records.schema import RunRecord
from verifier.runs.store import RunStore

pytestmark = pytest.mark.ranks

TESTS = """
import torch

def test_with_ranks(verify):
    for length in range(2, 2000):
        verify(torch.mul, torch.arange(1.0, length), 2.0)
        print("has tried", length, flush=True)
"""


def has_begun(folder: Path, command: Command, begun: str) -> bool:
    journals = [path.read_text() for path in folder.glob("out/runs/*/journal.jsonl")]
    return any(begun in text for text in (*journals, *command.printed()))


def ended(
    folder: Path, words: Sequence[str], number: signal.Signals, begun: str, to_all: bool = False, fresh: bool = False
) -> tuple[int, str, RunRecord]:
    """Return the exit status and all that is printed of a command that was sent a signal once its journal, or all it
    prints, has ``begun`` in it, and its newest record.

    With ``to_all``, ranks and workers get the signal as well, which a scheduler sends to all of a job.
    """
    with nothing_left_behind():
        before = children()
        with Command(words, folder, fresh=fresh) as command:
            wait_until(lambda: has_begun(folder, command, begun), begun)
            wait_until(lambda: bool(children() - before - {command.pid}), "ranks or workers")
            below = children() - before - {command.pid}
            if to_all:
                for pid in below:
                    os.kill(pid, number)
                time.sleep(0.3)
            command.send_signal(number)
            (said,) = command.communicate()
            status = command.wait()
    run = RunStore(folder / "out").newest()
    assert run is not None
    return status, said, run


@pytest.mark.parametrize(
    ("command", "begun", "to_all"),
    [
        (["run", "embedding", "--mesh", "2", "--profile", "nightly"], '"trial"', True),
        (["gate", "--fresh"], '"trial"', False),
        (["report", "--fresh"], '"trial"', False),
    ],
    ids=["run", "gate", "report"],
)
def test_a_run_is_recorded(command: list[str], begun: str, to_all: bool, tmp_path: Path) -> None:
    program = ["-m", "verifier", *command, "--out", "out"]
    status, said, run = ended(tmp_path, program, signal.SIGTERM, begun, to_all, fresh=to_all)
    assert status == 143, said
    assert not run.complete
    assert run.trials
    assert run.counts.get("DIED", 0) == 0  # a rank that the signal had ended would look so
    assert [one.reason for one in run.untested if one.what == "the rest of the run"] == ["interrupted"]
    assert "Traceback" not in said


def test_a_rule_check_is_recorded(tmp_path: Path) -> None:
    program = ["-m", "verifier", "rules", "a*", "--out", "out"]
    status, said, run = ended(tmp_path, program, signal.SIGHUP, "OpChecked", to_all=True)
    assert status == 129, said
    assert run.rules is not None
    assert not run.complete
    assert run.rules.ops
    assert not any(op.died for op in run.rules.ops.values())


def test_a_test_session_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    program = ["-m", "pytest", "-s", "-p", "no:cacheprovider", "--verifier-out", "out", "test_it.py"]
    status, said, run = ended(tmp_path, program, signal.SIGTERM, "has tried")
    assert status == 143, said
    assert not run.complete
    assert run.trials


RULES = """
import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.experimental import register_sharding

for op in (torch.ops.aten.exp.default, torch.ops.aten.sin.default, torch.ops.aten.tanh.default):
    register_sharding(op)(lambda x: [([Replicate()], [Replicate()])])
"""


ONE_WRONG_RULE = """
import torch
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.experimental import register_sharding

register_sharding(torch.ops.aten.exp.default)(lambda x: [([one], [one]) for one in (Replicate(), Partial())])
"""


@pytest.mark.parametrize("rules", [RULES, ONE_WRONG_RULE], ids=["checking", "confirming"])
def test_the_gate_on_own_strategies_tries_no_ranks_once_its_rule_check_was_interrupted(
    tmp_path: Path, rules: str
) -> None:
    (tmp_path / "own.py").write_text(rules)
    program = ["-m", "verifier", "gate", "--import", "own.py", "--out", "out"]
    status, said, run = ended(tmp_path, program, signal.SIGINT, "OpChecked")
    assert status == 2, said
    assert run.rules is not None
    assert not run.complete
    assert len(RunStore(tmp_path / "out").ids()) == 1
    assert "on ranks: not tried, because level 1 was interrupted" in said
