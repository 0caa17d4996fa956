"""Generators of redistributions: what they draw is legal, covers its classes and shrinks to something readable."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.meshes import mesh_shapes
from strategies.redistribution import FAMILY
from strategies.redistribution.inputs import (
    INPUT_CLASSES,
    REDISTRIBUTE,
    SEQUENCE_OP,
    next_steps,
    redistribution_cases,
    sequence_case,
    target_placements,
)
from strategies.redistribution.programs import WRITES, sequence
from verifier.core.case import MeshSpec, OpCase
from verifier.oracle.reference import make_reference
from verifier.placements.algebra import combine, coordinates, in_order, is_shard_order, split
from verifier.placements.alphabet import Alphabet
from verifier.placements.combinations import CombinationSpace
from verifier.planning.families import DrawContext, Family
from verifier.programs import asked_placements, targets
from verifier.records.values import case_record, load_case
from verifier.torch_internals.placements import Placements, strided_shard, strides_of

QUICK = settings(
    max_examples=150, database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
FIND = settings(QUICK, max_examples=2000, phases=(Phase.generate, Phase.shrink))


def context(shape: tuple[int, ...], ops: tuple[str, ...] = FAMILY.ops) -> DrawContext:
    return DrawContext(MeshSpec(shape), FAMILY.dtypes, ops)


def minimal(op: str, condition: Callable[[OpCase], bool] = lambda _: True, shape: tuple[int, ...] = (2, 2)) -> OpCase:
    return find(FAMILY.cases(context(shape, (op,))), condition, settings=FIND)


def test_family_satisfies_the_interface() -> None:
    assert isinstance(FAMILY, Family)
    with pytest.raises(ValueError, match="must each have an entry"):
        redistribution_cases(DrawContext(MeshSpec((2,)), FAMILY.dtypes, ()))


@given(mesh_shapes().flatmap(lambda shape: st.tuples(st.just(shape), FAMILY.cases(context(shape)))))
@QUICK
def test_cases_are_valid_locally_and_fit_their_mesh(drawn: tuple[tuple[int, ...], OpCase]) -> None:
    shape, case = drawn
    reference = make_reference(case)
    assert reference.raised is None
    assert case.op in FAMILY.ops
    assert case.tags <= INPUT_CLASSES
    assert all(len(target) == len(shape) for target in targets(case))
    assert len(asked_placements(case)) == len(reference.outputs)
    if case.op == REDISTRIBUTE:
        assert torch.equal(reference.outputs[0], reference.inputs[0])
        assert reference.outputs[0] is not reference.inputs[0]
    again = load_case(case_record(case))
    assert targets(again) == targets(case)
    assert make_reference(again).raised is None


@given(mesh_shapes().flatmap(lambda shape: FAMILY.cases(context(shape, (SEQUENCE_OP,)))))
@QUICK
def test_exact_sequences_are_exact(case: OpCase) -> None:
    for output in make_reference(case).outputs:
        assert bool((output.detach() == output.detach().round()).all())
        assert not case.exact or float(output.detach().abs().max()) < 2**45  # leaves bits for the parts of a Partial


@given(mesh_shapes().flatmap(lambda shape: FAMILY.cases(context(shape, (SEQUENCE_OP,)))))
@settings(QUICK, max_examples=400)
def test_sequences_write_only_where_autograd_allows_and_to_no_argument(case: OpCase) -> None:
    reference = make_reference(case)
    originals = [value for value in case.args if isinstance(value, torch.Tensor)]
    assert all(torch.equal(own, whole) for own, whole in zip(reference.inputs, originals, strict=True))
    if reference.differentiable and reference.wanted:
        reference.gradients(0)


def test_a_write_through_a_redistribution_would_leave_its_source_open() -> None:
    """Whether the two share memory is DTensor's choice, so none of them is written to while the other is in use."""

    def written(*steps: list[Any]) -> set[int]:
        values = [torch.ones(3, 3), torch.ones(3, 3)]
        for number in range(len(steps)):
            values.append(sequence(values[0], values[1], list(steps[: number + 1]))[-1])
        return {step[1] for step in next_steps(values, steps) if step[0] in WRITES}

    clone: list[Any] = ["clone", 0]
    again: list[Any] = ["redistribute", 2, [Replicate()]]
    assert written() == set()
    assert written(["redistribute", 0, [Replicate()]]) == set()  # may be the argument itself
    assert written(clone) == {2}
    assert written(clone, again) == {3}  # and no longer 2, which is used
    assert written(clone, again, ["t", 2]) == set()  # 3 and 4 would see each other's writes
    assert written(clone, ["square", 2]) == {3}  # 2 is kept for the backward pass
    assert written(clone, ["add_", 2, 3.0]) == {3}


