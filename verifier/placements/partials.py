"""Partial values: the reductions that a dtype allows, and random local tensors that reduce to a value.

This module belongs to the algebra in :mod:`verifier.placements.algebra` and calls none of DTensor's code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, reduce

import torch

from verifier.core.placement_text import BITWISE_REDUCTIONS, REDUCTIONS

__all__ = [
    "LARGEST_PART",
    "bitwise",
    "bitwise_reductions",
    "is_reducible",
    "largest_part",
    "partial_reductions",
    "split_index",
    "split_partial",
]

# Noise of a Partial split: quarters up to the first number, scaled per rank by one of the others. The noise has
# quarters because an op that rounds is linear on integers. For an exact reduction the sum of the absolute values
# over 8 ranks must stay below 2**p in a dtype with p significant bits, two of which the quarters take.
_NOISE = (8, (1, 3, 7))
_NOISE_NARROW = (4, (1, 2, 3))  # bfloat16 and integers have no bits for quarters
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
LARGEST_PART = 512.0
"""The largest element of any local tensor in a Partial split of small integers, over up to 8 ranks."""


def partial_reductions(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the reductions under which tensors of ``dtype`` are tried as Partial.

    An average of integers is not an integer, and complex numbers have no order. The sum of bools is their maximum, so
    it is tried only where DTensor claims it; see :func:`is_reducible`. Torch has no sums of floats of one byte and of
    wide unsigned integers.

    >>> partial_reductions(torch.int64), partial_reductions(torch.bool)
    (('sum', 'product', 'min', 'max'), ('product', 'min', 'max'))
    """
    if (dtype.is_floating_point and dtype.itemsize == 1) or dtype in _WIDE_UNSIGNED:
        refused = set(REDUCTIONS)
    elif dtype == torch.bool:
        refused = {"sum", "avg"}
    elif dtype.is_complex:
        refused = {"min", "max"}
    elif not dtype.is_floating_point:
        refused = {"avg"}
    else:
        refused = set()
    return tuple(reduction for reduction in REDUCTIONS if reduction not in refused)


