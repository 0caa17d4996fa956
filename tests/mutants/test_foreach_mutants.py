"""Calls with lists of tensors are tried on meshes, and what is wrong with one tensor of a list is caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import foreach_mutants as mutants
import pytest
import torch

from strategies.opinfo.family import FAMILY
from verifier.calls.result import MutatedInput, VerificationError, WrongValue
from verifier.calls.verifier import Verifier
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.verdict import VerdictKind
from verifier.meshes.pool import Pool, PoolSet
from verifier.meshes.remedied import run_remedied
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.placements.parsing import parse_placement

MESH = MeshSpec((2,), "simulated")


def tensor(*shape: int, first: int) -> torch.Tensor:
    """Return small integers of mixed sign, no two of them equal."""
    numbers = torch.arange(float(first), first + torch.Size(shape).numel(), dtype=torch.float64)
    numbers[::3] *= -1
    return numbers.reshape(shape)


def listed(op: str) -> OpCase:
    """Return a call with two lists; the tensors of a list differ in shape, but for two of them."""
    left, right = ([tensor(4, 3, first=n), tensor(5, first=n + 1), tensor(4, 3, first=n + 2)] for n in (1, 30))
    return OpCase(f"aten.{op}", f"torch.ops.aten.{op}", (left, right), family=FAMILY.name)


PRODUCTS, SUMS = listed("_foreach_mul.List"), listed("_foreach_add_.List")
SHARED = OpCase(
    "aten._foreach_mul.Tensor",
    "torch.ops.aten._foreach_mul.Tensor",
    ([tensor(4, 3, first=1), tensor(2, 1, first=2)], torch.tensor(5.0, dtype=torch.float64)),
    family=FAMILY.name,
)
CALLS: dict[Callable[..., Any], tuple[OpCase, list[str], type[VerificationError], str]] = {
    mutants.first_factor_for_all: (PRODUCTS, ["S(0)"] * 6, WrongValue, r"output 2 \[0, 0\]"),
    mutants.in_another_order: (PRODUCTS, ["R"] * 6, WrongValue, r"output 0 \[0, 0\]"),
    mutants.part_of_the_factor: (SHARED, ["P(sum)", "P(sum)", "P(sum)"], WrongValue, r"output 1 \[0, 0\]"),
    mutants.leaves_the_last_out: (SUMS, ["S(0)"] * 6, MutatedInput, r"tensors\[2\]"),
}


def call_of(function: Callable[..., Any]) -> str:
    return f"{mutants.__name__}.{function.__name__}"


@pytest.mark.parametrize("case", [PRODUCTS, SUMS], ids=["new tensors", "in place"])
def test_calls_with_lists_pass(case: OpCase, verify: Verifier) -> None:
    counts = verify(case, mesh=MESH, cap=24, record=False).counts
    assert set(counts) <= {VerdictKind.PASS, VerdictKind.UNSUPPORTED}
    assert counts[VerdictKind.PASS] >= 8  # DTensor writes to nothing that it would have to redistribute first


@pytest.mark.parametrize("mutant", CALLS, ids=lambda mutant: mutant.__name__)
def test_a_tensor_of_a_list_that_is_wrong_is_named(mutant: Callable[..., Any], verify: Verifier) -> None:
    case, placements, error, subject = CALLS[mutant]
    assert verify(case, mesh=MESH, placements=placements, record=False).counts == {VerdictKind.PASS: 1}
    with pytest.raises(error, match=subject):
        verify(replace(case, call=call_of(mutant)), mesh=MESH, placements=placements, record=False)


@pytest.mark.ranks
@pytest.mark.parametrize("placements", [("P(sum)", "R"), ("R", "P(sum)"), ("P(sum)", "S(0)")])
def test_a_tensor_that_a_list_shares_is_right_for_all_under_the_remedy(placements: tuple[str, str]) -> None:
    """Torch redistributes the shared tensor as the rule of the first tensor asks."""
    trial = Trial(SHARED, MESH, tuple((parse_placement(text),) for text in (*placements, "P(sum)")))
    pools = PoolSet(Pool)
    try:
        torchs, mended = (run_remedied(pools, trial, names) for names in ((), ("tensors-shared-by-lists",)))
    finally:
        pools.close()
    assert judge(torchs, make_reference(SHARED)).kind is VerdictKind.WRONG_VALUE
    assert judge(mended, make_reference(SHARED)).kind is VerdictKind.PASS


def test_every_mutant_is_tried() -> None:
    own = {f for f in vars(mutants).values() if getattr(f, "__module__", "") == mutants.__name__}
    assert own == {*CALLS, mutants.parts_multiplied}


@pytest.mark.ranks
def test_a_wrong_rule_for_lists_is_caught() -> None:
    pools = PoolSet(lambda key: Pool(key, [call_of(mutants.parts_multiplied)]))
    try:
        with pytest.raises(WrongValue, match="output 0"):
            Verifier(pools, MESH)(PRODUCTS, placements=["P(sum)"] * 6)
    finally:
        pools.close()