@pytest.mark.parametrize("shape", [(2, 2), (8,), (2, 2, 2)])
def test_four_hundred_draws_contain_every_class(shape: tuple[int, ...]) -> None:
    counts: Counter[str] = Counter()

    @settings(QUICK, max_examples=400, phases=(Phase.generate,))
    @given(FAMILY.cases(context(shape)))
    def draw(case: OpCase) -> None:
        counts.update({*case.tags, case.op})

    draw()
    on_one_mesh_dim = {"nested cut", "shard order"} if len(shape) == 1 else set()
    assert INPUT_CLASSES - set(counts) == on_one_mesh_dim
    assert min(counts[REDISTRIBUTE], counts[SEQUENCE_OP]) > 80


@pytest.mark.parametrize("tag", ["Partial target", "nested cut", "shard order"])
def test_sequences_have_targets_of_every_kind(tag: str) -> None:
    drawn = FAMILY.cases(context((2, 2), (SEQUENCE_OP,)))
    assert find(drawn, lambda case: tag in case.tags, settings=settings(FIND, phases=(Phase.generate,)))


@pytest.mark.parametrize("shape", [(2, 2), (2, 3, 2)])
def test_targets_are_in_every_shard_order(shape: tuple[int, ...]) -> None:
    found: set[Placements] = set()

    @settings(QUICK, phases=(Phase.generate,))
    @given(target_placements(MeshSpec(shape), 1, [Shard(-1)]))
    def draw(target: list[Placement]) -> None:
        found.add(tuple(target))

    draw()
    orders = itertools.permutations(range(len(shape)))
    # in the default order, a dim may also count from the back
    assert found == {(Shard(-1),) * len(shape), *(in_order((Shard(0),) * len(shape), shape, order) for order in orders)}


def test_strided_targets_are_on_every_mesh_dim_and_of_several_factors() -> None:
    found: set[tuple[int, tuple[int, int]]] = set()

    @settings(QUICK, phases=(Phase.generate,))
    @given(target_placements(MeshSpec((2, 2, 2)), 2, [Replicate()], odd=True))
    def draw(target: list[Placement]) -> None:
        found.update((mesh_dim, cut) for mesh_dim, p in enumerate(target) if (cut := strides_of(p)) is not None)

    draw()
    assert found == set(itertools.product(range(3), itertools.product(range(2), (2, 3, 4))))


# ---------------------------------------------------------------------------------------------------------- shrinking
def test_minimal_redistribution_is_of_one_element() -> None:
    case = minimal(REDISTRIBUTE)
    tensor = case.args[0]
    assert isinstance(tensor, torch.Tensor)
    assert (tensor.shape, tensor.dtype) == ((1,), torch.float64)
    assert targets(case) == ((Replicate(), Replicate()),)


OF_SEQUENCES = {
    *("cat", "in-place", "ops in a row", "result used twice", "slice", "two results", "view", "write to a slice")
}


@pytest.mark.parametrize("tag", sorted(INPUT_CLASSES - OF_SEQUENCES - {"planner"}))
def test_classes_of_redistributions_shrink_to_few_elements(tag: str) -> None:
    case = minimal(REDISTRIBUTE, lambda case: tag in case.tags)
    tensor = case.args[0]
    assert isinstance(tensor, torch.Tensor)
    assert tensor.numel() <= 16
    assert len(targets(case)) <= 1 + (tag in ("redistributions in a row", "no redistribution needed"))


