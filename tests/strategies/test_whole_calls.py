"""Composite calls in inference mode, where DTensor sees them whole: how they are drawn, and what torch does wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from strategies.opinfo import programs
from strategies.opinfo.composing import INFERENCE, composed
from strategies.opinfo.whole_calls import calls_in_inference_mode
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.verdict import VerdictKind
from verifier.meshes.pool import Pool, PoolSet
from verifier.meshes.remedied import run_remedied
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.torch_internals.placements import Placements

MESH = MeshSpec((2,))
NUMBERS = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(4, 3)
UNEVEN = (NUMBERS.square() % 7).contiguous()
COMPLEX = torch.complex(NUMBERS, NUMBERS.flip(0) - 5)
REMEDY = "composites-in-inference-mode"


@pytest.fixture(scope="module")
def pools() -> Iterator[PoolSet]:
    pools = PoolSet(Pool)
    yield pools
    pools.close()


def inferred(op: str, inside: bool, **arguments: object) -> OpCase:
    return OpCase(op, f"{programs.__name__}.inferred", (op, inside), arguments, "opinfo", False)


@pytest.mark.parametrize(
    ("row", "op"),
    [
        ("cov", "aten.cov.default"),
        ("nn.functional.interpolate", "aten.upsample_nearest1d.vec"),
        ("fft.hfft", "aten.fft_hfft.default"),
    ],
)
def test_an_op_of_torch_that_no_rule_names_has_calls(row: str, op: str) -> None:
    calls = [call for call in calls_in_inference_mode(row, torch.float64) if call.op == op]
    assert calls
    for call in calls:
        drawn = [call.draw(size, draw) for size in range(3) for draw in range(2)]
        made = [composed(case, INFERENCE, MESH, 0) for case in drawn if case is not None]
        assert {case.op for case in drawn if case is not None} == {op}
        assert all(one.call == f"{programs.__name__}.inferred" for one in made if one is not None)


def test_every_second_draw_is_complex_where_the_op_takes_complex_numbers() -> None:
    (first, *_) = calls_in_inference_mode("fft.hfft", torch.float64)
    drawn = [first.draw(0, draw) for draw in range(4)]
    kinds = [case.args[0].is_complex() for case in drawn if case is not None]  # type: ignore[attr-defined]
    assert kinds == [False, True, False, True]


def test_an_op_with_a_rule_and_one_that_is_not_composite_are_not_called_whole() -> None:
    assert not calls_in_inference_mode("mul", torch.float64)


@pytest.mark.ranks
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("case", "placements", "wrong", "others"),
    [
        (("aten.fft_hfft.default", {"self": COMPLEX}), (Shard(0),), VerdictKind.WRONG_VALUE, ("masks-shared",)),
        (("aten.cov.default", {"self": UNEVEN}), (Replicate(),), VerdictKind.CRASH, ("masks-shared",)),
    ],
    ids=["hfft", "cov"],
)
def test_what_torch_does_wrong_is_seen_and_mended_by_its_own_remedy_alone(
    case: tuple[str, dict[str, object]],
    placements: Placements,
    wrong: VerdictKind,
    others: tuple[str, ...],
    inside: bool,
    pools: PoolSet,
) -> None:
    op, arguments = case
    made = inferred(op, inside, **arguments)
    trial, reference = Trial(made, MESH, (placements,)), make_reference(made)
    for remedies in ((), *((other,) for other in (*others, "views-in-inference-mode"))):
        assert judge(run_remedied(pools, trial, remedies), reference).kind is wrong, remedies
    assert judge(run_remedied(pools, trial, (REMEDY,)), reference).kind is VerdictKind.PASS


@pytest.mark.ranks
def test_a_view_of_a_tensor_from_outside_needs_both_remedies_if_its_op_is_composite(pools: PoolSet) -> None:
    case = inferred("aten.chunk.default", False, self=NUMBERS, chunks=2)
    trial, reference = Trial(case, MESH, ((Shard(1),),)), make_reference(case)
    assert judge(run_remedied(pools, trial, ()), reference).kind is VerdictKind.CRASH
    assert judge(run_remedied(pools, trial, (REMEDY, "views-in-inference-mode")), reference).kind is VerdictKind.PASS
