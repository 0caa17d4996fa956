"""New values for each kind of tensor of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, floor
from typing import Protocol

import torch

__all__ = [
    "SPECIAL_DRAWS",
    "Chosen",
    "Constant",
    "Domain",
    "Fill",
    "Flags",
    "Integers",
    "Palette",
    "Poison",
    "Regenerated",
    "beyond_palettes",
    "domain_of",
    "with_specials",
]

Domain = str
"""``any``, ``positive``, ``not negative``, ``negative``, ``inside 0..1``, ``0..1`` or ``-1..1``."""

# Per domain the values of the draws in turn: the full set, few values (ties), and a set with 0 and the ends.
# -4 is left out of the first set: all values together must not add up to 0, which would hide a missing or doubled sum.
_PALETTES: dict[Domain, tuple[tuple[float, ...], ...]] = {
    "any": ((-3, -2, -1, 1, 2, 3, 4), (-1, 1, 2), (-2, -1, 0, 1, 2, 3)),
    "positive": ((1, 2, 3, 4), (1, 2), (1, 3, 5)),
    "not negative": ((1, 2, 3, 4), (1, 2), (0, 1, 2, 3)),
    "negative": ((-1, -2, -3, -4), (-1, -2), (-1, -3, -5)),
    "inside 0..1": ((0.125, 0.25, 0.5, 0.75), (0.25, 0.5), (0.125, 0.5, 0.875)),
    "0..1": ((0.125, 0.25, 0.5, 0.75), (0.25, 0.5), (0, 0.25, 0.5, 1)),
    "-1..1": ((-0.75, -0.5, -0.25, 0.25, 0.5), (-0.5, 0.25, 0.5), (-1, -0.5, 0, 0.25, 1)),
}


def domain_of(values: torch.Tensor) -> Domain:
    """Return the smallest domain of the finite elements of real floating ``values``."""
    finite = values[torch.isfinite(values)]
    if not finite.numel():
        return "any"
    low, high = finite.min().item(), finite.max().item()
    if low > 0:
        return "inside 0..1" if high < 1 else "positive"
    if high < 0 and low < -1:
        return "negative"
    if low >= 0:
        return "0..1" if high <= 1 and not _is_integral(finite) else "not negative"
    return "-1..1" if low >= -1 and high <= 1 and not _is_integral(finite) else "any"


def _is_integral(values: torch.Tensor) -> bool:
    return torch.equal(values, values.round())


@cache
def _palettes(domain: Domain, dtype: torch.dtype, zero: bool) -> tuple[torch.Tensor, ...]:
    # the last palette has 0 and the ends of the domain
    return tuple(torch.tensor(palette, dtype=dtype) for palette in _PALETTES[domain][: 3 if zero else 2])


class Fill(Protocol):
    """New values for a tensor."""

    def draw(self, generator: torch.Generator, number: int) -> torch.Tensor:
        """Return a new tensor for draw ``number``."""
        ...


_MOST_BEYOND = 64
"""Largest such value: a sum of a few of them is exact in every floating dtype."""


def beyond_palettes(numbers: Iterable[float]) -> tuple[int, ...]:
    """Return the integers next to ``numbers``, below and above, that lie outside of all palettes.

    Numbers inside of the palettes already have values next to them.

    >>> beyond_palettes([10.0, 8.46, 0.5, float("inf")])
    (8, 9, 11)
    """
    low, high = min(_PALETTES["any"][0]), max(_PALETTES["any"][0])
    near = {n for number in numbers if abs(number) < _MOST_BEYOND for n in (ceil(number) - 1, floor(number) + 1)}
    return tuple(sorted(n for n in near if not low <= n <= high))


_SIGNS: dict[Domain, Callable[[float], bool]] = {
    "any": lambda value: True,
    "positive": lambda value: value > 0,
    "not negative": lambda value: value >= 0,
    "negative": lambda value: value < 0,
}
"""Tests for the values of domains with no limit but 0. The other domains have no integers beyond their palettes."""


@dataclass(frozen=True, eq=False)
class Palette:
    """A few exact floating values of a domain, and the values of ``beyond`` in the domain."""

    shape: torch.Size
    dtype: torch.dtype
    domain: Domain
    zero: bool = True
    beyond: tuple[int, ...] = ()

    @property
    def is_integral(self) -> bool:
        return all(value == int(value) for value in _PALETTES[self.domain][0])

    def draw(self, generator: torch.Generator, number: int) -> torch.Tensor:
        palettes = _palettes(self.domain, self.dtype.to_real(), self.zero)
        palette = palettes[number % len(palettes)]
        if self.beyond and self.domain in _SIGNS:
            palette = torch.cat([palette, palette.new_tensor(list(filter(_SIGNS[self.domain], self.beyond)))])
        real = palette.take(torch.randint(len(palette), self.shape, generator=generator))
        if not self.dtype.is_complex:
            return real
        return torch.complex(real, palette.take(torch.randint(len(palette), self.shape, generator=generator)))


@dataclass(frozen=True, eq=False)
class Chosen:
    """Elements drawn from given values."""

    shape: torch.Size
    values: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def draw(self, generator: torch.Generator, number: int) -> torch.Tensor:
        if not self.values.numel():
            return self.values.new_empty(self.shape)
        return self.values.take(torch.randint(self.values.numel(), self.shape, generator=generator))


@dataclass(frozen=True, eq=False)
class Integers:
    """Integers from ``low`` to ``high``, both included."""

    shape: torch.Size
    dtype: torch.dtype
    low: int
    high: int

    def draw(self, generator: torch.Generator, number: int) -> torch.Tensor:
        return torch.randint(self.low, self.high + 1, self.shape, dtype=self.dtype, generator=generator)


@dataclass(frozen=True, eq=False)
class Flags:
    """Booleans that are not all equal."""

    shape: torch.Size

    def draw(self, generator: torch.Generator, number: int) -> torch.Tensor:
        flags = torch.randint(2, self.shape, dtype=torch.bool, generator=generator)
        if flags.numel() > 1:
            first = flags.view(-1)[:1]
            if torch.equal(flags, first.expand(flags.shape)):
                first.logical_not_()
        return flags


@dataclass(frozen=True, eq=False)
class Poison:
    """NaN everywhere, in a tensor whose values must not be read."""

    shape: torch.Size
    dtype: torch.dtype

    def draw(self, generator: torch.Generator, number: int) -> torch.Tensor:
        return torch.full(self.shape, float("nan"), dtype=self.dtype)


@dataclass(frozen=True, eq=False)
class Constant:
    """Always the same values."""

    value: torch.Tensor

    def draw(self, generator: torch.Generator, number: int) -> torch.Tensor:
        return self.value.clone()


@dataclass(frozen=True, eq=False)
class Regenerated:
    """OpInfo's values of the tensor for another seed."""

    tensors: Callable[[int], torch.Tensor]

    def draw(self, generator: torch.Generator, number: int) -> torch.Tensor:
        return self.tensors(number).clone()


