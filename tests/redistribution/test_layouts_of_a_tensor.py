"""Layouts: their number, their text, and what each rank holds."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from verifier.placements.algebra import split
from verifier.placements.parsing import parse_placement
from verifier.redistribution.indices import Box
from verifier.redistribution.layouts import Layout, Space, parse_layout

MESHES_AND_SHAPES = [((4,), (5,)), ((2, 3), (7, 3)), ((2, 2), (4, 2)), ((2, 2, 2), (5, 3))]


def indices(box: Box, shape: tuple[int, ...]) -> list[int]:
    """Return the flat indices of the elements in ``box``, in row-major order."""
    kept = [[*itertools.chain.from_iterable(itertools.starmap(range, ranges))] for ranges in box]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return [sum(i * s for i, s in zip(index, strides, strict=True)) for index in itertools.product(*kept)]


@pytest.mark.parametrize(
    ("mesh_ndim", "ndim", "count"), [(1, 2, 4), (2, 2, 18), (3, 2, 92), (1, 3, 5), (2, 3, 28), (3, 3, 176)]
)
def test_number_of_layouts(mesh_ndim: int, ndim: int, count: int) -> None:
    layouts = Space((2,) * mesh_ndim, (8,) * ndim).layouts
    assert len(layouts) == len({*layouts}) == count


@pytest.mark.parametrize(("mesh", "shape"), MESHES_AND_SHAPES)
def test_text_is_parsed_back(mesh: tuple[int, ...], shape: tuple[int, ...]) -> None:
    space = Space(mesh, shape)
    assert [parse_layout(str(layout), len(shape), len(mesh)) for layout in space.layouts] == [*space.layouts]


@pytest.mark.parametrize(("mesh", "shape"), MESHES_AND_SHAPES)
def test_ranks_hold_what_the_algebra_of_placements_says(mesh: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """The algebra shards real tensors from left to right, as the oracle does."""
    space = Space(mesh, shape, partial="max", strided=("_S(0, 2)",))
    value = torch.arange(math.prod(shape)).view(shape)
    compared = [layout for layout in space.layouts if layout.default_order and not layout.partial_dims]
    assert len(compared) >= 3
    for layout in compared:
        locals_ = split(value, tuple(map(parse_placement, layout.placements)), mesh, seed=0)
        held = [indices(box, shape) for box in space.boxes(layout)]
        assert held == [sorted(local.flatten().tolist()) for local in locals_], str(layout)


def test_shard_order_decides_who_holds_what() -> None:
    space = Space((2, 3), (12,))
    held = {
        text: [indices(box, (12,)) for box in space.boxes(parse_layout(text, 1, 2))]
        for text in ("S(0)S(0)", "S(0)[1]S(0)[0]")
    }
    assert held["S(0)S(0)"] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert held["S(0)[1]S(0)[0]"] == [[0, 1], [4, 5], [8, 9], [2, 3], [6, 7], [10, 11]]


def test_uneven_and_empty_shards() -> None:
    space = Space((4,), (5,), itemsize=8)
    assert space.local_bytes(Layout.of(["S(0)"])) == (16, 16, 8, 0)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("S(0)", "has placements for 1 mesh dims; the mesh has 2"),
        ("(S(0), S(2))", r"S\(2\) names tensor dim 2, the shape has 2 dims"),
        ("(S(0), X)", "'X' is no placement"),
        ("(R, P(mean))", r"'P\(mean\)' is none of P\(sum"),
        ("(P(max), P)", "mixes P.max. and P.sum."),
        ("S(0)[0]S(0)[0]", "order of the 2 shards of tensor dim 0"),
        ("(R[1], R)", "R has no shard order"),
        ("_S(0, 0)R", "split factor 0"),
        ("_S(0, 99999999)R", "split factor 99999999; at most 4,096 is judged"),
        ("", "placements for 0 mesh dims"),
    ],
)
def test_what_is_no_layout_is_refused(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        parse_layout(text, 2, 2)
