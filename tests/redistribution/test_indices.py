"""Sets of indices as ranges, against lists of all indices."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.placements.bounds import shard_bounds, strided_indices
from verifier.redistribution.bounds import _elements, lower_bound
from verifier.redistribution.graph import Graph
from verifier.redistribution.indices import Indices, common, count, joined, positions, size_of, strided, within
from verifier.redistribution.layouts import Layout, Space, parse_layout
from verifier.redistribution.steps import steps_between

flags = st.lists(st.booleans(), max_size=24)
"""Whether each index is in a set."""


def ranges_of(indices: list[int]) -> Indices:
    return joined((index, index + 1) for index in indices)


def listed(indices: Indices) -> list[int]:
    return [*itertools.chain.from_iterable(itertools.starmap(range, indices))]


@given(flags, flags, st.integers(-2, 26), st.integers(-2, 26))
def test_sets_are_those_of_their_indices(one: list[bool], other: list[bool], start: int, stop: int) -> None:
    a, b = ([i for i, inside in enumerate(each) if inside] for each in (one, other))
    first, second = ranges_of(a), ranges_of(b)
    assert listed(first) == a
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(first)), "equal sets are equal tuples"
    assert count(first) == len(a)
    assert common(first, second) == ranges_of(sorted({*a} & {*b}))
    assert within((first,), (second,)) == ({*a} <= {*b})
    assert listed(positions(first, start, stop)) == a[max(start, 0) : max(stop, 0)]


@given(flags, st.integers(1, 30), st.integers(1, 5), st.data())
def test_strided_shards(one: list[bool], factor: int, parts: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, parts - 1))
    held = [i for i, inside in enumerate(one) if inside]
    expected = [held[i] for i in strided_indices(len(held), factor, parts, index)]
    assert strided(ranges_of(held), factor, parts, index) == ranges_of(expected)


# ------------------------------------------------------------------------------------------------ against bit masks
def mask_of(space: Space, tensor_dim: int, layout: Layout, rank: int) -> int:
    """Return the indices of a tensor dim that a rank holds as a bit mask, shard by shard."""
    held = [*range(space.shape[tensor_dim])]
    for mesh_dim in layout.order(tensor_dim):
        text, extent, index = layout.placements[mesh_dim], space.mesh_shape[mesh_dim], space.coordinates[rank][mesh_dim]
        if text.startswith("_"):
            held = [held[i] for i in strided_indices(len(held), int(text[:-1].rpartition(",")[2]), extent, index)]
        else:
            held = held[slice(*shard_bounds(len(held), extent, index))]
    return sum(1 << i for i in held)


MESHES = st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda mesh: math.prod(mesh) <= 12)


@given(MESHES, st.lists(st.integers(0, 9), min_size=1, max_size=2), st.data())
def test_boxes_steps_and_bounds_are_those_of_bit_masks(mesh: list[int], shape: list[int], data: st.DataObject) -> None:
    """Sizes, bytes received by gathers and exchanges, and who holds each element, counted element by element."""
    space = Space(mesh, shape, itemsize=1, strided=("_S(0, 2)",))
    source, target = (data.draw(st.sampled_from(space.layouts)) for _ in range(2))
    ranks = range(len(space.coordinates))
    masks = [
        [[mask_of(space, dim, layout, rank) for dim in range(len(shape))] for rank in ranks]
        for layout in (source, target)
    ]
    elements = [*itertools.product(*map(range, shape))]
    held, wanted = (
        [{at for at in elements if all(m >> i & 1 for m, i in zip(mask, at, strict=True))} for mask in side]
        for side in masks
    )
    for layout, sets in ((source, held), (target, wanted)):
        assert [size_of(box) for box in space.boxes(layout)] == [*map(len, sets)]
    by_ranks = Counter(
        (sum(1 << rank for rank in ranks if at in held[rank]), sum(1 << rank for rank in ranks if at in wanted[rank]))
        for at in elements
    )
    assert +_elements(space, source, target) == by_ranks
    missing = tuple(len(wanted[rank] - held[rank]) for rank in ranks)
    for step in steps_between(space, source, target):
        if step.kind in ("all_gather", "all_to_all"):
            assert step.received == missing


def test_a_count_that_forgets_the_last_index_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above is no tautology: ranges that are one too short are another result."""
    space = Space((2, 2), (5,), itemsize=1)
    source, target = (parse_layout(text, 1, 2) for text in ("S(0)S(0)", "RR"))
    right = lower_bound(space, source, target)
    monkeypatch.setattr("verifier.redistribution.layouts.shard_bounds", lambda *args: (0, shard_bounds(*args)[1] - 1))
    assert lower_bound(Space((2, 2), (5,), itemsize=1), source, target) != right


# -------------------------------------------------------------------------------------------------- cost by ranges
def test_large_shapes_cost_what_small_ones_do() -> None:
    """A tensor of 80 million rows has as many ranges as one of 8, and all bytes are ten million times as many."""
    small, large = Space((2, 4), (8, 8)), Space((2, 4), (80_000_000, 8))
    for layout in small.layouts:
        pieces = [[len(indices) for box in space.boxes(layout) for indices in box] for space in (small, large)]
        assert pieces[0] == pieces[1]
    for one, other in zip(Graph(small).steps, Graph(large).steps, strict=True):
        assert one.key == other.key
        assert [10_000_000 * n for n in one.received] == [*other.received], str(one)
    for source, target in itertools.permutations(small.layouts, 2):
        bounds = [lower_bound(space, source, target) for space in (small, large)]
        assert bounds[1].total == 10_000_000 * bounds[0].total
