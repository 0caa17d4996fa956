"""The family of explicit redistributions: from any placements to any, alone, in a row, and between ops."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis.strategies import SearchStrategy

from strategies.redistribution.inputs import REDISTRIBUTE, SEQUENCE_OP, redistribution_cases
from verifier.cases import OpCase, Trial, Verdict
from verifier.families import DrawContext
from verifier.placements import Alphabet

__all__ = ["FAMILY", "RedistributionFamily"]


@dataclass(frozen=True)
class RedistributionFamily:
    """What is known of ``DTensor.redistribute``; not an aten operator, so ``ops`` are names of our own."""

    name: str = "redistribution"
    ops: tuple[str, ...] = (REDISTRIBUTE, SEQUENCE_OP)
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

    @property
    def alphabets(self) -> dict[str, Alphabet]:
        """By op, which placements the tensors begin with, where these are not the common ones."""
        return {REDISTRIBUTE: Alphabet(strided=(2,))}

    def cases(self, context: DrawContext) -> SearchStrategy[OpCase]:
        """Return a generator of cases; see :func:`strategies.redistribution.inputs.redistribution_cases`."""
        return redistribution_cases(context)

    def likely_cause(self, trial: Trial, verdict: Verdict) -> str:
        """Return a guess at the cause of a bad verdict; empty if there is none."""
        return ""


FAMILY = RedistributionFamily()
