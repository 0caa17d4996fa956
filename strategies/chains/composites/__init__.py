"""Composite functions as users call them, each with the arguments that change what it computes."""

from __future__ import annotations

from strategies.chains.composites import (
    arrangements,
    buffers,
    entry_points,
    handing_over,
    layers,
    lists,
    losses,
    memory_orders,
    parallel,
    second_gradients,
    styles,
    training,
    transforms,
)
from strategies.chains.composites.table import COMPOSITES

__all__ = [
    "COMPOSITES",
    "arrangements",
    "buffers",
    "entry_points",
    "handing_over",
    "layers",
    "lists",
    "losses",
    "memory_orders",
    "parallel",
    "second_gradients",
    "styles",
    "training",
    "transforms",
]
