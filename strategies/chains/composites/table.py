"""The table of composite functions."""

from __future__ import annotations

from collections.abc import Callable

from strategies.chains.building import Building

__all__ = ["COMPOSITES", "composite"]

Composite = Callable[[Building], object]
COMPOSITES: dict[str, Composite] = {}
"""The functions that build a call, by name."""


def composite(function: Composite) -> Composite:
    """Add a function to the table, under its name."""
    COMPOSITES[function.__name__.strip("_")] = function
    return function
