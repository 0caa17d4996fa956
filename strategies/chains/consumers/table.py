"""The table of consumers, and what several of them ask of a value.

A consumer gets the chain and the name of a value, adds steps, and returns the name of the last value. It raises
UnfitError if the value does not fit.
"""

from __future__ import annotations

from collections.abc import Callable

from strategies.chains.building import Building, UnfitError

__all__ = ["CONSUMERS", "Consumer", "consumes", "matrix", "needs_dims", "no_ties", "sizes_of"]

Consumer = Callable[[Building, str], str]
CONSUMERS: dict[str, Consumer] = {}
"""The functions that continue a chain, by name."""


def consumes(function: Consumer) -> Consumer:
    """Add a consumer to the table, under its name."""
    CONSUMERS[function.__name__.strip("_")] = function
    return function


def sizes_of(b: Building, v: str) -> list[int]:
    """Return the shape of a value."""
    return list(b.of(v).shape)


def needs_dims(b: Building, v: str, least: int = 1) -> None:
    """Give up if a value has fewer dims."""
    if b.of(v).ndim < least:
        raise UnfitError("too few dims")


def matrix(b: Building, v: str) -> tuple[int, int]:
    """Return the rows and columns of a value, or give up if it is no matrix."""
    if b.of(v).ndim != 2:
        raise UnfitError("no matrix")
    rows, columns = sizes_of(b, v)
    return rows, columns


def no_ties(b: Building, v: str) -> None:
    """Give up if equal elements share a gradient, or if rounding decides which element is the largest."""
    value = b.of(v)
    if len(set(value.flatten().tolist())) < value.numel():
        raise UnfitError("ties")
    b.decides(v)
