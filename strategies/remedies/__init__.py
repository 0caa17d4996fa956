"""Remedies for the defects of torch 2.13.0 that the baseline knows, found by the entry point ``torch``."""

from __future__ import annotations

from strategies.remedies import (
    backwards,
    convolutions,
    embeddings,
    entry_points,
    losses,
    matrices,
    parts,
    redistributing,
    reductions,
    registrations,
    shards,
    views,
    writes,
)
from strategies.remedies.interfaces import sharding, styles
from verifier.execution.remedies import Remedies

__all__ = ["REMEDIES"]

REMEDIES = Remedies(
    "torch",
    (
        *registrations.REMEDIES,
        *convolutions.REMEDIES,
        *shards.REMEDIES,
        *reductions.REMEDIES,
        *parts.REMEDIES,
        *matrices.REMEDIES,
        *losses.REMEDIES,
        *views.REMEDIES,
        *embeddings.REMEDIES,
        *writes.REMEDIES,
        *redistributing.REMEDIES,
        *entry_points.REMEDIES,
        *backwards.REMEDIES,
        *styles.REMEDIES,
        *sharding.REMEDIES,
    ),
)
