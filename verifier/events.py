"""What a campaign announces while it runs. The engine emits these and knows no listener."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Observation
from verifier.core.verdict import Verdict
from verifier.records.schema import FindingRecord, RunHeader

__all__ = [
    "CaseSkipped",
    "CaseStarted",
    "EntryStarted",
    "Event",
    "FindingReported",
    "GroupSettled",
    "GroupStarted",
    "Listener",
    "MeshStarted",
    "PoolRestarted",
    "RulesClaimed",
    "RunFinished",
    "RunResumed",
    "RunStarted",
    "TrialFinished",
    "TrialRepeated",
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
class EntryStarted:
    """The entry ``fingerprint`` of the baseline is tried again."""

    fingerprint: str


@dataclass(frozen=True)
class CaseStarted:
    """The trials of a case are sent to the ranks; ``digest`` stands for the case, its trials and all values in them.

    Cases are numbered from 1, over all meshes and families of the plan.
    """

    number: int
    case: OpCase
    mesh: MeshSpec
    trials: int
    digest: str


@dataclass(frozen=True)
class TrialFinished:
    observation: Observation
    verdict: Verdict
    rows: tuple[tuple[str, str], ...]
    """``(argument name, placements as text)`` of each tensor argument."""
    position: str = ""
    """Names the trial in every run of the plan, see :mod:`verifier.campaign.history`."""


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
class GroupStarted:
    """The group ``key`` of failures is minimised."""

    key: str


@dataclass(frozen=True)
class GroupSettled:
    """The group ``key`` of failures turned out to be the entry ``fingerprint`` of the baseline."""

    key: str
    fingerprint: str


@dataclass(frozen=True)
class FindingReported:
    """``group`` is the key of the failures that it was made of, ``became`` that of the minimised one."""

    finding: FindingRecord
    group: str = ""
    became: str = ""


@dataclass(frozen=True)
class RunResumed:
    """A run that was cut short goes on: ``trials`` are kept, ``in_flight`` names what was being done, if anything."""

    trials: int
    in_flight: str
    torn: bool
    """Whether the last line of the journal was cut off, and is left out."""


@dataclass(frozen=True)
class TrialRepeated:
    """A trial is tried again: it was in flight when the run was cut short, or a rank was killed in it."""

    trial: Trial
    rows: tuple[tuple[str, str], ...]
    position: str


@dataclass(frozen=True)
class RunFinished:
    seconds: float
    complete: bool
    """False if the run was interrupted or ran out of time before it reached every mesh."""


Event = (
    RunStarted
    | RunResumed
    | MeshStarted
    | EntryStarted
    | CaseStarted
    | RulesClaimed
    | TrialRepeated
    | TrialFinished
    | CaseSkipped
    | PoolRestarted
    | GroupStarted
    | GroupSettled
    | FindingReported
    | RunFinished
)
Listener = Callable[[Event], None]
