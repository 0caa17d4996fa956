"""Families of ops: the interface that `strategies` fills in, and how families are found."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from hypothesis.strategies import SearchStrategy

from verifier.cases import MeshSpec, OpCase, Trial, Verdict
from verifier.entry_points import load_entry_points

__all__ = ["ENTRY_POINT_GROUP", "DrawContext", "Family", "installed_families", "select_ops"]

ENTRY_POINT_GROUP = "dtensor_verifier.families"


@dataclass(frozen=True)
class DrawContext:
    """What a family may know when it draws: the mesh (to cut unevenly on purpose), dtypes and ops to choose from."""

    mesh: MeshSpec
    dtypes: tuple[torch.dtype, ...]
    ops: tuple[str, ...]


@runtime_checkable
class Family(Protocol):
    """All knowledge about one group of ops."""

    @property
    def name(self) -> str:
        """Name on the command line, as ``embedding``."""
        ...

    @property
    def ops(self) -> tuple[str, ...]:
        """The aten operators that the family draws cases of, as ``aten.embedding.default``."""
        ...

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The floating dtypes that the family knows how to draw; the first is the default."""
        ...

    def cases(self, context: DrawContext) -> SearchStrategy[OpCase]:
        """Return a generator of cases for ``context``."""
        ...

    def likely_cause(self, trial: Trial, verdict: Verdict) -> str:
        """Return a guess at the cause of a bad verdict, as a question or a clause; empty if there is none."""
        ...


def installed_families() -> dict[str, Family]:
    """Return every family that an installed package declares under ``dtensor_verifier.families``, by name.

    Raises
    ------
    TypeError
        If an entry point loads something that is not a :class:`Family`.
    """
    return load_entry_points(ENTRY_POINT_GROUP, Family)  # type: ignore[type-abstract]


def select_ops(patterns: Sequence[str], families: dict[str, Family]) -> dict[str, tuple[str, ...]]:
    """Return the ops that each family is to draw: those that a family name or an op glob in ``patterns`` names.

    No pattern selects everything.

    Raises
    ------
    ValueError
        If a pattern matches neither a family nor an op; the message has the nearest valid name.
    """
    selected: dict[str, list[str]] = {}
    for pattern in patterns or tuple(families):
        hits = 0
        for name, family in families.items():
            for op in family.ops:
                short = op.removeprefix("aten.").removesuffix(".default")
                if pattern == name or any(fnmatch.fnmatchcase(text, pattern) for text in (op, short, f"aten.{short}")):
                    hits += 1
                    if op not in selected.setdefault(name, []):
                        selected[name].append(op)
        if not hits:
            known = [*families, *(op for family in families.values() for op in family.ops)]
            near = difflib.get_close_matches(pattern, known, 1, 0.4)
            hint = f"; did you mean {near[0]!r}?" if near else f"; families are {', '.join(families) or 'none'}"
            raise ValueError(f"no family and no op matches {pattern!r}{hint}")
    return {name: tuple(ops) for name, ops in selected.items()}
