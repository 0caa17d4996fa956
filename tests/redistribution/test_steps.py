"""Steps: which there are, and their exact bytes."""

from __future__ import annotations

import pytest

from verifier.redistribution.graph import Graph
from verifier.redistribution.indices import common_size, size_of
from verifier.redistribution.layouts import Space, parse_layout
from verifier.redistribution.steps import Step, steps_between


def steps(space: Space, source: str, target: str) -> dict[str, Step]:
    ends = [parse_layout(text, len(space.shape), len(space.mesh_shape)) for text in (source, target)]
    return {step.kind: step for step in steps_between(space, ends[0], ends[1])}


EVEN = [  # source, target, kind, bytes that each of the 4 ranks receives of 8x8 elements of 4 bytes
    ("S(0)", "R", "all_gather", 3 * 64),
    ("P", "R", "all_reduce", 2 * 3 * 64),
    ("P", "S(1)", "reduce_scatter", 3 * 64),
    ("S(0)", "S(1)", "all_to_all", 3 * 16),
    ("R", "S(0)", "slice", 0),
    ("R", "P", "split", 0),
    ("S(0)", "P", "pad", 0),
]


@pytest.mark.parametrize(("source", "target", "kind", "received"), EVEN)
def test_bytes_of_even_shards(source: str, target: str, kind: str, received: int) -> None:
    found = steps(Space((4,), (8, 8)), source, target)
    assert found.keys() == {kind}
    assert found[kind].received == (received,) * 4
    assert sum(found[kind].padding) == 0


def test_bytes_of_uneven_and_empty_shards() -> None:
    """Five rows on four ranks are 2, 2, 1 and 0; DTensor gathers four pieces of 2."""
    (gather,) = steps(Space((4,), (5,), itemsize=1), "S(0)", "R").values()
    assert gather.received == (3, 3, 4, 5)
    assert gather.padding == (3, 3, 2, 1)
    (scatter,) = steps(Space((4,), (5,), itemsize=1), "P", "S(0)").values()
    assert scatter.received == (6, 6, 3, 0)
    assert scatter.padding == (0, 0, 3, 6)
    (exchange,) = steps(Space((2,), (3, 3), itemsize=1), "S(0)", "S(1)").values()
    assert exchange.received == (2, 2)
    assert exchange.padding == (2, 2)


def test_a_step_needs_ranks_that_hold_what_is_asked_for() -> None:
    """The outer of two shards of a tensor dim cannot be gathered alone: the inner cut is of half the rows."""
    space = Space((2, 2), (8, 8))
    assert steps(space, "S(0)S(0)", "RS(0)") == {}
    assert steps(space, "S(0)S(0)", "S(0)R").keys() == {"all_gather"}
    assert steps(space, "S(0)[1]S(0)[0]", "RS(0)").keys() == {"all_gather"}
    assert steps(space, "S(0)R", "RS(0)").keys() == {"permute"}
    assert steps(Space((2, 3), (6, 6)), "S(0)R", "RS(0)") == {}, "the local tensors differ in size"


def test_collectives_merged_over_mesh_dims() -> None:
    space = Space((2, 4), (8, 8))
    both = steps(space, "S(0)S(0)", "RR")["all_gather"]
    assert (both.mesh_dims, both.hops, both.bytes) == ((0, 1), 7, 8 * 7 * 32)
    assert steps(space, "PP", "RR")["all_reduce"].bytes == 2 * 7 * 256
    assert steps(space, "PP", "S(0)S(1)")["reduce_scatter"].received == (7 * 32,) * 8
    exchange = steps(space, "S(0)S(1)", "S(1)S(0)")["all_to_all"]
    assert exchange.mesh_dims == (0, 1)
    assert exchange.bytes == 8 * 32 - 2 * 2 * 2 * 4 * 2, "rank 0 and the last keep 2 of their 4x2 elements, others some"


def test_a_permute_moves_only_what_changes_places() -> None:
    space = Space((2, 2), (4,), itemsize=1)
    swap = steps(space, "S(0)S(0)", "S(0)[1]S(0)[0]")["permute"]
    assert swap.received == (0, 1, 1, 0)
    assert (swap.mesh_dims, swap.hops) == ((0, 1), 1)
    assert steps(space, "PR", "RP")["permute"].received == (0, 4, 4, 0)


def test_where_shards_are_equal_by_chance_nothing_is_sent() -> None:
    """One row is on the first rank whatever the shard order is."""
    assert steps(Space((2, 2), (1, 4)), "S(0)S(0)", "S(0)[1]S(0)[0]")["slice"].bytes == 0


@pytest.mark.parametrize(("mesh", "shape"), [((2, 3), (7, 3)), ((2, 2), (4, 4)), ((4,), (5, 6))])
def test_every_collective_receives_exactly_what_is_missing(mesh: tuple[int, ...], shape: tuple[int, ...]) -> None:
    space = Space(mesh, shape, itemsize=1)
    counted = 0
    for step in Graph(space).steps:
        if step.kind in ("all_gather", "all_to_all"):
            before, after = space.boxes(step.source), space.boxes(step.target)
            for got, old, new in zip(step.received, before, after, strict=True):
                assert got == size_of(new) - common_size(old, new)
            counted += 1
    assert counted > 2


def test_the_networkx_graph_has_every_step() -> None:
    graph = Graph(Space((2, 4), (8, 8)))
    drawn = graph.to_networkx()
    assert (drawn.is_directed(), drawn.is_multigraph()) == (True, True)
    assert drawn.number_of_nodes() == 18
    assert drawn.number_of_edges() == len(graph.steps)
    assert drawn.nodes["(S(0), S(0))"]["local_bytes"] == 32
    assert drawn.edges["(S(0), R)", "(R, R)", "all_gather/0"]["bytes"] == 8 * 128