def test_sequences_shrink_to_the_steps_that_matter() -> None:
    def names(case: OpCase) -> list[object]:
        steps = case.args[2]
        assert isinstance(steps, list)
        return [step[0] for step in steps]

    assert names(minimal(SEQUENCE_OP)) == ["redistribute"]
    assert names(minimal(SEQUENCE_OP, lambda case: "mm" in names(case))) == ["mm"]
    both = minimal(SEQUENCE_OP, lambda case: {"sum", "redistribute"} <= set(names(case)))
    assert sorted(map(str, names(both))) == ["redistribute", "sum"]
    assert names(minimal(SEQUENCE_OP, lambda case: "write to a slice" in case.tags)) == ["clone", "add_to_slice"]


# -------------------------------------------------------------------------------------------------------- shard orders
@given(
    st.sampled_from([(2, 2), (2, 3), (3, 2), (2, 2, 2), (1, 2, 2)]),
    st.integers(1, 3),
    st.data(),
)
@QUICK
def test_a_shard_order_cuts_by_the_mesh_dims_in_that_order(
    shape: tuple[int, ...], multiple: int, data: st.DataObject
) -> None:
    """Where all is even, a rank holds what it would if the mesh dims stood in that order."""
    order = data.draw(st.permutations(range(len(shape))))
    size = multiple * torch.Size(shape).numel()
    value = torch.arange(size)
    placements = in_order((Shard(0),) * len(shape), shape, order)
    assert is_shard_order(placements, shape)
    locals_ = split(value, placements, shape, 0)
    for coordinate, local in zip(coordinates(shape), locals_, strict=True):
        expected = value
        for mesh_dim in order:
            expected = expected.chunk(shape[mesh_dim])[coordinate[mesh_dim]]
        assert torch.equal(local, expected)
    assert torch.equal(combine(locals_, placements, shape, (size,)), value)


def test_orders_are_told_from_other_strides() -> None:
    assert is_shard_order((strided_shard(0, 3), Shard(0)), (2, 3))
    assert not is_shard_order((strided_shard(0, 2), Shard(0)), (2, 3))
    assert not is_shard_order((Shard(0), strided_shard(0, 2)), (2, 2))
    assert not is_shard_order((strided_shard(0, 2), Shard(1)), (2, 2))
    found = {in_order((Shard(0),) * 3, (2, 2, 2), order) for order in itertools.permutations(range(3))}
    assert len(found) == 6


def test_sources_are_every_shard_order_and_other_strides_only_beside_odd_targets() -> None:
    tensor = torch.zeros(8)
    mesh = MeshSpec((2, 2, 2))
    case = OpCase(REDISTRIBUTE, "torch.clone", (tensor,), family=FAMILY.name)
    space = CombinationSpace([tensor], 3, FAMILY.alphabet(case, mesh))
    drawn = {placements for (placements,) in space}
    assert all(is_shard_order(placements, mesh.shape) for placements in drawn)
    assert drawn >= {in_order((Shard(0),) * 3, mesh.shape, order) for order in itertools.permutations(range(3))}
    assert space.total == len(drawn)
    odd = FAMILY.alphabet(replace(case, tags=frozenset({"strided shard"})), mesh)
    assert odd.allows((Shard(0), strided_shard(0, 2), Replicate()))
    assert FAMILY.alphabet(replace(case, op=SEQUENCE_OP), mesh).strided == ()
    made = replace(case, args=(tensor, [[strided_shard(0, 3), Replicate(), Replicate()]]))
    assert FAMILY.alphabet(replace(made, tags=frozenset({"strided shard"})), mesh).strided == (2, 3)


def test_a_sequence_with_a_partial_target_begins_with_no_other_reduction() -> None:
    """DTensor goes to Partial only from the same Partial."""
    mesh, (first, second) = MeshSpec((2, 2)), (torch.ones(3, 2), torch.ones(3, 2))
    for placement, alphabet in ((Partial("max"), Alphabet(partial=("max",))), (Shard(0), Alphabet())):
        steps = [["neg", 0], ["redistribute", 2, [placement, Replicate()]]]
        case = sequence_case(first, second, steps, context(mesh.shape))
        assert ("Partial target" in case.tags) == placement.is_partial()
        assert FAMILY.alphabet(case, mesh) == alphabet
