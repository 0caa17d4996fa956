"""What a trial did: local outputs, placements, exceptions and redistributions of every rank."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum

import torch  # not only for type checkers: msgspec reads the annotations

from verifier.core.case import Trial
from verifier.core.verdict import Phase
from verifier.torch_internals.watching import Issued

__all__ = [
    "Contribution",
    "Difference",
    "DifferenceKind",
    "Executed",
    "Fate",
    "Issued",
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
    PLAIN_ZEROS = "class"
    """A gradient is zero, as it has to be, and no DTensor. Autograd makes it from the sizes of the tensor alone."""


@dataclass(frozen=True)
class Difference:
    """One difference between a rank's local tensor and the local tensor that its placements promise.

    ``subject`` names the tensor (``"output"``, ``"weight.grad"``). ``index`` is the first differing element *within*
    the local tensor. ``backward`` is the number of the backward pass, if the difference is in one.
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
    """The function that raised and its file, as text."""
    traceback: str = ""
    refusal: bool = False
    """DTensor or the backend says plainly that it does not support this."""
    ours: bool = False
    """The exception came from the verifier itself."""
    backward: int | None = None
    out_of_memory: bool = False
    """The process reached its memory limit."""
    file: str = ""
    """The name of the file of the function that raised, without folders."""
    endless: bool = False
    """A rule of DTensor's did not come back, and was ended."""
    cut_off: bool = False
    """The process lost its connection to another one, which has raised or ended first."""


@dataclass(frozen=True)
class Redistribution:
    """One step of a redistribution as DTensor executes it, after it has merged what it merges.

    ``bytes`` is the size of the largest local tensor that enters the step. ``mesh_dim`` is the first of those over
    which a merged collective runs.
    """

    phase: Phase
    source: str
    target: str
    mesh_dim: int
    collective: str | None
    bytes: int
    path: tuple[str, str]
    """Placements (all mesh dims) before the first and after the last step of the whole redistribution."""
    tensor: str = ""
    """Dtype and global shape, as ``float32[8, 4]``; empty if shard orders are not those that the placements say."""
    explicit: bool = False
    """Whether the caller asked for the redistribution, and not the dispatch of an op."""
    begins: bool = True
    """Whether this is the first step of its redistribution."""
    mesh: str = ""
    """The shape of the mesh, as ``2x2``, if it is not known to be the trial's: a program may make submeshes."""
    by: str = ""
    """Of a first step: the op whose dispatch asked for the redistribution."""
    repeats: str = ""
    """Of a first step: the op for which the same tensor was redistributed in the same way before."""
    undoes: str = ""
    """Of a first step: the op for which was gathered what is now sharded again."""
    issued: tuple[Issued, ...] = ()
    """Of a first step, on real ranks and in the call itself: the collectives that this rank really issued."""
    peak: int = 0
    """Of the same: the most bytes of local tensors that were alive at once on this rank."""
    seconds: float = 0.0
    """Of the same: until the result was there, waiting for other ranks included; 0 on a GPU, where nothing waits."""


@dataclass(frozen=True)
class Contribution:
    """A rank's local tensor of a Partial value, which exists only after a reduction over the ranks."""

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
    """What one process reports of a trial: for one rank, or for all ranks if they are simulated."""

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
    """Why local tensors could not be compared with what their placements promise."""
    other_kernel: str = ""
    """What the call does on plain tensors of the mesh's device and not on the CPU, if the trial failed."""
    seconds: tuple[tuple[str, float], ...] = ()
    cache_misses: int = 0
    issued: tuple[int, ...] = ()
    """How many collectives this process has begun in each of its groups since it took its rank."""
    returned: object = None
    """What the function of a task returned; trials return nothing."""


class Fate(StrEnum):
    """How a trial ended, whatever its results were."""

    COMPLETED = "completed"
    STUCK = "stuck"
    """A rank raised while others waited for it."""
    HANG = "hang"
    SLOW = "slow"
    """A rank was still computing after it had used a trial's time limit as CPU time."""
    DIED = "died"


@dataclass(frozen=True)
class Observation:
    """What a trial did. ``reports`` has one entry per process: None if the process never reported."""

    trial: Trial
    fate: Fate
    reports: tuple[ProcessReport | None, ...]
    detail: str = ""
    """For fates other than completed: which ranks were where."""
    seconds: float = 0.0
    signals: tuple[int, ...] = ()
    """The signals that ended processes."""
    out_of_memory: bool = False
    """Whether a process ended because it reached its memory limit."""

    @property
    def killed(self) -> bool:
        """Whether a process was ended by SIGKILL, which no process sends to itself by mistake.

        The kernel's OOM killer sends it, and people do. If the call itself takes too much memory, it happens again.
        """
        return self.fate is Fate.DIED and signal.SIGKILL in self.signals
