"""A handmade call: a function that makes its arguments at each size, from small integers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from strategies.kernels import STAND_INS
from verifier.core.case import OpCase
from verifier.rules.samples import SampleOptions, Values

__all__ = ["SIZES", "Draw", "HandmadeSample", "Way"]

_VALUES = ((-3, -2, -1, 1, 2, 3, 4), (-1, 1, 2), (-2, -1, 0, 1, 2, 3))
"""Values in turn for each draw: many values, few values for ties, and values with a 0."""


SIZES = 5
"""Sizes at which every call is made."""


class Draw:
    """Draws the tensors of one call.

    Parameters
    ----------
    size
        Number of the size, from 0.
    dtype
        Of floating tensors, if a call does not choose its own.
    number
        Number of the draw.
    """

    def __init__(self, size: int, dtype: torch.dtype, generator: torch.Generator, number: int) -> None:
        self.size, self.dtype, self.number = size, dtype, number
        self._generator = generator

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Return integers from ``low`` to ``high - 1``."""
        return torch.randint(low, high, shape, generator=self._generator)

    def small(self, *shape: int) -> torch.Tensor:
        """Return floating numbers between -1 and 1 that are multiples of 1/4."""
        return self.values(*shape) / 4

    def values(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return floating numbers that are small integers."""
        palette = torch.tensor(_VALUES[self.number % len(_VALUES)], dtype=torch.float64)
        return palette.take(self.integers(0, len(palette), *shape)).to(dtype or self.dtype)


@dataclass(frozen=True)
class Way:
    """One way of calling an overload.

    Parameters
    ----------
    make
        Returns the positional arguments, or the positional and the keyword arguments.
    exact
        Whether the op is exact on small integers.
    claims_only
        Why nothing but what DTensor claims is tried; empty if everything is.
    path
        Of the callable, if it is not the op's or that of its stand-in kernel.
    row
        The OpInfo of the function that users call, under whose name the call is made as well; empty for none. Such
        calls are a class of input that OpInfo has seldom: they come beside its samples.
    usual
        Whether a call of a row is one of training, so that rules may be derived from it, and missing for it.
    tags
        Of the cases, under which coverage counts them.
    """

    op: str
    label: str
    make: Callable[[Draw], tuple[object, ...]]
    named: Callable[[Draw], Mapping[str, object]] = field(default=lambda draw: {})
    exact: bool = False
    claims_only: str = ""
    path: str = ""
    row: str = ""
    usual: bool = False
    tags: frozenset[str] = frozenset()


@dataclass(frozen=True)
class HandmadeSample:
    """A way of calling an op; see :class:`verifier.rules.samples.Sample`."""

    way: Way
    options: SampleOptions
    not_testable: str = ""

    @property
    def claims_only(self) -> str:
        return self.way.claims_only

    @property
    def rare(self) -> bool:
        return bool(self.way.row) and not self.way.usual

    @property
    def op(self) -> str:
        return self.way.op

    @property
    def origin(self) -> str:
        return f"handmade, {self.way.label}"

    def draw(self, size: int, draw: int, values: Values = Values.USUAL) -> OpCase | None:
        """Return the call at size number ``size`` with the values of draw number ``draw``, or None."""
        if values is not Values.USUAL or not 0 <= size < min(SIZES, self.options.sizes):
            return None
        text = f"{self.op}|{self.origin}|{size}|{draw}|{self.options.seed}"
        generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
        drawing = Draw(size, self.options.dtype, generator, draw)
        args = self.way.make(drawing)
        way = self.way
        path = way.path or STAND_INS.get(self.op, f"torch.ops.{self.op}")
        return OpCase(self.op, path, args, way.named(drawing), "opinfo", way.exact, way.tags)
