"""The verdict of the oracle on an observation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "CLASSES",
    "LOUD",
    "Phase",
    "Verdict",
    "VerdictKind",
    "is_expected",
    "tensor_name",
]


class Phase(StrEnum):
    """The steps of a trial, in order."""

    SETUP = "setup"
    FORWARD = "forward"
    GATHER = "gather"
    BACKWARD = "backward"
    GATHER_GRADIENT = "gather gradient"
    INPUTS = "inputs"
    DONE = "done"


def tensor_name(phase: Phase, subject: str) -> str:
    """Return what messages call a tensor: ``gathered output`` in a phase in which DTensor gathers the output."""
    return f"gathered {subject}" if phase in (Phase.GATHER, Phase.GATHER_GRADIENT) else subject


class VerdictKind(StrEnum):
    """The closed set of outcomes of a trial."""

    PASS = "PASS"
    WRONG_VALUE = "WRONG_VALUE"
    WRONG_SHAPE = "WRONG_SHAPE"
    WRONG_DTYPE = "WRONG_DTYPE"
    WRONG_PLACEMENT = "WRONG_PLACEMENT"
    WRONG_GRADIENT = "WRONG_GRADIENT"
    MUTATED_INPUT = "MUTATED_INPUT"
    SILENT_ERROR = "SILENT_ERROR"
    STALE_CACHE = "STALE_CACHE"
    SPECIAL_VALUE = "SPECIAL_VALUE"
    CRASH = "CRASH"
    RANKS_DISAGREE = "RANKS_DISAGREE"
    HANG = "HANG"
    DIED = "DIED"
    UNSUPPORTED = "UNSUPPORTED"
    INCONCLUSIVE = "INCONCLUSIVE"
    TOOL_ERROR = "TOOL_ERROR"

    @property
    def bad(self) -> bool:
        """True if the verdict accuses the strategy (or DTensor's runtime) of a defect."""
        return self not in NOT_BAD


NOT_BAD = frozenset(
    {VerdictKind.PASS, VerdictKind.UNSUPPORTED, VerdictKind.INCONCLUSIVE, VerdictKind.TOOL_ERROR},
)

LOUD = frozenset({VerdictKind.CRASH, VerdictKind.HANG, VerdictKind.DIED})
"""The verdicts on how a trial ended; the other bad ones are about the placements and values of tensors."""

CLASSES = frozenset({VerdictKind.STALE_CACHE, VerdictKind.SPECIAL_VALUE})
"""The verdicts of findings that say why a trial fails. The oracle's verdict on the trial is another bad one."""


def is_expected(kind: VerdictKind, expected: str) -> bool:
    """Return whether a trial with the verdict ``kind`` fails as a finding with the verdict ``expected`` does."""
    return kind == expected or (expected in CLASSES and kind.bad)


@dataclass(frozen=True)
class Verdict:
    """The verdict of the oracle on an observation.

    ``message`` begins with the difference and its values. ``subject`` and ``phase`` say where the difference arose.
    """

    kind: VerdictKind
    message: str = ""
    phase: Phase = Phase.DONE
    subject: str = ""
    backward: int | None = None
    detail: str = ""
    raised: str = ""
    """The type of the exception, if the verdict is about one."""
    out_of_memory: bool = False
    """Whether a rank reached the memory limit."""
