"""Families of ops: the interface that `strategies` fills in, and how families are found."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.entry_points import load_entry_points
from verifier.core.errors import SamplesError
from verifier.core.verdict import Verdict
from verifier.core.wording import did_you_mean

if TYPE_CHECKING:
    import torch
    from hypothesis.strategies import SearchStrategy

    from verifier.placements.alphabet import Alphabet

__all__ = [
    "ENTRY_POINT_GROUP",
    "Budgeted",
    "DrawContext",
    "Family",
    "LoadedLate",
    "NarrowFamily",
    "ReplicatedFamily",
    "budget_of",
    "installed_families",
    "matches",
    "select_ops",
    "select_registered",
]

ENTRY_POINT_GROUP = "dtensor_verifier.families"


@dataclass(frozen=True)
class DrawContext:
    """The inputs of a family's draws: the mesh (for uneven shards), and the dtypes and ops to choose from."""

    mesh: MeshSpec
    dtypes: tuple[torch.dtype, ...]
    ops: tuple[str, ...]

    def check(self, known: Collection[str]) -> None:
        """Check that there are ops and dtypes to draw, and that the family knows the ops.

        Raises
        ------
        ValueError
            If there is no op or no dtype.
        """
        if not self.ops or not self.dtypes:
            raise ValueError(f"ops={self.ops} and dtypes={self.dtypes} must each have an entry")
        unknown = set(self.ops) - set(known)
        assert not unknown, f"not ops of this family: {unknown}"


@runtime_checkable
class Family(Protocol):
    """All knowledge about one group of ops."""

    @property
    def name(self) -> str:
        """Name on the command line, as ``embedding``."""
        ...

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The floating dtypes that the family knows how to draw; the first is the default."""
        ...

    @property
    def broad(self) -> bool:
        """Whether each op is drawn separately, and only if a pattern names it, because the family has so many."""
        ...

    @property
    def shrinks(self) -> bool:
        """Whether Hypothesis can shrink the cases that it has drawn."""
        ...

    def select(self, pattern: str) -> tuple[str, ...]:
        """Return the family's ops that match a glob."""
        ...

    def covers(self, selected: tuple[str, ...], op: str) -> bool:
        """Return whether a case of the aten operator ``op`` may be drawn if these ops are selected."""
        ...

    def left_out(self, context: DrawContext) -> Iterable[tuple[str, str]]:
        """Return the ops in ``context`` that cannot be tested, and why."""
        ...

    def cases(self, context: DrawContext) -> SearchStrategy[OpCase]:
        """Return a generator of cases for ``context``."""
        ...

    def alphabet(self, case: OpCase, mesh: MeshSpec) -> Alphabet:
        """Return the placements that the tensor arguments of ``case`` may have."""
        ...

    def likely_cause(self, trial: Trial, verdict: Verdict) -> str:
        """Return a guess at the cause of a bad verdict, as a question or a clause; empty if there is none."""
        ...


@runtime_checkable
class Budgeted(Protocol):
    """A family that tries more cases and fewer combinations of each, or the other way round."""

    def budget(self, examples: int, combinations: int) -> tuple[int, int]:
        """Return how many cases are tried and how many combinations of each, given what others may try."""
        ...


@runtime_checkable
class LoadedLate(Protocol):
    """A family that loads what its draws need when it first draws."""

    def load(self) -> None:
        """Load it now."""


def budget_of(family: Family, examples: int, combinations: int) -> tuple[int, int]:
    """Return the most cases that are drawn of ``family`` on a mesh, and the most combinations of each.

    Parameters
    ----------
    examples, combinations
        What the profile or the user says.
    """
    return family.budget(examples, combinations) if isinstance(family, Budgeted) else (examples, combinations)


class NarrowFamily:
    """The common parts of families with few ops: all ops can be tested, and each is selected by its name."""

    ops: tuple[str, ...]
    """The operators that the family draws cases of, as ``aten.embedding.default``."""

    @property
    def broad(self) -> bool:
        """Whether each op is drawn separately: no."""
        return False

    @property
    def shrinks(self) -> bool:
        """Whether Hypothesis can shrink drawn cases: yes."""
        return True

    def select(self, pattern: str) -> tuple[str, ...]:
        """Return the family's ops that match a glob."""
        return tuple(op for op in self.ops if matches(op, pattern))

    def covers(self, selected: tuple[str, ...], op: str) -> bool:
        """Return whether ``op`` is selected."""
        return op in selected

    def left_out(self, context: DrawContext) -> tuple[tuple[str, str], ...]:
        """Return no ops: all can be tested."""
        return ()

    def alphabet(self, case: OpCase, mesh: MeshSpec) -> Alphabet:
        """Return the usual placements: Replicate, each Shard, and each Partial."""
        from verifier.placements.alphabet import Alphabet  # loads torch

        return Alphabet()

    def likely_cause(self, trial: Trial, verdict: Verdict) -> str:
        """Return no guess."""
        return ""


