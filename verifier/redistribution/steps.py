"""Steps: every single collective or local operation that takes a tensor from one layout to another.

A step exists if each rank can get all that its new layout asks for from the ranks of its group. Whether torch has the
step is another question, which :mod:`verifier.redistribution.torch_side` asks torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from verifier.redistribution.indices import Box, common_size, size_of, within
from verifier.redistribution.layouts import Layout, Space

__all__ = ["LOCAL_KINDS", "Step", "steps_between"]

LOCAL_KINDS = ("slice", "split", "pad")
"""Steps without communication: keep a part; R to P; S to P, which fills up with the neutral element."""

_BY_KINDS = {("S", "R"): "all_gather", ("P", "R"): "all_reduce", ("P", "S"): "reduce_scatter", ("S", "S"): "all_to_all"}


@dataclass(frozen=True)
class Step:
    """One step, with what it costs.

    Parameters
    ----------
    kind
        ``all_gather``, ``all_reduce``, ``reduce_scatter``, ``all_to_all``, ``permute`` (each rank receives the whole
        local tensor of another), or one of :data:`LOCAL_KINDS`.
    mesh_dims
        The mesh dims whose ranks take part together; several if collectives are merged into one.
    received
        Bytes that each rank receives, in rank order: no byte that the rank holds, and no padding.
    padding
        Bytes that a rank receives beside these if all messages are as long as the longest, as DTensor pads them.
    hops
        Messages that a rank sends one after another, as on a ring.
    local_bytes
        The larger of the largest local tensors before and after.
    """

    source: Layout
    target: Layout
    kind: str
    mesh_dims: tuple[int, ...]
    received: tuple[int, ...]
    padding: tuple[int, ...]
    hops: int
    local_bytes: int

    @property
    def is_local(self) -> bool:
        return self.kind in LOCAL_KINDS

    @cached_property
    def bytes(self) -> int:
        """Bytes that all ranks receive together, without padding."""
        return sum(self.received)

    @cached_property
    def busiest(self) -> int:
        """Bytes that the rank with most of them receives, without padding."""
        return max(self.received)

    @property
    def key(self) -> tuple[Layout, Layout, str, tuple[int, ...]]:
        return self.source, self.target, self.kind, self.mesh_dims

    def __str__(self) -> str:
        dims = (
            ""
            if self.is_local
            else f" over mesh dim{'s' * (len(self.mesh_dims) > 1)} " + ", ".join(map(str, self.mesh_dims))
        )
        return f"{self.source} -> {self.target}: {self.kind}{dims}"


def steps_between(space: Space, source: Layout, target: Layout) -> Iterator[Step]:
    """Yield every step from ``source`` to ``target``.

    >>> from verifier.redistribution.layouts import parse_layout
    >>> space = Space((2, 4), (8, 8))
    >>> ends = parse_layout("S(0)S(0)", 2, 2), parse_layout("S(0)[1]S(0)[0]", 2, 2)
    >>> [(step.kind, step.mesh_dims, step.bytes) for step in steps_between(space, *ends)]
    [('all_to_all', (0, 1), 192), ('permute', (0, 1), 192)]
    """
    if source == target:
        return
    yield from filter(None, (_local(space, source, target), _collective(space, source, target)))
    if (permute := _permute(space, source, target)) is not None:
        yield permute


def _step(space: Space, source: Layout, target: Layout, kind: str, dims: tuple[int, ...], received: Sequence[int],
          padding: Sequence[int], hops: int) -> Step:  # fmt: skip
    size = space.itemsize
    largest = max(space.largest(source), space.largest(target))
    return Step(
        source, target, kind, dims, tuple(n * size for n in received), tuple(n * size for n in padding), hops, largest
    )


def _changed(source: Layout, target: Layout) -> tuple[int, ...]:
    """Return the mesh dims whose placements differ."""
    return tuple(d for d, (a, b) in enumerate(zip(source.placements, target.placements, strict=True)) if a != b)


def _local(space: Space, source: Layout, target: Layout) -> Step | None:
    before, after = space.boxes(source), space.boxes(target)
    nothing = [0] * len(before)
    if source.partial_dims == target.partial_dims:
        if all(map(within, after, before)):
            return _step(space, source, target, "slice", (), nothing, nothing, 0)
        return None
    changed = _changed(source, target)
    if len(changed) != 1 or target.kind(changed[0]) != "P":
        return None
    if source.kind(changed[0]) == "R":
        return _step(space, source, target, "split", (), nothing, nothing, 0) if before == after else None
    if _covered(space, source, target, changed, before, after):
        return _step(space, source, target, "pad", (), nothing, nothing, 0)
    return None


def _collective(space: Space, source: Layout, target: Layout) -> Step | None:
    changed = _changed(source, target)
    kinds = {(source.kind(d), target.kind(d)) for d in changed} or {("S", "S")}
    if len(kinds) != 1 or (pair := next(iter(kinds))) not in _BY_KINDS:
        return None
    before, after = space.boxes(source), space.boxes(target)
    kind = _BY_KINDS[pair]
    if kind == "all_to_all":
        dims = _fewest_dims(space, source, target, changed, before, after)
        return None if dims is None else _all_to_all(space, source, target, dims, before, after)
    group_size = math.prod(space.mesh_shape[d] for d in changed)
    hops = group_size - 1
    if kind == "all_reduce":
        if before != after:
            return None
        received, padding = [0] * len(before), [0] * len(before)
        for group in space.groups(changed):
            size = size_of(before[group[0]])
            chunks = [size // group_size + (i < size % group_size) for i in range(group_size)]
            for rank, chunk in zip(group, chunks, strict=True):
                received[rank] = hops * chunk + size - chunk
                padding[rank] = 2 * hops * chunks[0] - received[rank]
        return _step(space, source, target, kind, changed, received, padding, 2 * hops)
    if not _covered(space, source, target, changed, before, after):
        return None
    if kind == "all_gather":
        received = [size_of(after[rank]) - common_size(after[rank], before[rank]) for rank in range(len(before))]
        longest = _longest(space, changed, before)
    else:
        received = [hops * size_of(box) for box in after]
        longest = _longest(space, changed, after)
    padding = [hops * most - got for most, got in zip(longest, received, strict=True)]
    return _step(space, source, target, kind, changed, received, padding, hops)


def _longest(space: Space, dims: tuple[int, ...], boxes: Sequence[Box]) -> list[int]:
    """Return for each rank the size of the largest box in its group along ``dims``."""
    longest = [0] * len(boxes)
    for group in space.groups(dims):
        most = max(size_of(boxes[rank]) for rank in group)
        for rank in group:
            longest[rank] = most
    return longest


def _all_to_all(
    space: Space, source: Layout, target: Layout, dims: tuple[int, ...], before: Sequence[Box], after: Sequence[Box]
) -> Step:
    received, padding = [0] * len(before), [0] * len(before)
    for group in space.groups(dims):
        longest = max(common_size(before[p], after[q]) for p in group for q in group)
        for rank in group:
            received[rank] = size_of(after[rank]) - common_size(before[rank], after[rank])
            padding[rank] = max(0, (len(group) - 1) * longest - received[rank])
    hops = math.prod(space.mesh_shape[d] for d in dims) - 1
    return _step(space, source, target, "all_to_all", dims, received, padding, hops)


def _fewest_dims(space: Space, source: Layout, target: Layout, changed: tuple[int, ...], before: Sequence[Box],
                 after: Sequence[Box]) -> tuple[int, ...] | None:  # fmt: skip
    """Return the fewest mesh dims, all sharding, along which the groups can exchange what they need."""
    shards = [d for d in range(len(space.mesh_shape)) if source.kind(d) == target.kind(d) == "S"]
    others = [d for d in shards if d not in changed]
    for count in range(len(others) + 1):
        for more in itertools.combinations(others, count):
            dims = tuple(sorted((*changed, *more)))
            if dims and _covered(space, source, target, dims, before, after):
                return dims
    return None


def _covered(space: Space, source: Layout, target: Layout, dims: tuple[int, ...], before: Sequence[Box],
             after: Sequence[Box]) -> bool:  # fmt: skip
    """Return whether the ranks of each group along ``dims`` hold all that each rank of the group is to hold.

    Boxes of one layout are equal or have nothing in common.
    """
    for group in space.groups(dims):
        held = {before[rank] for rank in group}
        for box in {after[rank] for rank in group}:
            if sum(common_size(box, other) for other in held) != size_of(box):
                return False
    return True


def _permute(space: Space, source: Layout, target: Layout) -> Step | None:
    """Return the step in which some ranks swap whole local tensors, and each other rank keeps its own."""
    if len(source.partial_dims) != len(target.partial_dims):
        return None
    before, after = _items(space, source), _items(space, target)
    moving = [rank for rank, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    if not moving or sorted(before) != sorted(after):
        return None
    free = set(moving)
    received, dims = [0] * len(before), set[int]()
    for rank in moving:
        sender = min(
            (other for other in free if before[other] == after[rank]),
            key=lambda other: (len(_apart(space, rank, other)), other),
        )
        free.remove(sender)
        received[rank] = size_of(after[rank][0])
        dims |= _apart(space, rank, sender)
    return _step(space, source, target, "permute", tuple(sorted(dims)), received, [0] * len(before), 1)


def _items(space: Space, layout: Layout) -> list[tuple[Box, tuple[int, ...]]]:
    """Return what each rank holds: the indices, and which summand of them."""
    dims = layout.partial_dims
    return [
        (box, tuple(coordinate[d] for d in dims))
        for box, coordinate in zip(space.boxes(layout), space.coordinates, strict=True)
    ]


def _apart(space: Space, rank: int, other: int) -> set[int]:
    return {d for d, (a, b) in enumerate(zip(space.coordinates[rank], space.coordinates[other], strict=True)) if a != b}
