"""A failed trial."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verifier.core.arguments import tensor_arguments
from verifier.core.case import Trial
from verifier.core.observation import Fate, Observation, ProcessReport, Raised
from verifier.core.placement_text import format_placements
from verifier.core.verdict import Verdict

__all__ = [
    "Drawn",
    "Failure",
    "Runner",
    "cotangent_text",
    "first_error",
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
    """How Hypothesis drew the case; None if it did not."""
    by_hash_seed: bool = False
    """Whether the failure disappears if all ranks have one hash seed."""
    imports: tuple[str, ...] = ()
    """The values of ``--import`` that the ranks of a test used; the ranks of a run use those of its plan."""

    @property
    def size(self) -> tuple[int, int, int]:
        """The numbers of ranks, mesh dims and elements; smaller is simpler."""
        elements = sum(tensor.numel() for tensor in tensor_arguments(self.trial.case.args, self.trial.case.kwargs))
        return self.trial.mesh.world_size, self.trial.mesh.ndim, elements

    @property
    def costly(self) -> bool:
        """Whether running the trial again costs new processes."""
        return self.observation.fate in (Fate.HANG, Fate.DIED)


def first_report(observation: Observation) -> ProcessReport | None:
    """Return the report of the first process that raised, or else of the first that reported."""
    reports = [report for report in observation.reports if report is not None]
    raised = [report for report in reports if report.raised is not None]
    return next(iter(raised or reports), None)


def first_error(observation: Observation) -> Raised | None:
    """Return the exception of the first process that raised."""
    report = first_report(observation)
    return None if report is None else report.raised


def cotangent_text(failure: Failure) -> str:
    """Return the placements of the cotangents in the backward pass that failed; empty for the forward call."""
    if failure.verdict.backward is None:
        return ""
    cotangents = failure.trial.cotangents[failure.verdict.backward]
    return ", ".join(format_placements(placements) for placements in cotangents)
