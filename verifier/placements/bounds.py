"""Where the shards of a tensor dim begin and end; needs no torch."""

__all__ = ["shard_bounds"]


def shard_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return where shard ``index`` of ``parts`` of a tensor dim of ``size`` begins and ends, as by ``torch.chunk``.

    Every shard has ``ceil(size / parts)`` elements until they run out: then comes a smaller one, then empty ones.

    >>> [stop - start for start, stop in (shard_bounds(17, 8, i) for i in range(8))]
    [3, 3, 3, 3, 3, 2, 0, 0]
    """
    width = -(-size // parts)
    return min(index * width, size), min((index + 1) * width, size)
