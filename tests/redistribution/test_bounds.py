"""The lower bound, against brute force over all messages and over all paths."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import cache

import pytest

from verifier.redistribution.bounds import Bound, lower_bound
from verifier.redistribution.graph import Graph, Path
from verifier.redistribution.indices import Box
from verifier.redistribution.layouts import Layout, Space, parse_layout

Values = tuple[frozenset[int], ...]
"""For each rank the values that it has of one element: each is a set of summands, as a bit mask, that are added up."""


def bound(space: Space, source: str, target: str) -> Bound:
    ends = [parse_layout(text, len(space.shape), len(space.mesh_shape)) for text in (source, target)]
    return lower_bound(space, ends[0], ends[1])


KNOWN = [  # on a mesh 2x2 with 8x8 elements of 4 bytes: source, target, bytes of all ranks, of the busiest
    ("PP", "RR", 2 * 3 * 256, 2 * 3 * 64),
    ("PP", "S(0)S(0)", 3 * 256, 3 * 64),
    ("PR", "RR", 2 * 2 * 256, 256),
    ("S(0)S(0)", "RR", 4 * 3 * 64, 3 * 64),
    ("S(0)R", "RS(0)", 2 * 128, 128),
    ("PR", "RP", 2 * 256, 128),
    ("RR", "PP", 0, 0),
    ("S(0)R", "PR", 0, 0),
    ("PR", "PP", 0, 0),
    ("S(0)R", "RP", 256, 64),
]


@pytest.mark.parametrize(("source", "target", "total", "busiest"), KNOWN)
def test_known_bounds(source: str, target: str, total: int, busiest: int) -> None:
    assert bound(Space((2, 2), (8, 8)), source, target) == Bound(total, busiest)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_an_all_reduce_over_n_ranks_needs_two_times_n_minus_one(ranks: int) -> None:
    space = Space((ranks,), (ranks,), itemsize=1)
    assert bound(space, "P", "R") == Bound(2 * (ranks - 1) * ranks, 2 * (ranks - 1))


# -------------------------------------------------------------------------------------------- against all messages
def closed(values: frozenset[int]) -> frozenset[int]:
    """Return all sums of the values that have no summand in common."""
    while True:
        sums = {a | b for a, b in itertools.combinations(values, 2) if not a & b}
        if sums <= values:
            return values
        values |= sums


def reached(values: Values, groups: tuple[tuple[int, ...], ...], whole: int) -> bool:
    """Return whether each of ``groups`` has values, at most one of a rank, that add up to ``whole``."""
    for group in groups:
        sums = {0}
        for rank in group:
            sums |= {a | b for a in sums for b in values[rank] if not a & b}
        if whole not in sums:
            return False
    return True


@cache
def fewest_messages(start: Values, groups: tuple[tuple[int, ...], ...], whole: int) -> int:
    """Return the fewest messages after which ``groups`` have the element, by trying all sequences of messages.

    A message is any value that a rank has. A message between ranks of one group counts as well.
    """
    seen, front = {start}, [start]
    for count in itertools.count():
        if any(reached(values, groups, whole) for values in front):
            return count
        onward = []
        for values in front:
            for sender, receiver in itertools.permutations(range(len(values)), 2):
                for value in values[sender] - values[receiver]:
                    more = closed(values[receiver] | {value})
                    after = (*values[:receiver], more, *values[receiver + 1 :])
                    if after not in seen:
                        seen.add(after)
                        onward.append(after)
        front = onward
    raise AssertionError


def by_messages(space: Space, source: Layout, target: Layout) -> int:
    """Return the fewest bytes of messages in which all elements get from ``source`` to ``target``."""
    dims = source.partial_dims
    classes = sorted({tuple(c[d] for d in dims) for c in space.coordinates})
    total = 0
    for index in itertools.product(*map(range, space.shape)):
        start = tuple(
            frozenset({1 << classes.index(tuple(c[d] for d in dims))} if holds(box, index) else ())
            for c, box in zip(space.coordinates, space.boxes(source), strict=True)
        )
        after = space.boxes(target)
        groups = tuple(g for g in space.groups(target.partial_dims) if any(holds(after[rank], index) for rank in g))
        total += fewest_messages(start, groups, (1 << len(classes)) - 1)
    return total * space.itemsize


def holds(box: Box, index: tuple[int, ...]) -> bool:
    return all(any(a <= i < b for a, b in ranges) for ranges, i in zip(box, index, strict=True))


@pytest.mark.parametrize(
    ("mesh", "shape", "summands"),
    [
        pytest.param((2,), (3, 2), 2, id="2"),
        pytest.param((3,), (2, 2), 3, id="3 ranks, one without rows"),
        pytest.param((2, 2), (3,), 2, id="2x2"),
        pytest.param((2, 2), (3,), 4, id="2x2 with four summands", marks=pytest.mark.nightly),
    ],
)
def test_no_sequence_of_messages_beats_the_bound(mesh: tuple[int, ...], shape: tuple[int, ...], summands: int) -> None:
    """All sequences of messages are tried. With four summands this takes half a minute."""
    space = Space(mesh, shape, itemsize=1)
    sources = [one for one in space.layouts if math.prod(mesh[d] for d in one.partial_dims) <= summands]
    pairs = [(source, target) for source in sources for target in space.layouts if source != target]
    equal = 0
    for source, target in pairs:
        least, found = lower_bound(space, source, target).total, by_messages(space, source, target)
        assert least <= found, f"{source} -> {target}"
        equal += least == found
    assert equal >= 0.9 * len(pairs), "the bound is reached nearly everywhere"


# ------------------------------------------------------------------------------------------------ against all paths
def paths_of(graph: Graph, source: Layout, most: int) -> Iterator[Path]:
    """Yield every path from ``source`` of up to ``most`` steps that comes to no layout twice."""
    by_source: dict[Layout, list[object]] = {}
    for step in graph.steps:
        by_source.setdefault(step.source, []).append(step)

    def go_on(path: Path) -> Iterator[Path]:
        yield path
        if len(path.steps) < most:
            for step in by_source.get(path.target, ()):
                if step.target not in path.layouts:  # type: ignore[attr-defined]
                    yield from go_on(Path(source, (*path.steps, step)))  # type: ignore[arg-type]

    yield from go_on(Path(source))


@pytest.mark.parametrize(("mesh", "shape"), [((4,), (5, 3)), ((2, 2), (3,)), ((2, 3), (7,))], ids=["4", "2x2", "2x3"])
def test_no_path_beats_the_bound(mesh: tuple[int, ...], shape: tuple[int, ...]) -> None:
    space = Space(mesh, shape)
    graph = Graph(space)
    tried = 0
    for source in space.layouts:
        for path in paths_of(graph, source, 4):
            least = lower_bound(space, source, path.target)
            assert path.bytes >= least.total, [*map(str, path.steps)]
            assert path.busiest >= least.busiest, [*map(str, path.steps)]
            tried += 1
    assert tried > 50


@pytest.mark.parametrize(("mesh", "shape"), [((2, 4), (8, 8)), ((2, 3), (5, 7)), ((2, 2), (3, 3, 2))])
def test_the_path_of_fewest_bytes_does_not_beat_the_bound(mesh: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Of all sequences of steps, of any length."""
    space = Space(mesh, shape)
    graph = Graph(space)
    ways = graph.ways(lambda step: float(step.bytes))
    reached_bound = 0
    for source in space.layouts:
        for target, path in graph.paths(source, ways).items():
            least = lower_bound(space, source, target)
            assert path.bytes >= least.total
            assert path.busiest >= least.busiest
            reached_bound += path.bytes == least.total
    assert reached_bound > len(space.layouts) ** 2 / 2
