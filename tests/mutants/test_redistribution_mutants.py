"""Redistributions that are wrong on purpose are caught, each by the right verdict, and the right one passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import redistribution_mutants as mutants
import torch
from hypothesis import HealthCheck, Phase, given, settings
from refused_backward import is_refused_in_backward
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.redistribution import FAMILY
from strategies.redistribution.inputs import REDISTRIBUTE, SEQUENCE_OP, sequence_case
from strategies.redistribution.programs import CHAIN, SEQUENCE
from strategies.tensors import Layout, filled
from verifier.calls.result import VerificationError, WrongGradient, WrongPlacement, WrongValue
from verifier.calls.verifier import Verifier
from verifier.core.case import MeshSpec, OpCase
from verifier.core.placement_text import BITWISE_REDUCTIONS
from verifier.core.verdict import VerdictKind
from verifier.placements.algebra import in_order
from verifier.planning.families import DrawContext
from verifier.torch_internals.placements import strided_shard

MESH = MeshSpec((2,))
MUTANTS: dict[Callable[..., torch.Tensor], type[VerificationError]] = {
    mutants.drops_last_element: WrongValue,
    mutants.gives_shard_of_next_rank: WrongValue,
    mutants.adds_up_replicas: WrongValue,
    mutants.takes_one_part_for_the_whole: WrongValue,
    mutants.ends_elsewhere: WrongPlacement,
    mutants.doubles_gradient: WrongGradient,
}


ROWS = [["clone", 0], ["redistribute", 2, [Shard(1)]]]
SEQUENCES: dict[Callable[..., list[torch.Tensor]], tuple[list[list[Any]], type[VerificationError]]] = {
    mutants.loses_writes: ([*ROWS, ["add_", 3, 1]], WrongValue),
    mutants.writes_to_the_whole: ([*ROWS, ["add_to_slice", 3, 5.0, 0, 1, 4]], WrongValue),
    mutants.slices_from_the_start: ([*ROWS, ["narrow", 3, 1, 1, 2]], WrongValue),
    mutants.joins_the_other_way_round: ([*ROWS, ["cat", 3, 1, 0]], WrongValue),
    mutants.writes_to_what_it_has_gathered: ([*ROWS, ["mul_", 3, -2.0]], WrongPlacement),
}

ROWS_IN_REVERSE = list(in_order((Shard(0), Shard(0)), (2, 2), (1, 0)))
PLACED: dict[Callable[..., torch.Tensor], list[tuple[str, str, list[Placement]]]] = {
    mutants.calls_the_whole_pending: [
        ("2x2", "(P(sum), S(0))", [Partial(), Replicate()]),
        ("2x2", "(S(0), P(product))", [Shard(1), Partial("product")]),
    ],
    mutants.cuts_without_strides: [
        ("2", "R", [strided_shard(0, 2)]),
        ("2", "S(1)", [strided_shard(0, 4)]),
        ("2x2", "(S(0), S(0))", ROWS_IN_REVERSE),
    ],
    mutants.gathers_without_strides: [
        ("2", "_S(0, 2)", [Replicate()]),
        ("2x2", "(_S(0, 2), S(0))", [Replicate(), Shard(1)]),
    ],
}
"""What the cases above leave out: wrong programs, each with meshes, sources and targets for which DTensor is right."""


def plain(case: OpCase) -> bool:
    """Leave out what DTensor refuses or gets wrong itself."""
    return not case.tags & {"Partial target", "strided shard", "complex", "bool"}


CASES = FAMILY.cases(DrawContext(MESH, (torch.float64,), (REDISTRIBUTE,))).filter(plain)


def explore(verify: Verifier, program: Callable[..., torch.Tensor]) -> Counter[VerdictKind]:
    """Verify ``program`` in the place of the family's on 60 drawn cases; return the number of trials by verdict."""
    counts: Counter[VerdictKind] = Counter()

    @settings(
        max_examples=60,  # of 25, none may leave shards of one size, as some mutants need
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=CASES)
    def check(case: OpCase) -> None:
        mutant = replace(case, call=f"{program.__module__}.{program.__name__}")
        try:
            counts.update(verify(mutant, mesh=MESH, cap=8, allow_nothing=True, record=False).counts)
        except VerificationError as error:
            if not is_refused_in_backward(error):
                raise

    check()
    return counts


def test_the_right_program_passes(verify: Verifier) -> None:
    counts = explore(verify, mutants.right)
    assert set(counts) <= {VerdictKind.PASS, VerdictKind.INCONCLUSIVE, VerdictKind.UNSUPPORTED}
    assert counts[VerdictKind.PASS] > 50


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutant_is_caught(mutant: Callable[..., torch.Tensor], verify: Verifier) -> None:
    with pytest.raises(VerificationError) as caught:
        explore(verify, mutant)
    assert isinstance(caught.value, MUTANTS[mutant]), caught.value


