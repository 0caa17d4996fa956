"""Deals samples to the cases of a run: every class of call before any class again, and no sample twice in a round."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from verifier.core.case import OpCase
from verifier.rules.samples import Sample

__all__ = ["Dealer", "call_class"]

_MOST = 2**16


class Dealer:
    """Deals samples: all overloads are equally likely, and the samples of each are dealt in turn.

    A run has fewer cases for an op than the op has samples. Drawn with replacement, a class of calls that only one
    sample has, such as a reduction without dims, would often be left out.
    """

    def __init__(self, by_overload: Mapping[tuple[str, torch.dtype], Sequence[Sample]]) -> None:
        decks: dict[str, _Deck] = {}
        for (op, dtype), samples in by_overload.items():
            for sample in samples:
                decks.setdefault(op, _Deck()).add(sample, dtype)
        self._decks = [deck for _, deck in sorted(decks.items(), key=lambda item: item[0].count("."))]

    def numbers(self) -> SearchStrategy[tuple[int, int, int]]:
        """Return a generator of what :meth:`deal` takes.

        Hypothesis gives up some examples while it draws them; only what it has drawn to the end is to be dealt.
        """
        return st.tuples(st.integers(0, len(self._decks) - 1), st.integers(0, _MOST), st.integers(0, _MOST))

    def deal(self, overload: int, number: int, dtype: int) -> Sample:
        """Return a sample that was not dealt in this round, as the numbers choose it."""
        return self._decks[overload].deal(number, dtype)


class _Deck:
    """The samples of one overload, with those of each dtype side by side."""

    def __init__(self) -> None:
        self._by_origin: dict[str, dict[torch.dtype, Sample]] = {}
        self._rounds: list[list[dict[torch.dtype, Sample]]] = []

    def add(self, sample: Sample, dtype: torch.dtype) -> None:
        self._by_origin.setdefault(sample.origin, {})[dtype] = sample

    def deal(self, number: int, dtype: int) -> Sample:
        """Return a sample that was not dealt since the deck was shuffled, as ``number`` and ``dtype`` choose it."""
        if not self._rounds:
            self._rounds = self._shuffled()
        first = self._rounds[0]
        by_dtype = [*first.pop(number % len(first)).values()]
        if not first:
            del self._rounds[0]
        return by_dtype[dtype % len(by_dtype)]

    def _shuffled(self) -> list[list[dict[torch.dtype, Sample]]]:
        """Return the samples in rounds; the first has one sample of each class of call."""
        of_class: dict[Hashable, list[dict[torch.dtype, Sample]]] = {}
        for by_dtype in self._by_origin.values():
            case = next(iter(by_dtype.values())).draw(0, 0)
            of_class.setdefault(None if case is None else call_class(case), []).append(by_dtype)
        longest = max(map(len, of_class.values()))
        return [[one[n] for one in of_class.values() if n < len(one)] for n in range(longest)]


def call_class(case: OpCase) -> Hashable:
    """Return what calls of an overload have in common that is more than a choice of sizes and values.

    These are the arguments that are given, the kinds of numbers, and whether tensors lack dims or elements, or have
    dims of size 1.
    """
    kwargs = sorted(case.kwargs.items())
    return tuple(map(_kind, case.args)), tuple((name, _kind(value)) for name, value in kwargs)


def _kind(value: object) -> Hashable:
    match value:
        case torch.Tensor():
            return value.dtype, not value.ndim, 0 in value.shape, 1 in value.shape
        case bool() | str() | None:
            return value
        case int() | float():
            special = not math.isfinite(value)
            return type(value), str(value) if special else (value > 0) - (value < 0)
        case list() | tuple():
            return type(value), frozenset(map(_kind, value))
        case _:
            return str(value)
