"""Remedies for the defects of torch 2.13.0 that the baseline knows, found by the entry point ``torch``."""

from __future__ import annotations

from strategies.remedies import (
    embeddings,
    losses,
    parts,
    redistributing,
    reductions,
    registrations,
    shards,
    views,
    writes,
)
from verifier.execution.remedies import Remedies

__all__ = ["REMEDIES"]

REMEDIES = Remedies(
    "torch",
    (
        *registrations.REMEDIES,
        *shards.REMEDIES,
        *reductions.REMEDIES,
        *parts.REMEDIES,
        *losses.REMEDIES,
        *views.REMEDIES,
        *embeddings.REMEDIES,
        *writes.REMEDIES,
        *redistributing.REMEDIES,
    ),
)