def test_every_mutant_is_tried() -> None:
    own = {f for name, f in vars(mutants).items() if callable(f) and name[0] != "_"}
    programs = {f for f in own if f.__module__ == mutants.__name__ and not isinstance(f, type)}
    assert programs == {*MUTANTS, *PLACED, *SEQUENCES, mutants.right, mutants.reduces_by_the_next_operation}


@pytest.mark.parametrize(
    ("mutant", "mesh", "source", "target"),
    [
        pytest.param(mutant, *where, id=f"{mutant.__name__}-{where[1]}-{where[0]}")
        for mutant, places in PLACED.items()
        for where in places
    ],
)
def test_wrong_parts_and_strides_are_caught_and_right_ones_are_not(
    mutant: Callable[..., torch.Tensor], mesh: str, source: str, target: list[Placement], verify: Verifier
) -> None:
    tensor = filled((5, 7), torch.float64, 0)
    case = OpCase(REDISTRIBUTE, CHAIN, (tensor, [target]), family=FAMILY.name)
    assert verify(case, mesh=mesh, placements=[source], record=False).counts == {VerdictKind.PASS: 1}
    wrong = replace(case, call=f"{mutants.__name__}.{mutant.__name__}")
    with pytest.raises(WrongValue):
        verify(wrong, mesh=mesh, placements=[source], record=False)


@pytest.mark.parametrize(
    ("dtype", "source"), [(torch.bool, "P(max)"), (torch.int64, "P(sum)"), (torch.complex128, "P(sum)")], ids=str
)
def test_one_wrong_element_of_any_dtype_is_caught(dtype: torch.dtype, source: str, verify: Verifier) -> None:
    tensor = torch.tensor([3, 0, 1, 0, 5]).to(dtype)
    case = OpCase(REDISTRIBUTE, CHAIN, (tensor, [[Shard(0)]]), family=FAMILY.name)
    assert verify(case, mesh=MESH, placements=[source], record=False).counts == {VerdictKind.PASS: 1}
    wrong = replace(case, call=f"{mutants.__name__}.{mutants.drops_last_element.__name__}")
    with pytest.raises(WrongValue):
        verify(wrong, mesh=MESH, placements=[source], record=False)


@pytest.mark.parametrize("target", [Replicate(), Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("reduction", BITWISE_REDUCTIONS)
def test_a_wrong_bitwise_reduction_is_caught(reduction: str, target: Placement, verify: Verifier) -> None:
    tensor = filled((5, 7), torch.int64, 0)
    case = OpCase(REDISTRIBUTE, CHAIN, (tensor, [[target]]), family=FAMILY.name)
    assert verify(case, mesh=MESH, placements=[f"P({reduction})"], record=False).counts == {VerdictKind.PASS: 1}
    wrong = replace(case, call=f"{mutants.__name__}.{mutants.reduces_by_the_next_operation.__name__}")
    with pytest.raises(WrongValue):
        verify(wrong, mesh=MESH, placements=[f"P({reduction})"], record=False)


@pytest.mark.parametrize("mutant", SEQUENCES, ids=lambda mutant: mutant.__name__)
def test_mutant_of_a_step_is_caught_and_the_step_itself_is_right(
    mutant: Callable[..., list[torch.Tensor]], verify: Verifier
) -> None:
    steps, caught_as = SEQUENCES[mutant]
    context = DrawContext(MESH, (torch.float64,), (SEQUENCE_OP,))
    first, second = (filled((5, 3), torch.float64, seed, Layout(requires_grad=True)) for seed in (0, 1))
    for call in (SEQUENCE, f"{mutant.__module__}.{mutant.__name__}"):
        case = sequence_case(first, second, steps, context, call)
        if call == SEQUENCE:
            assert verify(case, mesh=MESH, placements=["S(0)", "R"], record=False).counts == {VerdictKind.PASS: 1}
            continue
        with pytest.raises(VerificationError) as caught:
            verify(case, mesh=MESH, placements=["S(0)", "R"], record=False)
        assert isinstance(caught.value, caught_as), caught.value


def test_nothing_else_sees_a_result_that_ends_elsewhere(verify: Verifier) -> None:
    """What the program asked for is the one thing that tells it from a right one."""
    case = OpCase(
        REDISTRIBUTE,
        "redistribution_mutants.ends_elsewhere",
        (torch.tensor([3.0, -1.0]), [[Shard(0)]]),
        family=FAMILY.name,
    )
    with pytest.raises(WrongPlacement, match=r"output on rank 0: placement got R, expected S\(0\)"):
        verify(case, mesh=MESH, placements=["R"], record=False)
    unasked = replace(case, call="redistribution_mutants.takes_one_part_for_the_whole")
    assert verify(unasked, mesh=MESH, placements=["R"], record=False).counts == {VerdictKind.PASS: 1}
