"""The gate, as a sequence of the commands that a user gives, with a strategy of one's own that changes in between."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_commands import run_module

from verifier.cli.main import main

pytestmark = [pytest.mark.ranks, pytest.mark.cli, pytest.mark.long]

Gate = Callable[..., tuple[int, str]]

OP = "aten.cumsum.default"
TRIED = (OP, "--mesh", "2", "--max-examples", "2", "--import", "my_rules.py")
RULES = """
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding


@register_sharding(torch.ops.aten.cumsum.default)
def cumsum(x, dim, dtype=None):
    rules = [([Replicate()], [Replicate(), None, None])]
    return rules + [([Shard(d)], [Shard(d), None, None]) for d in range(x.ndim) if CONDITION]
"""
RIGHT, WRONG = RULES.replace("CONDITION", "d != dim % x.ndim"), RULES.replace("CONDITION", "True")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def gate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Gate:
    def call(*arguments: str) -> tuple[int, str]:
        """Return the exit status of a gate, and what it printed. It imports nothing, so this process is as good."""
        monkeypatch.setattr(sys, "argv", ["verifier", "gate", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return int(ended.value.code or 0), printed.out + printed.err

    return call


def verifier(*arguments: str) -> int:
    """Return the exit status of a command in a process of its own, since a module is imported once in each."""
    return run_module("verifier", *arguments).returncode


def test_a_strategy_of_ones_own_is_judged_by_what_it_is_now(project: Path, gate: Gate) -> None:
    rules = project / "my_rules.py"
    rules.write_text(WRONG)
    assert verifier("run", *TRIED) == 1
    status, said = gate()
    assert status == 1
    assert f"in {OP}(" in said
    assert "it is about the rules of --import my_rules.py" in said

    assert verifier("run", "aten.neg.default", "--mesh", "simulated:2", "--max-examples", "1") == 0
    assert gate()[0] == 1, "a run of something else hides nothing"
    assert gate("aten.neg.default")[0] == 0, "what was not asked about does not count"

    rules.write_text(RIGHT)
    status, said = gate()
    assert status == 2
    assert "my_rules.py has changed" in said
    assert f"again: python -m verifier run {' '.join(TRIED)}" in said

    assert verifier("run", *TRIED) == 0
    status, said = gate(OP, "--mesh", "2", "--import", "my_rules.py")
    assert status == 0, said
    assert gate()[0] == 0
    for spelling in ("./my_rules.py", str(rules), "reports/../my_rules.py"):
        status, also = gate(OP, "--mesh", "2", "--import", spelling, "--import", "my_rules.py")
        assert (status, also) == (0, said)

    rules.write_text(f"{RIGHT}\n# now with a comment\n")
    assert gate()[0] == 2, "it may be wrong now"
    rules.write_text(WRONG)
    assert gate()[0] == 1, "the first run was made with just this"


def test_what_an_update_writes_is_accepted_by_a_persons_reason_alone(project: Path, gate: Gate) -> None:
    (project / "my_rules.py").write_text(WRONG)
    assert verifier("run", *TRIED) == 1
    status, said = gate("--update", "--baseline", "known.toml")
    assert status == 1
    assert "its baseline entry has no reason of a person's" in said
    assert gate("--baseline", "known.toml")[0] == 1
    baseline = project / "known.toml"
    assert 'imports = ["my_rules.py"]' in baseline.read_text()
    baseline.write_text(baseline.read_text().replace('"not explained yet"', '"wrong on purpose"'))
    assert gate("--baseline", "known.toml")[0] == 0
