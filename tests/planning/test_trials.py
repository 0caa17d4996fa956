"""Which trials are planned of a case: the placements of the cotangents of its backward passes."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from verifier.core.case import MeshSpec, OpCase
from verifier.oracle.reference import Reference, make_reference
from verifier.planning.trials import cotangent_placements, plan_case
from verifier.torch_internals.placements import Placements

SQUARE = MeshSpec((2, 2))
EVERYWHERE = (Replicate(), Replicate())
SEEDS = range(60)


def reference(op: str, *args: object) -> Reference:
    return make_reference(OpCase(f"aten.{op}", f"torch.ops.aten.{op}", args))


def matrix() -> torch.Tensor:
    return torch.arange(12.0, dtype=torch.float64).view(4, 3).requires_grad_()


@pytest.fixture(scope="module")
def passes() -> list[tuple[Placements, ...]]:
    """The placements of one cotangent, a matrix, in the three backward passes of each seed."""
    negated = reference("neg.default", matrix())
    return [tuple(placements for (placements,) in cotangent_placements(negated, SQUARE, seed)) for seed in SEEDS]


def test_one_backward_pass_is_replicated_one_shards_and_one_is_partial(passes: list[tuple[Placements, ...]]) -> None:
    for replicated, sharded, partial in passes:
        assert replicated == EVERYWHERE
        assert any(isinstance(placement, Shard) for placement in sharded)
        assert Partial("sum") in partial


def test_mesh_dims_of_a_cotangent_differ_in_every_way(passes: list[tuple[Placements, ...]]) -> None:
    """Each kind of placement beside each other one, on either mesh dim, and tensor dims cut alone and twice."""
    kinds = {tuple(type(placement) for placement in placements) for each in passes for placements in each[1:]}
    letters = (Replicate, Shard, Partial)
    assert kinds == {(first, second) for first in letters for second in letters} - {(Replicate, Replicate)}
    cuts = {placements for each in passes for placements in each if all(isinstance(p, Shard) for p in placements)}
    assert cuts == {(Shard(first), Shard(second)) for first in (0, 1) for second in (0, 1)}


def test_most_cotangents_are_placed_in_two_ways_at_once(passes: list[tuple[Placements, ...]]) -> None:
    for number in (1, 2):
        mixed = [each[number] for each in passes if each[number][0] != each[number][1]]
        assert len(mixed) > len(SEEDS) // 2


@pytest.mark.parametrize("op", ["igamma.default", "floor_divide.default"])
def test_there_is_no_backward_pass_where_torch_refuses_one(op: str) -> None:
    called = reference(op, matrix(), matrix())
    assert called.differentiable
    assert called.wanted
    assert cotangent_placements(called, SQUARE, 0) == ()
    assert "is not implemented" in called.no_gradient


class _Faulty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, input: torch.Tensor) -> torch.Tensor:
        return input * 2

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a fault")


def faulty(input: torch.Tensor) -> torch.Tensor:
    """Has a backward pass that fails."""
    return _Faulty.apply(input)


def test_a_backward_pass_that_fails_is_tried_all_the_same() -> None:
    called = make_reference(OpCase("test.faulty", f"{__name__}.faulty", (matrix(),)))
    assert called.no_gradient == ""
    assert len(cotangent_placements(called, SQUARE, 0)) == 3


def test_outputs_of_a_call_have_placements_of_their_own() -> None:
    halves = reference("split.Tensor", matrix(), 2)
    drawn = [cotangent_placements(halves, SQUARE, seed) for seed in SEEDS]
    assert all(len(placements) == 2 for each in drawn for placements in each)
    assert any(first != second for each in drawn for first, second in each[1:])


def test_a_cotangent_without_dims_is_not_cut() -> None:
    total = reference("sum.default", matrix())
    for seed in SEEDS:
        replicated, (partial,) = cotangent_placements(total, SQUARE, seed)
        assert replicated == (EVERYWHERE,)
        assert Partial("sum") in partial
        assert not any(isinstance(placement, Shard) for placement in partial)


def test_there_is_no_backward_pass_where_no_gradient_is_wanted() -> None:
    assert cotangent_placements(reference("neg.default", matrix().detach()), SQUARE, 0) == ()
    assert cotangent_placements(reference("argmax.default", matrix()), SQUARE, 0) == ()


def test_cotangents_depend_on_the_seed_alone() -> None:
    negated = reference("neg.default", matrix())
    drawn = [cotangent_placements(negated, SQUARE, seed) for seed in SEEDS]
    assert drawn == [cotangent_placements(negated, SQUARE, seed) for seed in SEEDS]
    assert len(set(drawn)) > 10


def test_every_second_trial_has_one_backward_pass_and_these_are_all_three_in_turn() -> None:
    case = OpCase("aten.neg.default", "torch.ops.aten.neg.default", (matrix(),))
    negated = make_reference(case)
    every = plan_case(case, negated, SQUARE, 9, 0).trials
    one = plan_case(case, negated, SQUARE, 9, 0, backward_every=2).trials
    assert [trial.combination for trial in one] == [trial.combination for trial in every]
    assert [trial.cotangents for trial in one] == [
        (trial.cotangents[number // 2 % 3],) if number % 2 == 0 else () for number, trial in enumerate(every)
    ]  # fmt: skip
    without = OpCase("aten.neg.default", "torch.ops.aten.neg.default", (matrix().detach(),))
    assert not any(trial.cotangents for trial in plan_case(without, make_reference(without), SQUARE, 9, 0).trials)
