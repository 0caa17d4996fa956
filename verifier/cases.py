"""The nouns of the verifier, as frozen data: what is tried, and what came of it.

Nothing here runs anything. A family draws an :class:`OpCase`; together with a :class:`MeshSpec` and a combination it
is a :class:`Trial`; a mesh turns that into an :class:`Observation`, the oracle turns that into a :class:`Verdict`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

__all__ = [
    "BITWISE_REDUCTIONS",
    "Backend",
    "Combination",
    "Contribution",
    "Difference",
    "DifferenceKind",
    "Executed",
    "Fate",
    "MeshSpec",
    "Observation",
    "OpCase",
    "Phase",
    "Placements",
    "ProcessReport",
    "Raised",
    "Redistribution",
    "Trial",
    "Verdict",
    "VerdictKind",
    "format_placements",
    "parse_placement",
    "parse_placements",
    "split_placements",
]

Placements = tuple[Placement, ...]
"""One placement per mesh dim."""

Combination = tuple[Placements, ...]
"""One :data:`Placements` per tensor argument, in the order in which a pytree walk of ``(args, kwargs)`` meets them."""

Backend = Literal["simulated", "gloo", "nccl"]
BACKENDS: tuple[Backend, ...] = ("simulated", "gloo", "nccl")
MOST_RANKS = 64
"""On one machine; the ranks of a cluster are those that torchrun started."""
REDUCTIONS = ("sum", "avg", "product", "min", "max")
"""Reductions that DTensor's rules know."""
BITWISE_REDUCTIONS = ("band", "bor", "bxor")
"""Further ones of integers, which only redistributions know."""
PLAIN_PLACEMENTS = frozenset((Partial, Replicate, Shard))
"""The classes of the placements that DTensor documents. ``isinstance``, which they overload, takes ten times as long as
to look whether this set has a class: ask here first where it is asked for every tensor."""


# --------------------------------------------------------------------------------------------------------- placements
def format_placements(placements: Placements) -> str:
    """Return the placements as DTensor prints them: ``S(0)`` on one mesh dim, ``(S(0), R)`` on several.

    >>> format_placements((Shard(0),)), format_placements((Replicate(), Partial("max")))
    ('S(0)', '(R, P(max))')
    """
    texts = [str(placement) for placement in placements]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


placement_parsers: list[Callable[[str], Placement | None]] = []
"""Read the placements that only torch's private modules have; the one module that may import those adds to this."""


def parse_placement(text: str) -> Placement:
    """Return the placement that ``text`` names: ``R``, ``S(0)``, ``S(-1)`` or ``P(sum)``.

    Raises
    ------
    ValueError
        If the text is none of these.

    >>> parse_placement("S(1)"), parse_placement("P(max)")
    (Shard(dim=1), Partial(max))
    """
    text = text.strip()
    if re.search(r"\d{10}", text):
        raise ValueError(f"placement {text[:40]!r} has a number of ten digits or more")
    if text == "R":
        return Replicate()
    if match := re.fullmatch(r"S\((-?\d+)\)", text):
        return Shard(int(match[1]))
    if (match := re.fullmatch(r"P\((\w+)\)", text)) and match[1] in (*REDUCTIONS, *BITWISE_REDUCTIONS):
        return Partial(match[1])
    for parse in placement_parsers:
        if (special := parse(text)) is not None:
            return special
    raise ValueError(f"placement {text!r} is none of R, S(dim) and P({'|'.join((*REDUCTIONS, *BITWISE_REDUCTIONS))})")


def parse_placements(text: str) -> Placements:
    """Return what :func:`format_placements` printed.

    >>> parse_placements("(S(0), R)")
    (Shard(dim=0), Replicate())
    """
    return tuple(parse_placement(part) for part in split_placements(text))


def split_placements(text: str) -> list[str]:
    """Return the text of each placement in what :func:`format_placements` printed, one per mesh dim.

    >>> split_placements("(_S(0, 2), R)"), split_placements("MaskP(sum)")
    (['_S(0, 2)', 'R'], ['MaskP(sum)'])
    """
    text = text.strip()
    inner = text[1:-1] if text.startswith("(") and text.endswith(")") else text
    return [part.strip() for part in re.split(r",(?![^(]*\))", inner)]


