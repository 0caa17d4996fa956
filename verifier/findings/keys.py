"""The structure that failures of one finding share. Only the text of a :class:`GroupKey` is stored and hashed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from verifier.core.placement_text import split_placements
from verifier.core.verdict import Phase

__all__ = ["BY_HASH_SEED", "Anywhere", "ByMeshDim", "Change", "GroupKey", "RuleClass", "Symptom"]


class Symptom(NamedTuple):
    """The verdict, and where the failure arose."""

    kind: str
    phase: Phase | None = None
    what: str | None = None
    """The tensor that is wrong; or the type of the exception and the function that raised it."""


BY_HASH_SEED = Symptom("ranks choose by their hash seeds")


@dataclass(frozen=True)
class Change:
    """Placements, or kinds of placements, before and after an op or a redistribution."""

    before: tuple[str, ...]
    after: tuple[str, ...]

    def __str__(self) -> str:
        return f"{','.join(self.before)} -> {','.join(self.after)}"


@dataclass(frozen=True)
class ByMeshDim:
    """For each mesh dim on which not everything is replicated, the placements of all tensors."""

    columns: frozenset[tuple[str, ...]]

    @classmethod
    def of(cls, rows: Iterable[str]) -> ByMeshDim:
        """Return the placements by mesh dim, given those of each tensor.

        >>> str(ByMeshDim.of(["(S(0), P(sum), R)", "(R, S(1), R)"]))
        'P(sum),S(1) x S(0),R'
        """
        columns = zip(*map(split_placements, rows), strict=False)
        return cls(frozenset(column for column in columns if set(column) != {"R"}))

    def __str__(self) -> str:
        return " x ".join(sorted(map(",".join, self.columns))) or "R"


class Anywhere(StrEnum):
    """Why placements do not distinguish the failures of an op."""

    OWN_CODE = "code of its own, at any placements"
    OWN_RULES = "at any placements"
    NO_SHARD_ORDER = "strided shards in no shard order"


@dataclass(frozen=True)
class RuleClass:
    """The op that failed, and where: at these placements, in a redistribution between these kinds, or anywhere."""

    op: str
    where: ByMeshDim | Change | Anywhere

    def __str__(self) -> str:
        return f"{self.op}: {self.where}"


@dataclass(frozen=True)
class GroupKey:
    """The structure that failures of one group share; None for a property that does not distinguish groups.

    ``rules`` are the class of rules under which the op failed, or what a wrong rule does on each mesh dim. ``program``
    is the name of the program around the op. ``flat`` says whether the mesh had its flattened submeshes.
    """

    op: str
    symptom: Symptom
    rules: tuple[RuleClass | Change, ...] = ()
    mesh_dims: int | None = None
    dtype: str | None = None
    program: str | None = None
    flags: frozenset[str] | None = None
    flat: bool = False

    def __str__(self) -> str:
        mesh = None if self.mesh_dims is None else f"{self.mesh_dims}-d {'flattened ' * self.flat}mesh"
        flags = None if self.flags is None else ",".join(sorted(self.flags)) or "no flags"
        parts = (self.op, *self.symptom, self.dtype, self.program, *self.rules, mesh, flags)
        return " | ".join(str(part) for part in parts if part is not None)

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits: a hash of the text."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:12]
