"""Generators of sizes, and of tensors whose values expose mix-ups.

Sizes come from small palettes, so that even, uneven and empty shards all occur often. Shapes repeat, which saves time:
DTensor needs milliseconds to propagate sharding for a new shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import prod

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from verifier.placements.bounds import shard_bounds

__all__ = [
    "LARGEST_VALUE",
    "Layout",
    "chunk_sizes",
    "dim_sizes",
    "filled",
    "layouts",
    "rarely",
    "seeds",
    "shard_classes",
    "shard_sizes",
]

LARGEST_VALUE = 8
"""Largest magnitude of an element of a filled tensor: sums of 32 elements are exact even in bfloat16."""

# -8 is left out: a block that holds every value once must not add up to 0, which would hide a missing or doubled sum.
_PALETTE = torch.tensor([value for value in range(1 - LARGEST_VALUE, LARGEST_VALUE + 1) if value])


# -------------------------------------------------------------------------------------------------------------- sizes
def chunk_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Return the sizes of the ``parts`` shards of a tensor dim of ``size``, as by :func:`torch.chunk`.

    >>> chunk_sizes(17, 8)
    (3, 3, 3, 3, 3, 2, 0, 0)
    """
    bounds = (shard_bounds(size, parts, part) for part in range(parts))
    return tuple(stop - start for start, stop in bounds)


def shard_sizes(size: int, extents: Iterable[int]) -> tuple[int, ...]:
    """Return the sizes of the shards of a tensor dim that mesh dims of ``extents`` shard one after the other.

    >>> shard_sizes(5, (4,)), shard_sizes(5, (2, 2))
    ((2, 2, 1, 0), (2, 1, 1, 1))
    """
    sizes: tuple[int, ...] = (size,)
    for extent in extents:
        sizes = tuple(shard for whole in sizes for shard in chunk_sizes(whole, extent))
    return sizes


def shard_classes(size: int, mesh_shape: Sequence[int]) -> frozenset[str]:
    """Return the kinds of shards of a tensor dim of ``size``, over every choice of mesh dims that shard it.

    The kinds are ``"even shard"``, ``"uneven shard"`` (different sizes, none of them 0) and ``"empty shard"``. The
    result is empty for a tensor dim of size 0 and for a mesh of one rank.

    >>> sorted(shard_classes(3, (2, 2)))
    ['empty shard', 'uneven shard']
    """
    extents = [extent for extent in mesh_shape if extent > 1]
    cuts = {shard_sizes(size, some) for count in range(1, len(extents) + 1) for some in combinations(extents, count)}
    if not size:
        return frozenset()
    return frozenset(
        "empty shard" if not min(cut) else "even shard" if min(cut) == max(cut) else "uneven shard" for cut in cuts
    )


@cache
def dim_sizes(world_size: int, *, smallest: int = 0, largest: int | None = None) -> SearchStrategy[int]:
    """Return a generator of sizes of a tensor dim, for every kind of shard on ``world_size`` ranks.

    Parameters
    ----------
    world_size
        Number of ranks that shard the tensor dim.
    smallest
        1 excludes the size 0.
    largest
        Upper limit of the sizes; about twice the world size if None.

    Returns
    -------
    SearchStrategy[int]
        Sizes 1, primes, multiples of the world size, one less and one more than a multiple; rarely 0. Shrinks to 1 and
        not to 0, because an empty tensor agrees with everything.

    Raises
    ------
    ValueError
        If ``world_size`` is not positive.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size} must be at least 1")
    near = {multiple * world_size + offset for multiple in (1, 2) for offset in (-1, 0, 1)}
    sizes = sorted(size for size in near | {1, 3, 7} if 0 < size <= (largest or max(near | {7})))
    uneven = [size for size in sizes if "uneven shard" in shard_classes(size, (world_size,))]
    # Sizes that shard unevenly without an empty shard are drawn more often if they are few; 0 is drawn rarely.
    scarce = uneven if 2 * len(uneven) < len(sizes) else []
    return st.sampled_from([*sorted(2 * (sizes + scarce)), *([0] if smallest == 0 else [])])


# ------------------------------------------------------------------------------------------------------------- values
@dataclass(frozen=True)
class Layout:
    """Whether a tensor is contiguous or column-major, requires a gradient, and is an ``nn.Parameter``."""

    contiguous: bool = True
    requires_grad: bool = False
    parameter: bool = False


# One choice from a weighted list, instead of one choice per field: Hypothesis shrinks sooner to fewer choices.
_PLAIN = (*[Layout()] * 4, Layout(contiguous=False))
_TRAINABLE = (
    *[Layout(requires_grad=True)] * 12,
    *[Layout(requires_grad=True, parameter=True)] * 8,
    *[Layout(contiguous=False, requires_grad=True)] * 3,
    *[Layout(contiguous=False, requires_grad=True, parameter=True)] * 2,
    *[Layout()] * 3,
    Layout(parameter=True),
    Layout(contiguous=False),
)


def layouts(*, trainable: bool = False) -> SearchStrategy[Layout]:
    """Return a generator of layouts; one in five is not contiguous.

    If ``trainable``, five out of six require a gradient, and some are an ``nn.Parameter``, as in a module. Shrinks to a
    contiguous plain tensor, which requires a gradient if ``trainable``.
    """
    return st.sampled_from(_TRAINABLE if trainable else _PLAIN)


def seeds() -> SearchStrategy[int]:
    """Return a generator of seeds for :func:`filled`; shrinks to 0."""
    return st.integers(0, 2**16 - 1)


def rarely(one_in: int) -> SearchStrategy[bool]:
    """Return a generator that gives True about once in ``one_in`` draws and shrinks to False."""
    return st.sampled_from([False] * (one_in - 1) + [True])


def filled(shape: Sequence[int], dtype: torch.dtype, seed: int, layout: Layout | None = None) -> torch.Tensor:
    """Return a tensor of small non-zero integers that repeat as little as possible.

    Parameters
    ----------
    shape
        Shape of the tensor.
    dtype
        A signed dtype.
    seed
        Fixes the values.
    layout
        Strides and gradient; ``Layout()`` if None. A tensor of fewer than two dims is always contiguous.

    Returns
    -------
    torch.Tensor
        Shape ``shape``. Each run of 15 elements, row-major, has each of -7 .. -1 and 1 .. 8 once, so that swapped
        elements show. Two or more elements have both signs. No whole run adds up to 0.

    Raises
    ------
    ValueError
        If ``dtype`` has no negative values.

    >>> filled((2, 3), torch.float32, 0)
    tensor([[ 6., -5., -4.],
            [ 7.,  8., -3.]])
    """
    if not dtype.is_signed:
        raise ValueError(f"dtype={dtype} has no negative values; use a signed dtype such as torch.float32")
    layout = layout or Layout()
    count = prod(shape)
    runs = -(-count // len(_PALETTE))
    # Sorting random keys shuffles every run in one call.
    keys = torch.rand(runs, len(_PALETTE), generator=torch.Generator().manual_seed(seed))
    values = _PALETTE[keys.argsort(dim=1)].flatten()[:count]
    if count > 1 and bool((values > 0).all() | (values < 0).all()):
        values[-1].neg_()
    tensor = values.reshape(tuple(shape)).to(dtype)
    if not layout.contiguous:
        reverse = tuple(reversed(range(tensor.ndim)))
        tensor = tensor.permute(reverse).contiguous().permute(reverse)
    if layout.parameter:
        return torch.nn.Parameter(tensor, requires_grad=layout.requires_grad)
    return tensor.requires_grad_(layout.requires_grad)
