"""What a trial did: local outputs, placements, exceptions and redistributions of every rank."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum

import torch  # not for type checkers alone: msgspec reads the annotations

from verifier.core.case import Trial
from verifier.core.verdict import Phase

__all__ = [
    "Contribution",
    "Difference",
    "DifferenceKind",
    "Executed",
    "Fate",
    "Observation",
    "ProcessReport",
    "Raised",
    "Redistribution",
]


class DifferenceKind(StrEnum):
    VALUE = "value"
    SHAPE = "shape"
    STRIDES = "strides"
    DTYPE = "dtype"
    STRUCTURE = "structure"
    PLACEMENT = "placement"
    MUTATED = "mutated"


@dataclass(frozen=True)
class Difference:
    """One way in which what a rank holds is not what was promised.

    ``subject`` is what differs (``"output"``, ``"weight.grad"``), ``index`` the first differing element *within* the
    rank's tensor, ``backward`` the backward pass that it belongs to.
    """

    kind: DifferenceKind
    phase: Phase
    subject: str
    rank: int
    got: str
    expected: str
    index: tuple[int, ...] | None = None
    backward: int | None = None


@dataclass(frozen=True)
class Raised:
    """An exception in one process of the mesh."""

    phase: Phase
    type: str
    message: str
    where: str = ""
    """The function that raised, and its file."""
    traceback: str = ""
    refusal: bool = False
    """DTensor or the backend says plainly that it does not support this."""
    ours: bool = False
    """The exception came from the verifier itself."""
    backward: int | None = None
    out_of_memory: bool = False
    """The process had no more memory under the limit that it was given."""


@dataclass(frozen=True)
class Redistribution:
    """One step of a redistribution as DTensor planned it.

    ``bytes`` is the size of the largest local tensor that enters the step.
    """

    phase: Phase
    source: str
    target: str
    mesh_dim: int
    collective: str | None
    bytes: int
    path: tuple[str, str]
    """Placements (all mesh dims) before the first and after the last step of the whole redistribution."""


@dataclass(frozen=True)
class Contribution:
    """A rank's part of a value that only exists once all ranks' parts are reduced."""

    phase: Phase
    subject: str
    rank: int
    placements: str
    local: torch.Tensor
    backward: int | None = None


@dataclass(frozen=True)
class Executed:
    """An op whose arguments DTensor redistributed, and the placements (as text) on which it really ran."""

    phase: Phase
    backward: int | None
    op: str
    placements: tuple[str, ...]


@dataclass(frozen=True)
class ProcessReport:
    """What one process saw of a trial; it speaks for one rank, or for all when they are simulated."""

    ranks: tuple[int, ...]
    reached: Phase
    raised: Raised | None = None
    placements: tuple[tuple[str, str], ...] = ()
    """``(subject, placements as text)`` of every output and gradient."""
    differences: tuple[Difference, ...] = ()
    contributions: tuple[Contribution, ...] = ()
    redistributions: tuple[Redistribution, ...] = ()
    executed: tuple[Executed, ...] = ()
    collectives: tuple[tuple[str, str, int], ...] = ()
    """``(phase, collective, count)``, only for a traced trial."""
    unchecked: tuple[str, ...] = ()
    """Why a local tensor could not be compared with what its placements promise."""
    seconds: tuple[tuple[str, float], ...] = ()
    cache_misses: int = 0
    returned: object = None
    """What the function of a task returned; trials return nothing."""


class Fate(StrEnum):
    """How a trial ended, whatever its results were."""

    COMPLETED = "completed"
    STUCK = "stuck"
    """A rank raised while others waited for it."""
    HANG = "hang"
    SLOW = "slow"
    """A rank still computed after it had had a trial's time of a processor."""
    DIED = "died"


@dataclass(frozen=True)
class Observation:
    """What a trial did. ``reports`` has one entry per process, None where the process never reported."""

    trial: Trial
    fate: Fate
    reports: tuple[ProcessReport | None, ...]
    detail: str = ""
    """For fates other than completed: which ranks were where."""
    seconds: float = 0.0
    signals: tuple[int, ...] = ()
    """The signals that ended processes."""
    out_of_memory: bool = False
    """Whether a process ended because it had no more memory under its limit."""

    @property
    def killed(self) -> bool:
        """Whether a process was ended by a signal that no process sends to itself by mistake.

        The kernel does where memory is short, and people do; a call that takes too much memory has it happen again.
        """
        return self.fate is Fate.DIED and signal.SIGKILL in self.signals
