"""Sets of indices of a tensor dim, and boxes of them. They cost by their ranges, not by their elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

from verifier.placements.bounds import shard_bounds

__all__ = ["Box", "Indices", "common", "common_size", "count", "joined", "positions", "size_of", "strided", "within"]

Indices = tuple[tuple[int, int], ...]
"""Half-open ranges in ascending order, none empty, none next to another: equal sets of indices are equal tuples."""

Box = tuple[Indices, ...]
"""Indices that a rank holds: a set for each tensor dim. The rank holds all their combinations."""

_KEPT = 1 << 16


def joined(ranges: Iterable[tuple[int, int]]) -> Indices:
    """Return the set of the indices in ``ranges``, which are in ascending order and have no index in common.

    >>> joined([(0, 2), (2, 4), (5, 5), (6, 7)])
    ((0, 4), (6, 7))
    """
    result: list[tuple[int, int]] = []
    for first, last in ranges:
        if first < last:
            if result and result[-1][1] == first:
                first = result.pop()[0]
            result.append((first, last))
    return tuple(result)


def count(indices: Indices) -> int:
    """Return the number of indices."""
    return sum(last - first for first, last in indices)


def positions(indices: Indices, start: int, stop: int) -> Indices:
    """Return the indices at positions ``start`` to ``stop`` of the set, in ascending order.

    >>> positions(((0, 2), (6, 9)), 1, 4)
    ((1, 2), (6, 8))
    """
    result = []
    for first, last in indices:
        size = last - first
        if start < size and stop > 0 and (low := max(start, 0)) < (high := min(stop, size)):
            result.append((first + low, first + high))
        start, stop = start - size, stop - size
        if stop <= 0:
            break
    return tuple(result)


def strided(indices: Indices, factor: int, parts: int, index: int) -> Indices:
    """Return shard ``index`` of ``parts`` of a strided shard with split factor ``factor``.

    The set is split into ``factor`` pieces, and each piece into ``parts``. The shard is made of the ``index``-th part
    of every piece.

    >>> strided(((0, 8),), 2, 2, 0)
    ((0, 2), (4, 6))
    """
    size = count(indices)
    pieces = itertools.takewhile(lambda piece: piece[0] < size, (shard_bounds(size, factor, i) for i in range(factor)))
    found: list[tuple[int, int]] = []
    for first, last in pieces:
        start, stop = shard_bounds(last - first, parts, index)
        found += positions(indices, first + start, first + stop)
    return joined(found)


@lru_cache(_KEPT)
def common(one: Indices, other: Indices) -> Indices:
    """Return the indices that are in both sets."""
    result = []
    at = to = 0
    while at < len(one) and to < len(other):
        (a, b), (c, d) = one[at], other[to]
        if (first := max(a, c)) < (last := min(b, d)):
            result.append((first, last))
        if b < d:
            at += 1
        else:
            to += 1
    return tuple(result)


@lru_cache(_KEPT)
def _common_count(one: Indices, other: Indices) -> int:
    return count(common(one, other))


def size_of(box: Box) -> int:
    """Return the number of elements in ``box``."""
    return math.prod(map(count, box))


def common_size(one: Box, other: Box) -> int:
    """Return the number of elements that are in both boxes."""
    return math.prod(map(_common_count, one, other))


def within(inner: Box, outer: Sequence[Indices]) -> bool:
    """Return whether all elements of ``inner`` are in ``outer``."""
    return size_of(inner) == 0 or all(common(a, b) == a for a, b in zip(inner, outer, strict=True))
