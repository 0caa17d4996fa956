"""Explicit redistributions on three mesh dims: every shard order, and drawn cases that fail in no new way."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from refused_backward import is_refused_in_backward
from torch.distributed.tensor import Shard

from strategies.redistribution import FAMILY
from strategies.redistribution.inputs import REDISTRIBUTE
from strategies.redistribution.programs import CHAIN
from strategies.tensors import filled
from verifier.calls.result import VerificationError, WrongShape
from verifier.calls.verifier import Verifier
from verifier.core.case import MeshSpec, OpCase
from verifier.core.placement_text import format_placements
from verifier.core.verdict import VerdictKind
from verifier.findings.failures import Failure
from verifier.findings.grouping import rule_class
from verifier.gate.baseline import load_baseline
from verifier.placements.algebra import in_order
from verifier.planning.families import DrawContext

MESH = MeshSpec.parse("simulated:2x2x2")
BASELINE = Path(__file__).parents[2] / "reports" / "baseline.toml"
ROWS = (Shard(0), Shard(0), Shard(0))


def ordered(rows: int, order: tuple[int, ...]) -> tuple[OpCase, str]:
    """Return the redistribution of ``rows`` from one shard order to that which is rotated by one, and its source."""
    following = in_order(ROWS, MESH.shape, (*order[1:], order[0]))
    case = OpCase(REDISTRIBUTE, CHAIN, (filled((rows, 2), torch.float64, 0), [list(following)]), family=FAMILY.name)
    return case, format_placements(in_order(ROWS, MESH.shape, order))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_even_rows_go_from_any_shard_order_to_the_next(order: tuple[int, ...], verify: Verifier) -> None:
    case, source = ordered(16, order)
    assert verify(case, mesh=MESH, placements=[source]).counts == {VerdictKind.PASS: 1}


def test_uneven_rows_are_not_cut_as_the_strides_say(verify: Verifier) -> None:
    """What torch 2.13.0 does: the planner cuts in the order, which only on two mesh dims is what the strides mean."""
    case, source = ordered(17, (0, 1, 2))
    with pytest.raises(WrongShape, match=r"output on rank \d: shape got"):
        verify(case, mesh=MESH, placements=[source], record=False)


def is_known(failure: Failure, known: set[tuple[str, str, str]]) -> bool:
    """Return whether the baseline has a failure like this one, or the test above."""
    rule = str(rule_class(failure))
    tensor = failure.trial.case.args[0]
    assert isinstance(tensor, torch.Tensor)
    uneven = any(size % MESH.world_size for size in tensor.shape)
    return (failure.trial.case.op, failure.verdict.kind, rule) in known or (uneven and {"S+S", "_S"} <= kinds(rule))


def kinds(rule: str) -> set[str]:
    """Return the kinds of placements in a class such as ``dtensor.redistribute: S,S+S -> S``."""
    return set(re.split(r"[ ,>-]+", rule))


def test_drawn_redistributions_fail_in_known_ways_or_not_at_all(verify: Verifier) -> None:
    entries = load_baseline(BASELINE).entries
    known = {(entry.op, entry.verdict, entry.rule) for entry in entries}
    counts: Counter[VerdictKind] = Counter()
    new: list[str] = []

    @settings(
        max_examples=12,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=FAMILY.cases(DrawContext(MESH, FAMILY.dtypes, (REDISTRIBUTE,))))
    def check(case: OpCase) -> None:
        try:
            counts.update(verify(case, mesh=MESH, cap=3, allow_nothing=True, record=False).counts)
        except VerificationError as error:
            explained = is_known(error.failure, known) or is_refused_in_backward(error)
            new.extend([] if explained else [str(error)])

    check()
    assert not new
    assert counts[VerdictKind.PASS] > 15
