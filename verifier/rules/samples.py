"""What level 1 asks of a source of calls: the ops that it knows, and their calls at several sizes with new values."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol, runtime_checkable

import torch

from verifier.core.case import OpCase
from verifier.core.entry_points import load_entry_points

__all__ = [
    "SAMPLE_SOURCE_GROUP",
    "Sample",
    "SampleOptions",
    "SampleSource",
    "Target",
    "Values",
    "installed_sources",
    "is_called_again",
    "is_rare",
    "names_overload",
]

SAMPLE_SOURCE_GROUP = "dtensor_verifier.samples"


@dataclass(frozen=True, order=True)
class Target:
    """An op as the user names it: the unit of work and of the report.

    Parameters
    ----------
    name
        As OpInfo has it (``nn.functional.embedding``), or an aten overload (``aten.embedding_dense_backward.default``).
    source
        Name of the source that draws its calls.
    overload
        Only calls of this aten overload, where the user named one.
    """

    name: str
    source: str
    overload: str | None = None


@dataclass(frozen=True)
class SampleOptions:
    """How calls are drawn.

    Parameters
    ----------
    dtype
        Of the floating tensors.
    sizes
        Each call is drawn at up to so many sizes.
    max_samples
        At most so many samples of one aten overload under one target, beside those of rare classes; None for all.
    seed
        Fixes all values.
    rare
        Also draw classes of input that usual calls seldom have; see :func:`is_rare`.
    """

    dtype: torch.dtype = torch.float64
    sizes: int = 3
    max_samples: int | None = 8
    seed: int = 0
    rare: bool = True


class Values(Enum):
    """What kind of values a call is drawn with.

    Attributes
    ----------
    USUAL
        Of the kind that its source takes for the op's.
    WIDE
        Of both signs, and on both sides of the call's number arguments, as far as the op takes such values.
    SPECIAL
        Such as a Partial cannot always carry: infinities, NaN, -0.0, values exactly at a number argument.
    """

    USUAL = auto()
    WIDE = auto()
    SPECIAL = auto()


class Sample(Protocol):
    """One way of calling one aten overload: at each size the same structure, with new values at each draw."""

    @property
    def op(self) -> str:
        """The aten overload, as ``aten.embedding.default``."""

    @property
    def origin(self) -> str:
        """Where the call comes from, as ``nn.functional.embedding, sample 3, dim=-1 for dim=1``."""

    @property
    def not_testable(self) -> str:
        """Why its rules cannot be checked (random, uninitialised memory); empty if they can."""

    @property
    def claims_only(self) -> str:
        """Why nothing but what DTensor claims can be tried (a kernel that corrupts memory); empty if everything can."""

    def draw(self, size: int, draw: int, values: Values = Values.USUAL) -> OpCase | None:
        """Return the call at size number ``size`` with the values of draw number ``draw``; None if there is none.

        Shapes and arguments that are not tensors depend on ``size`` alone.
        """


def is_rare(sample: Sample) -> bool:
    """Return whether a sample is of a class of input that is drawn beside usual calls, so that claims alone are tried.

    A sample says so by an attribute ``rare``, which it need not have.
    """
    return bool(getattr(sample, "rare", False))


def is_called_again(sample: Sample) -> bool:
    """Return whether second calls follow, however many samples have come before.

    A sample says so by an attribute ``called_again``, which it need not have.
    """
    return bool(getattr(sample, "called_again", False))


@runtime_checkable
class SampleSource(Protocol):
    """Draws calls of ops for the rule check."""

    @property
    def name(self) -> str: ...

    def prepare(self) -> None:
        """Load what is needed to draw samples, so that drawing the first one takes no longer than any other."""

    def select(self, patterns: Sequence[str]) -> tuple[Target, ...]:
        """Return the targets that the globs name, sorted; all of them if there is no pattern.

        Raises
        ------
        ValueError
            If a pattern matches nothing; the message has the nearest valid name.
        """

    def samples(self, target: Target, options: SampleOptions) -> Iterator[Sample]:
        """Yield the samples of ``target``, the same ones in the same order whenever it is asked."""


def installed_sources() -> dict[str, SampleSource]:
    """Return every source that an installed package declares under ``dtensor_verifier.samples``, by name.

    Raises
    ------
    TypeError
        If an entry point loads something that is not a :class:`SampleSource`.
    """
    return load_entry_points(SAMPLE_SOURCE_GROUP, SampleSource)  # type: ignore[type-abstract]


def names_overload(pattern: str, overload: str) -> bool:
    """Return whether a glob names an overload: with the name of the overload, or without it.

    >>> names_overload("aten.add", "aten.add.Tensor"), names_overload("aten.a*.out", "aten.add.Tensor")
    (True, False)
    """
    return any(fnmatch.fnmatchcase(text, pattern) for text in (overload, overload.rpartition(".")[0]))