class ReplicatedFamily(NarrowFamily):
    """A family of programs that shard their tensors themselves; drawn only if a pattern names it."""

    @property
    def broad(self) -> bool:
        """Whether each op is drawn separately, and only if a pattern names it: yes."""
        return True

    def alphabet(self, case: OpCase, mesh: MeshSpec) -> Alphabet:
        """Return the placements that the tensors begin with: Replicate."""
        from verifier.placements.alphabet import Alphabet  # loads torch

        return Alphabet(shard=False, partial=())


def installed_families() -> dict[str, Family]:
    """Return every family that an installed package declares under ``dtensor_verifier.families``, by name.

    Raises
    ------
    TypeError
        If an entry point loads something that is not a :class:`Family`.
    """
    return load_entry_points(ENTRY_POINT_GROUP, Family)  # type: ignore[type-abstract]


def matches(op: str, pattern: str) -> bool:
    """Return whether a glob matches the full or the short name of an operator, which may be without ``aten.``.

    >>> [matches("aten.embedding.default", glob) for glob in ("embedding", "aten.emb*", "*.default", "mm")]
    [True, True, True, False]
    """
    short = op.removesuffix(".default")
    return any(fnmatch.fnmatchcase(text, pattern) for text in (op, short, short.removeprefix("aten.")))


def select_ops(patterns: Sequence[str], families: dict[str, Family]) -> dict[str, tuple[str, ...]]:
    """Return the ops that each family draws: those that match a family name or an op glob in ``patterns``.

    Without a pattern, every family except broad ones is selected. A broad family is asked only for ops that no other
    family has under exactly this name: a lookup of the embedding family need not be drawn from a broad family, too.

    Raises
    ------
    ValueError
        If a pattern matches neither a family nor an op; the message has the nearest valid name.
    """
    narrow = {name: family for name, family in families.items() if not family.broad}
    selected: dict[str, dict[str, None]] = {}
    for pattern in patterns or tuple(narrow):
        found = {name: family.select("*" if pattern == name else pattern) for name, family in narrow.items()}
        if not any(found.values()) or any(letter in pattern for letter in "*?["):
            broad = {name: family for name, family in families.items() if family.broad}
            found |= {name: family.select("*" if pattern == name else pattern) for name, family in broad.items()}
        if not any(found.values()):
            if pattern in families:
                raise ValueError(f"the family {pattern!r} draws no op here; --import the file that has its samples")
            from verifier.core.ops import of_ones_own  # loads torch

            known = [*families, *(op for family in families.values() for op in family.select("*"))]
            if own := of_ones_own(pattern, [*known, "prims."]):
                raise ValueError(own)
            hint = did_you_mean(pattern, known) or f"; families are {', '.join(families) or 'none'}"
            raise ValueError(f"no family and no op matches {pattern!r}{hint}")
        for name, ops in found.items():
            if ops:
                selected.setdefault(name, {}).update(dict.fromkeys(ops))
    return {name: tuple(ops) for name, ops in selected.items()}


def select_registered(
    ops: Sequence[str], families: dict[str, Family]
) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...], dict[str, str]]:
    """Return which of the overloads ``ops`` each family draws, those that no family draws, and those left out.

    The last are those whose declared samples are wrong, with what is wrong.

    Raises
    ------
    SamplesError
        If all declared samples are wrong.
    """
    selected: dict[str, dict[str, None]] = {}
    left = []
    wrong: dict[str, str] = {}
    for op in ops:
        try:
            found = select_ops((op,), families)
        except SamplesError as error:
            wrong[op] = str(error)
            continue
        except ValueError:
            left.append(op)
            continue
        for name, drawn in found.items():
            selected.setdefault(name, {}).update(dict.fromkeys(drawn))
    if wrong and not selected:
        raise SamplesError("; ".join(dict.fromkeys(wrong.values())))
    return {name: tuple(drawn) for name, drawn in selected.items()}, tuple(left), wrong
