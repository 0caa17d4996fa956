"""What a campaign announces while it runs. The engine emits these and knows no listener."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verifier.cases import MeshSpec, Observation, Verdict
from verifier.records import FindingRecord, RunHeader

__all__ = [
    "CaseSkipped",
    "Event",
    "FindingReported",
    "Listener",
    "MeshStarted",
    "PoolRestarted",
    "RulesClaimed",
    "RunFinished",
    "RunStarted",
    "TrialFinished",
]


@dataclass(frozen=True)
class RunStarted:
    header: RunHeader


@dataclass(frozen=True)
class MeshStarted:
    """A mesh begins its share of the run: at most ``examples`` cases."""

    mesh: MeshSpec
    family: str
    examples: int


@dataclass(frozen=True)
class TrialFinished:
    observation: Observation
    verdict: Verdict
    rows: tuple[tuple[str, str], ...]
    """``(argument name, placements as text)`` of each tensor argument."""


@dataclass(frozen=True)
class RulesClaimed:
    """DTensor claims ``rules`` of ``op``: each is the input placements on one mesh dim, as text."""

    op: str
    rules: tuple[str, ...]


@dataclass(frozen=True)
class CaseSkipped:
    """Something was not tried: ``count`` times, and why."""

    what: str
    reason: str
    count: int = 1


@dataclass(frozen=True)
class PoolRestarted:
    """The ranks were started anew, because of ``reason``."""

    mesh: MeshSpec
    reason: str
    seconds: float


@dataclass(frozen=True)
class FindingReported:
    finding: FindingRecord


@dataclass(frozen=True)
class RunFinished:
    seconds: float
    complete: bool
    """False if the run was interrupted or ran out of time before it reached every mesh."""


Event = (
    RunStarted
    | MeshStarted
    | RulesClaimed
    | TrialFinished
    | CaseSkipped
    | PoolRestarted
    | FindingReported
    | RunFinished
)
Listener = Callable[[Event], None]
