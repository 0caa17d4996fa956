"""The lower bound: bytes that ranks must receive in a redistribution, whatever the steps are. Needs no torch."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from verifier.redistribution.indices import Indices
from verifier.redistribution.layouts import Layout, Space

__all__ = ["Bound", "lower_bound"]


@dataclass(frozen=True)
class Bound:
    """Bytes that no choice of steps can avoid.

    Parameters
    ----------
    total
        Bytes that all ranks together must receive.
    busiest
        Bytes that the rank that receives most must receive.
    """

    total: int
    busiest: int


def lower_bound(space: Space, source: Layout, target: Layout) -> Bound:
    """Return the lower bound of a redistribution from ``source`` to ``target``.

    A message carries values of elements, and a rank may add up what it has. The bound counts messages of one element,
    separately for each element, between the groups of ranks along the mesh dims over which ``target`` is Partial. A
    group has to hold summands that add up to the element. If ``target`` is not Partial, each rank is a group.

    - Source and target not Partial: a rank receives each element that it is to hold and does not hold.
    - Source Partial over mesh dims along which the target is not: there are as many summands as these have ranks. The
      first group to hold the sum needs a message for each other summand. Each other group needs a message later, or it
      would have held the sum first. This is 2(n - 1) for an all-reduce over n ranks, the bound of Patarasuk and Yuan,
      "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
    - Otherwise a group needs a message if one of its own summands is in no rank of the group.

    >>> from verifier.redistribution.layouts import parse_layout
    >>> space = Space((4,), (8,))
    >>> lower_bound(space, parse_layout("P", 1, 1), parse_layout("R", 1, 1))
    Bound(total=192, busiest=48)
    >>> lower_bound(space, parse_layout("R", 1, 1), parse_layout("S(0)", 1, 1))
    Bound(total=0, busiest=0)
    """
    groups = space.groups(target.partial_dims)
    summed = [d for d in source.partial_dims if d not in target.partial_dims]
    kept = [d for d in source.partial_dims if d in target.partial_dims]
    summands = math.prod(space.mesh_shape[d] for d in summed)
    by_kept = [_by_coordinate(space, group, kept) for group in groups]
    masks = [sum(1 << rank for rank in group) for group in groups]
    total, received = 0, [0] * len(groups)
    for (held, wanted), count in _elements(space, source, target).items():
        asking = [number for number, mask in enumerate(masks) if mask & wanted]
        if not asking:
            continue
        if summands > 1:
            missing = asking
            total += count * (summands - 1 + len(asking) - 1 + (not any(masks[number] & held for number in asking)))
        else:
            missing = [number for number in asking if not all(ranks & held for ranks in by_kept[number])]
            total += count * len(missing)
        for number in missing:
            received[number] += count
    shares = [-(-elements // len(group)) for elements, group in zip(received, groups, strict=True)]
    average = -(-total // len(space.coordinates))
    return Bound(total * space.itemsize, max(average, *shares) * space.itemsize)


def _by_coordinate(space: Space, group: Sequence[int], mesh_dims: Sequence[int]) -> list[int]:
    """Return the ranks of ``group`` by their coordinates on ``mesh_dims``, each set of ranks as a bit mask."""
    by: dict[tuple[int, ...], int] = {}
    for rank in group:
        at = tuple(space.coordinates[rank][d] for d in mesh_dims)
        by[at] = by.get(at, 0) | 1 << rank
    return list(by.values())


def _elements(space: Space, source: Layout, target: Layout) -> Counter[tuple[int, int]]:
    """Count elements by the ranks that hold them in ``source`` and those that hold them in ``target``, as bit masks."""
    everywhere = (1 << len(space.coordinates)) - 1
    counts = Counter({(everywhere, everywhere): 1})
    for tensor_dim in range(len(space.shape)):
        held = [box[tensor_dim] for box in space.boxes(source)]
        wanted = [box[tensor_dim] for box in space.boxes(target)]
        along = _indices_by_ranks(space.shape[tensor_dim], held, wanted)
        both = Counter[tuple[int, int]]()
        for ((a, b), n), ((c, d), m) in itertools.product(counts.items(), along.items()):
            both[a & c, b & d] += n * m
        counts = both
    return counts


def _indices_by_ranks(size: int, held: Sequence[Indices], wanted: Sequence[Indices]) -> Counter[tuple[int, int]]:
    """Count the indices of one tensor dim by the ranks that hold them, in one pass over the ends of all ranges."""
    turns: dict[int, list[int]] = {0: [0, 0], size: [0, 0]}
    for side, sets in enumerate((held, wanted)):
        for rank, indices in enumerate(sets):
            for end in itertools.chain.from_iterable(indices):
                turns.setdefault(end, [0, 0])[side] ^= 1 << rank
    counts = Counter[tuple[int, int]]()
    a = b = 0
    for first, last in itertools.pairwise(sorted(turns)):
        a, b = a ^ turns[first][0], b ^ turns[first][1]
        counts[a, b] += last - first
    return counts
