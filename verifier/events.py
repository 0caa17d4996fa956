"""Events that a campaign emits while it runs. The engine does not know who listens."""

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


@dataclass(frozen=True, kw_only=True)
class _Event:
    recalled: bool = False
    """Whether the campaign took the event from its past: the journal of a resumed run has it already."""


@dataclass(frozen=True)
class RunStarted(_Event):
    header: RunHeader


@dataclass(frozen=True)
class MeshStarted(_Event):
    """The cases of a mesh begin: at most ``examples`` of them."""

    mesh: MeshSpec
    family: str
    examples: int


@dataclass(frozen=True)
class EntryStarted(_Event):
    """The baseline entry ``fingerprint`` is replayed."""

    fingerprint: str


@dataclass(frozen=True)
class CaseStarted(_Event):
    """The trials of a case are sent to the ranks; ``digest`` is a hash of the case, its trials and all their values.

    Cases are numbered from 1, over all meshes and families of the plan.
    """

    number: int
    case: OpCase
    mesh: MeshSpec
    trials: int
    digest: str


@dataclass(frozen=True)
class TrialFinished(_Event):
    observation: Observation
    verdict: Verdict
    rows: tuple[tuple[str, str], ...]
    """``(argument name, placements as text)`` of each tensor argument."""
    position: str = ""
    """The name of the trial, the same in every run of the plan; see :mod:`verifier.campaign.history`."""


@dataclass(frozen=True)
class RulesClaimed(_Event):
    """DTensor claims these ``rules`` for ``op``; each is the input placements on one mesh dim, as text."""

    op: str
    rules: tuple[str, ...]


@dataclass(frozen=True)
class CaseSkipped(_Event):
    """``what`` was not tried, ``count`` times, because of ``reason``; for ``remedy`` see the record's."""

    what: str
    reason: str
    count: int = 1
    remedy: str = ""


@dataclass(frozen=True)
class PoolRestarted(_Event):
    """The ranks were started again, because of ``reason``."""

    mesh: MeshSpec
    reason: str
    seconds: float


@dataclass(frozen=True)
class GroupStarted(_Event):
    """The group ``key`` of failures is minimised."""

    key: str


@dataclass(frozen=True)
class GroupSettled(_Event):
    """The group ``key`` of failures is the baseline entry ``fingerprint``."""

    key: str
    fingerprint: str


@dataclass(frozen=True)
class FindingReported(_Event):
    """A finding: ``group`` is the key of its failures, ``became`` the key of the minimised failure."""

    finding: FindingRecord
    group: str = ""
    became: str = ""


@dataclass(frozen=True)
class RunResumed(_Event):
    """An interrupted run continues: ``trials`` are kept, ``in_flight`` names the work that was interrupted, if any."""

    trials: int
    in_flight: str
    torn: bool
    """Whether the last line of the journal was incomplete, and is left out."""


@dataclass(frozen=True)
class TrialRepeated(_Event):
    """A trial is run again: it was in flight when the run was interrupted, or a rank was killed in it."""

    trial: Trial
    rows: tuple[tuple[str, str], ...]
    position: str


@dataclass(frozen=True)
class RunFinished(_Event):
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
