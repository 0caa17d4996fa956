"""Where the shards of a tensor dim begin and end; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["leaves_a_rank_empty", "shard_bounds", "strided_indices"]


def shard_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return where shard ``index`` of ``parts`` of a tensor dim of ``size`` begins and ends, as by ``torch.chunk``.

    Every shard has ``ceil(size / parts)`` elements until they run out: then comes a smaller one, then empty ones.

    >>> [stop - start for start, stop in (shard_bounds(17, 8, i) for i in range(8))]
    [3, 3, 3, 3, 3, 2, 0, 0]
    """
    width = -(-size // parts)
    return min(index * width, size), min((index + 1) * width, size)


def leaves_a_rank_empty(size: int, parts: int) -> bool:
    """Return whether the last of ``parts`` shards of a tensor dim of ``size`` has no elements.

    >>> [parts for parts in range(2, 8) if leaves_a_rank_empty(5, parts)]
    [4, 6, 7]
    """
    start, stop = shard_bounds(size, parts, parts - 1)
    return start == stop


def strided_indices(size: int, factor: int, parts: int, index: int) -> Sequence[int]:
    """Return the indices in shard ``index`` of a strided shard of a tensor dim of ``size``.

    The dim is split into ``factor`` pieces, and each piece into ``parts``. The shard is made of the ``index``-th part
    of every piece.

    >>> strided_indices(8, 2, 2, 0)
    [0, 1, 4, 5]
    """
    indices: list[int] = []
    for piece in range(factor):
        first, last = shard_bounds(size, factor, piece)
        start, stop = shard_bounds(last - first, parts, index)
        indices += range(first + start, first + stop)
    return indices
