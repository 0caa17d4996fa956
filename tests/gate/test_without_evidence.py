"""What a run could not try of an op makes it no evidence of that op, and other ops' findings count all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_commands import run_module

pytestmark = [pytest.mark.ranks, pytest.mark.cli, pytest.mark.long]

HEAD = """
import os, sys, torch, verifier
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

@torch.library.custom_op("without_evidence::scale", mutates_args=())
def scale(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return rows * factors[:, None]

scale.register_fake(lambda rows, factors: torch.empty_like(rows))
register_sharding(scale._opoverload)(lambda rows, factors: [([Replicate()], [Replicate(), Replicate()])])
"""
RIGHT = """
@register_sharding(torch.ops.aten.trunc.default)
def trunc(x):
    same = [Replicate(), *map(Shard, range(x.ndim))]
    return [([one], [one]) for one in same]
"""
WRONG = """
@register_sharding(torch.ops.aten.trunc.default)
def trunc(x):
    return [([one], [one]) for one in (Replicate(), Partial())]
"""
RAISES = """
@verifier.samples("without_evidence::scale")
def examples():
    raise LookupError("no rows")
"""
ENDS_WORKERS = """
@verifier.samples("without_evidence::scale")
def examples():
    if sys.argv[0] == "-c":
        os.abort()
    yield torch.randn(8, 4), torch.randn(8)
"""
RULES = ("rules", "--claims-only", "--world-size", "2", "--jobs", "1")
RUN = ("run", "--mesh", "2", "--jobs", "1", "--max-examples", "2")
RAISED = "NO EVIDENCE samples of without_evidence.scale.default by examples: it raised LookupError: no rows"


def command(folder: Path, text: str, *arguments: str) -> tuple[int, str]:
    (folder / "mine.py").write_text(HEAD + text, encoding="utf-8")
    made = run_module("verifier", *arguments, "--import", "mine.py")
    assert "Traceback" not in made.stderr, made.stderr
    return made.returncode, made.stdout + made.stderr


@pytest.mark.parametrize("arguments", [RULES, RUN], ids=["rules", "run"])
@pytest.mark.parametrize(("rule", "expected"), [(RIGHT, 2), (WRONG, 1)], ids=["right", "wrong"])
def test_other_ops_decide_if_the_samples_of_one_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], rule: str, expected: int
) -> None:
    monkeypatch.chdir(tmp_path)
    status, said = command(tmp_path, RAISES + rule, *arguments)
    assert status == expected, said
    assert RAISED in said
    assert "aten.trunc.default" in said or expected == 2


def test_a_later_gate_knows_that_samples_were_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command(tmp_path, RAISES + RIGHT, *RUN)
    status, said = command(tmp_path, RAISES + RIGHT, "gate", "aten.trunc.default", "without_evidence.scale.default")
    assert (status, RAISED in said) == (2, True), said
    status, said = command(tmp_path, RAISES + RIGHT, "gate", "aten.trunc.default", "--mesh", "2")
    assert (status, RAISED in said) == (0, False), said


def test_wrong_samples_alone_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (RULES, RUN, ("gate",)):
        status, said = command(tmp_path, RAISES, *arguments)
        assert status == 2, said
        assert RAISED.removeprefix("NO EVIDENCE ") in said


@pytest.mark.parametrize(("rule", "expected"), [(RIGHT, 2), (WRONG, 1)], ids=["right", "wrong"])
def test_what_ends_workers_while_samples_are_made_is_not_green(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str, expected: int
) -> None:
    monkeypatch.chdir(tmp_path)
    status, said = command(tmp_path, ENDS_WORKERS + rule, *RULES)
    assert status == expected, said
    assert "NO EVIDENCE samples of without_evidence.scale.default after the crash were not reached: SIGABRT" in said


def test_an_op_without_samples_is_told_so_beside_one_of_its_namespace_that_has_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named = """
@torch.library.custom_op("without_evidence::named", mutates_args=())
def named(x: torch.Tensor, mode: str) -> torch.Tensor:
    return x * len(mode)
"""
    for op, expected in (("named", "without_evidence.named has no samples"), ("nmaed", "no op matches")):
        status, said = command(tmp_path, named, "run", f"without_evidence.{op}")
        assert (status, expected in said) == (2, True), said