_SPECIALS = (
    (float("inf"),),
    (float("-inf"),),
    (float("nan"),),
    (0.0, -0.0),
    (),  # the thresholds by themselves
    (float("inf"), float("-inf"), float("nan"), -0.0),
)
SPECIAL_DRAWS = len(_SPECIALS)
"""So many draws have special values of each kind."""


def with_specials(
    tensor: torch.Tensor, thresholds: Sequence[float], generator: torch.Generator, number: int
) -> torch.Tensor:
    """Return ``tensor`` with some elements, at least one, replaced by special values and by the thresholds.

    The draw's number selects the special values, because a NaN in every tensor would hide the effect of infinities. A
    NaN without an infinity comes in draws of NaN alone: there, parts may be infinite, as no other tensor has infinities
    (see :func:`verifier.placements.partials.split_partial`).
    """
    kinds = _SPECIALS[number % len(_SPECIALS)]
    values = torch.tensor([*kinds, *(() if len(kinds) == 1 else thresholds)], dtype=tensor.dtype)
    if not tensor.numel() or not values.numel():
        return tensor
    hit = torch.rand(tensor.shape, generator=generator) < 0.2
    hit.view(-1)[int(torch.randint(tensor.numel(), (), generator=generator))] = True
    replacements = values.take(torch.randint(len(values), tensor.shape, generator=generator))
    made = torch.where(hit, replacements, tensor)
    alone = len(kinds) > 1 and bool(made.isnan().any()) and not bool(made.isinf().any())
    return torch.where(made.isnan(), float("inf"), made) if alone else made