# --------------------------------------------------------------------------------------------------------------- mesh
@dataclass(frozen=True, order=True)
class MeshSpec:
    """A mesh by its shape and by where its ranks live; holds no process and no process group.

    >>> MeshSpec.parse("2x2")
    MeshSpec(shape=(2, 2), backend='gloo', device='cpu')
    >>> str(MeshSpec.parse("simulated:8"))
    'simulated:8'
    """

    shape: tuple[int, ...]
    backend: Backend = "gloo"
    device: str = "cpu"

    @property
    def world_size(self) -> int:
        size = 1
        for extent in self.shape:
            size *= extent
        return size

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def shape_text(self) -> str:
        return "x".join(map(str, self.shape))

    def __str__(self) -> str:
        return self.shape_text if self.backend == "gloo" else f"{self.backend}:{self.shape_text}"

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the position of ``rank`` in the mesh, one index per mesh dim, row-major."""
        coordinate = []
        for extent in reversed(self.shape):
            coordinate.append(rank % extent)
            rank //= extent
        return tuple(reversed(coordinate))

    @classmethod
    def parse(cls, text: str, backend: Backend = "gloo", device: str = "cpu") -> MeshSpec:
        """Return the mesh that ``[BACKEND:]N[xN...]`` names.

        Raises
        ------
        ValueError
            If the text is malformed or a mesh dim has size 0.
        """
        prefix, colon, shape_text = text.strip().rpartition(":")
        if colon:
            if prefix not in BACKENDS:
                raise ValueError(f"mesh {text!r}: backend {prefix!r} is none of {', '.join(BACKENDS)}")
            backend = prefix
        if not re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9})*", shape_text):
            raise ValueError(f"mesh {text[:80]!r} is not a shape such as 4, 2x2 or simulated:8")
        shape = tuple(int(extent) for extent in shape_text.split("x"))
        if not all(shape):
            raise ValueError(f"mesh {text!r} has a mesh dim of size 0; every mesh dim needs at least one rank")
        if len(shape) > 3:
            raise ValueError(f"mesh {text!r} has {len(shape)} mesh dims; at most 3 are supported")
        return cls(shape, backend, device)


# --------------------------------------------------------------------------------------------------------------- case
@dataclass(frozen=True, eq=False)
class OpCase:
    """A concrete local call, with values.

    Parameters
    ----------
    op
        The aten operator under test, as ``aten.embedding.default``; what findings and tables are filed under.
    call
        Dotted path of the callable that is called, as ``torch.nn.functional.embedding``.
    args, kwargs
        Arguments with *global* values: tensors, ``nn.Parameter``, nested lists and tuples of them, scalars.
    family
        Name of the family that drew the case.
    exact
        True if every value in the call is a small integer and the op's results on them are exact in the dtype, so that
        results are compared bit for bit.
    tags
        The classes of input that the case belongs to, counted in coverage (``"empty shard"``, ``"0-d indices"``).
    """

    op: str
    call: str
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    family: str = ""
    exact: bool = True
    tags: frozenset[str] = frozenset()


# -------------------------------------------------------------------------------------------------------------- trial
@dataclass(frozen=True)
class Trial:
    """A case on a mesh under a combination.

    Parameters
    ----------
    combination
        Placements of each tensor argument.
    cotangents
        One entry per backward pass: the placements of the cotangent of each differentiable output.
    seed
        Fixes how Partial arguments are split, and the values of the cotangents.
    trace
        Also count collectives with ``CommDebugMode`` (slower).
    fault
        A fault to inject, for tests of the tester only: ``"raise:1"``, ``"hang:1"``, ``"kill:1"`` (the rank),
        ``"kill:0,2"``.
    """

    case: OpCase
    mesh: MeshSpec
    combination: Combination
    cotangents: tuple[tuple[Placements, ...], ...] = ()
    seed: int = 0
    trace: bool = False
    fault: str | None = None


# -------------------------------------------------------------------------------------------------------- observation
class Phase(StrEnum):
    """The steps of a trial, in order."""

    SETUP = "setup"
    FORWARD = "forward"
    GATHER = "gather"
    BACKWARD = "backward"
    GATHER_GRADIENT = "gather gradient"
    INPUTS = "inputs"
    DONE = "done"


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

    @property
    def killed(self) -> bool:
        """Whether a process was ended by a signal that no process sends to itself by mistake.

        The kernel does where memory is short, and people do; a call that takes too much memory has it happen again.
        """
        return self.fate is Fate.DIED and "ended with signal SIGKILL" in self.detail


# ------------------------------------------------------------------------------------------------------------ verdict
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


@dataclass(frozen=True)
class Verdict:
    """What the oracle says of an observation.

    ``message`` leads with the difference and its values; ``subject`` and ``phase`` say where it arose.
    """

    kind: VerdictKind
    message: str = ""
    phase: Phase = Phase.DONE
    subject: str = ""
    backward: int | None = None
    detail: str = ""
    raised: str = ""
    """The type of the exception, where the verdict is about one."""
