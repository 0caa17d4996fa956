"""A failed trial."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verifier.core.arguments import tensor_arguments
from verifier.core.case import Trial
from verifier.core.observation import Fate, Observation, ProcessReport
from verifier.core.placement_text import format_placements
from verifier.core.verdict import Verdict

__all__ = [
    "Drawn",
    "Failure",
    "Runner",
    "cotangent_text",
    "first_report",
]

Runner = Callable[[Trial], Observation]
"""Runs one trial on its mesh."""


@dataclass(frozen=True)
class Drawn:
    """How to draw a case again: the ops that its generator was given, and the choices that Hypothesis made."""

    ops: tuple[str, ...]
    choices: bytes


@dataclass(frozen=True)
class Failure:
    """A trial with a bad verdict."""

    trial: Trial
    observation: Observation
    verdict: Verdict
    drawn: Drawn | None = None
    """How Hypothesis drew the case, where it did."""
    by_hash_seed: bool = False
    """It does not show where all ranks have one hash seed."""
    imports: tuple[str, ...] = ()
    """What the ranks of a test had imported, as a command takes it; the ranks of a run have what its plan names."""

    @property
    def size(self) -> tuple[int, int, int]:
        """Smaller is simpler: ranks, mesh dims, elements."""
        elements = sum(tensor.numel() for tensor in tensor_arguments(self.trial.case.args, self.trial.case.kwargs))
        return self.trial.mesh.world_size, self.trial.mesh.ndim, elements

    @property
    def costly(self) -> bool:
        """Running it again costs new processes."""
        return self.observation.fate in (Fate.HANG, Fate.DIED)


def first_report(observation: Observation) -> ProcessReport | None:
    """Return the report that says most: of a process that raised, else of the first one."""
    reports = [report for report in observation.reports if report is not None]
    raised = [report for report in reports if report.raised is not None]
    return next(iter(raised or reports), None)


def cotangent_text(failure: Failure) -> str:
    """Return the placements of the cotangent in the backward pass that failed; empty for the forward call."""
    if failure.verdict.backward is None:
        return ""
    cotangents = failure.trial.cotangents[failure.verdict.backward]
    return ", ".join(format_placements(placements) for placements in cotangents)