def bitwise_reductions(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the bitwise reductions under which ``dtype`` tensors can be Partial: all three for integers, else none.

    Unsigned types wider than one byte are excluded too, because torch implements few kernels for them.

    >>> bitwise_reductions(torch.int64), bitwise_reductions(torch.bool)
    (('band', 'bor', 'bxor'), ())
    """
    return BITWISE_REDUCTIONS if dtype in _INTEGERS else ()


def is_reducible(dtype: torch.dtype, reduction: str) -> bool:
    """Return whether collectives reduce tensors of ``dtype`` by ``reduction``, so that a reduction can be pending.

    For bools, a sum is OR, the same as a maximum; a product is AND, the same as a minimum. gloo reduces them in this
    way, and nccl intends to (https://github.com/pytorch/pytorch/pull/41959). Neither has an average of bools.

    >>> is_reducible(torch.bool, "sum"), is_reducible(torch.bool, "avg"), is_reducible(torch.int64, "avg")
    (True, False, False)
    """
    if dtype == torch.bool:
        return reduction != "avg"
    return reduction in partial_reductions(dtype) or (reduction in BITWISE_REDUCTIONS and not _has_fractions(dtype))


def _has_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _unit(dtype: torch.dtype) -> float:
    """Return the difference between neighbouring values of the noise in a tensor of ``dtype``."""
    return 0.25 if dtype in (torch.float64, torch.float32, torch.complex128, torch.complex64) else 1


def _noise(like: torch.Tensor, generator: torch.Generator, low: int, high: int) -> torch.Tensor:
    """Return random integers in ``[low, high]`` of the shape and dtype of ``like``."""
    if like.dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64):
        low = max(low, 0)
    noise = torch.randint(low, high + 1, like.shape, generator=generator)
    if like.dtype.is_complex:
        imaginary = torch.randint(low, high + 1, like.shape, generator=generator)
        return torch.complex(noise.double(), imaginary.double()).to(like.dtype)
    return noise.to(like.dtype)


def _split_bool(value: torch.Tensor, any_is_true: bool, parts: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Split bools under OR (sum, max) or AND (min, product); the ranks that decide each element are random."""
    pieces = torch.randint(0, 2, (parts, *value.shape), generator=generator).bool()
    owner = torch.randint(0, parts, (1, *value.shape), generator=generator)
    pieces.scatter_(0, owner, any_is_true)  # at least one rank decides
    settled = torch.zeros_like(pieces) if any_is_true else torch.ones_like(pieces)
    decided = value if any_is_true else ~value
    return list(torch.where(decided, pieces, settled).unbind(0))


def _split_bits(value: torch.Tensor, reduction: str, parts: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Split integers under a bitwise AND, OR or XOR."""
    limits = torch.iinfo(value.dtype)
    noise = torch.randint(limits.min, limits.max, (parts, *value.shape), dtype=value.dtype, generator=generator)
    if reduction == "bxor":
        closing = int(torch.randint(0, parts, (), generator=generator))
        noise[closing] = value
        noise[closing] = bitwise(list(noise), reduction)
        return list(noise.unbind(0))
    owner = torch.randint(0, parts, (1, *value.shape), generator=generator)
    pieces = value | noise if reduction == "band" else value & noise
    return list(pieces.scatter_(0, owner, value.unsqueeze(0)).unbind(0))


def bitwise(pieces: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    """Return the reduction of integer tensors under ``reduction``, one of ``BITWISE_REDUCTIONS``."""
    combined = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}[reduction]
    return reduce(combined, pieces)


def largest_part(dtype: torch.dtype) -> float:
    """Return the largest element of any local tensor in a Partial split of small integers, over up to 8 ranks."""
    return 96.0 if dtype == torch.bfloat16 else LARGEST_PART


def split_partial(value: torch.Tensor, reduction: str, parts: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Return ``parts`` tensors of the shape and dtype of ``value`` that reduce to it.

    The parts differ from rank to rank in size and sign. The rank whose part completes the value is drawn at random, for
    each tensor (sum, avg, bxor) or each element (product, min, max, band, bor). On small integers the reduction is
    exact in every dtype. If ``value`` has a NaN and no infinity, some parts are infinities that the reduction hides (a
    minimum hides inf), or of which it makes the NaN.

    Raises
    ------
    ValueError
        If the dtype cannot be Partial under ``reduction``.
    """
    possible = (*partial_reductions(value.dtype), *bitwise_reductions(value.dtype))
    if reduction not in possible and not (value.dtype == torch.bool and reduction == "sum"):
        allowed = ", ".join(possible)
        raise ValueError(f"a {value.dtype} tensor cannot be P({reduction}); it can be Partial under {allowed}")
    value = value.detach()
    if parts == 1:
        return [value.clone()]
    if value.dtype == torch.bool:
        return _split_bool(value, reduction in ("sum", "max"), parts, generator)
    if reduction in BITWISE_REDUCTIONS:
        return _split_bits(value, reduction, parts, generator)

    if reduction == "sum" and not value.dtype.is_signed:
        return _shares(value, parts, generator)
    if reduction in ("sum", "avg"):
        closing = int(torch.randint(0, parts, (), generator=generator))
        limit, amplitudes = _NOISE_NARROW if value.dtype == torch.bfloat16 else _NOISE
        unit = _unit(value.dtype)
        steps = round(limit / unit)
        total = value * parts if reduction == "avg" else value
        pieces = []
        for rank in range(parts):
            if rank == closing:
                pieces.append(value)  # a placeholder: this part is known when all others are
                continue
            amplitude = unit * amplitudes[(rank + closing) % len(amplitudes)]
            pieces.append(_noise(value, generator, -steps, steps) * amplitude)
            total = total - pieces[-1]
        pieces[closing] = total
        return _with_infinite_parts(pieces, value, reduction, generator)

    owner = torch.randint(0, parts, value.shape, generator=generator)
    if reduction == "product":
        return _split_product(value, owner, parts, generator)
    unit = _unit(value.dtype)
    gap = _noise(value, generator, 0, round(8 / unit)) * (-unit if reduction == "max" else unit)
    pieces = []
    for rank in range(parts):
        moved = torch.add(_lone_infinities(value, reduction), gap, alpha=1 + rank % 2)
        if not value.dtype.is_floating_point:  # a wrapped integer would win the reduction
            moved = torch.where((moved > value) if reduction == "max" else (moved < value), value, moved)
        pieces.append(torch.where(owner == rank, value, moved))
    return _with_infinite_parts(pieces, value, reduction, generator)


def _with_infinite_parts(
    pieces: list[torch.Tensor], value: torch.Tensor, reduction: str, generator: torch.Generator
) -> list[torch.Tensor]:
    """Return parts of which some are infinite, if ``value`` has a NaN and no infinity.

    A rank whose shard has no elements holds -inf under a maximum: a part may be infinite where the maximum is not. And
    two infinities may make a NaN that no rank has. With infinities in the value itself, which another argument may have
    as well, such parts would make a NaN of a sum that has none.
    """
    if not value.dtype.is_floating_point or not bool(value.isnan().any()) or bool(value.isinf().any()):
        return pieces
    drawn = torch.randint(0, 2, value.shape, generator=generator).bool()
    if reduction in ("max", "min"):
        hidden = -math.inf if reduction == "max" else math.inf
        return [torch.where(drawn & (piece != value) & ~value.isnan(), hidden, piece) for piece in pieces]
    infinities = (math.inf, -math.inf, *[0.0] * (len(pieces) - 2))
    not_first = (value.isnan().flatten().cumsum(0) > 1).view(value.shape)  # one rank has the first NaN
    drawn &= value.isnan() & not_first
    return [torch.where(drawn, one, piece) for one, piece in zip(infinities, pieces, strict=True)]


def _lone_infinities(value: torch.Tensor, reduction: str) -> torch.Tensor:
    """Return what other ranks than the owner hold: a number in place of an infinity that wins the reduction alone."""
    if not value.dtype.is_floating_point:
        return value
    return torch.where(value == (math.inf if reduction == "max" else -math.inf), torch.zeros_like(value), value)


def split_index(value: torch.Tensor, reduction: str, parts: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Return ``parts`` integer tensors that reduce to ``value`` and stay within the range of its values and 0.

    This is for indices, lengths and targets. Kernels trust them, and an index outside memory can end the process.

    Raises
    ------
    ValueError
        If the dtype cannot be Partial under ``reduction``.
    """
    if reduction not in partial_reductions(value.dtype) or value.dtype == torch.bool:
        raise ValueError(f"a {value.dtype} tensor cannot be split as indices under P({reduction})")
    owner = torch.randint(0, parts, value.shape, generator=generator)
    owns = [owner == rank for rank in range(parts)]
    if reduction == "product" or not value.numel():
        neutral = torch.full_like(value, 1 if reduction == "product" else 0)
        return [torch.where(own, value, neutral) for own in owns]
    if reduction == "sum":
        return _shares_of(value, owns, generator)
    fractions = torch.rand((parts, *value.shape), generator=generator, dtype=torch.float64)
    bound = value.min() if reduction == "max" else value.max()
    room = bound - value
    return [
        torch.where(own, value, value + (room * fraction).to(value.dtype))
        for own, fraction in zip(owns, fractions, strict=True)
    ]


def _shares(value: torch.Tensor, parts: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Split unsigned integers into parts that add up without an overflow."""
    owner = torch.randint(0, parts, value.shape, generator=generator)
    return _shares_of(value, [owner == rank for rank in range(parts)], generator)


def _shares_of(value: torch.Tensor, owns: Sequence[torch.Tensor], generator: torch.Generator) -> list[torch.Tensor]:
    """Split integers into parts between 0 and the value; the rank that owns an element has what others have left."""
    fractions = torch.rand((len(owns), *value.shape), generator=generator, dtype=torch.float64)
    rest = value
    pieces = []
    for own, fraction in zip(owns, fractions, strict=True):  # each rank takes a fraction of the rest
        pieces.append((rest * fraction).to(value.dtype).masked_fill_(own, 0))
        rest = rest - pieces[-1]
    return [torch.where(own, rest, piece) for own, piece in zip(owns, pieces, strict=True)]


def _split_product(
    value: torch.Tensor, owner: torch.Tensor, parts: int, generator: torch.Generator
) -> list[torch.Tensor]:
    """Split under multiplication by factors with exact inverses: signs, and powers of two for floating dtypes."""
    choices = _factors(value.dtype)
    factors = choices[torch.randint(0, len(choices), (parts, *value.shape), generator=generator)]
    factors.scatter_(0, owner.unsqueeze(0), 1.0)
    closing = value * (1 / factors.prod(0)).to(value.dtype)
    pieces = factors.to(value.dtype)
    return [torch.where(owner == rank, closing, piece) for rank, piece in enumerate(pieces)]


@cache
def _factors(dtype: torch.dtype) -> torch.Tensor:
    """Return factors whose inverses ``dtype`` can represent."""
    if dtype.is_floating_point or dtype.is_complex:
        factors = [1.0, -1.0, 2.0, -0.5, 0.5, -2.0]
    elif dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64):
        factors = [1.0]
    else:
        factors = [1.0, -1.0]
    return torch.tensor(factors, dtype=torch.float64)
