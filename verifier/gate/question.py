"""The question that a gate answers: which ops, on which meshes, with which imports."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from verifier.core.case import MeshSpec
from verifier.core.wording import import_options
from verifier.planning.families import Family, installed_families, matches, select_ops
from verifier.records.schema import RunHeader

__all__ = ["Question", "asked_by", "families", "imports_text", "names_op", "options_text", "replaced_text", "selected"]


@dataclass(frozen=True)
class Question:
    """What a gate is asked about; by default everything that was recorded.

    Parameters
    ----------
    patterns
        Families and globs of ops, as for ``run``.
    meshes
        As for ``run``.
    imports
        The imports with which the rules have to hold; None for all imports that occur in the runs.
    """

    patterns: tuple[str, ...] = ()
    meshes: tuple[str, ...] = ()
    imports: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "meshes", tuple(str(MeshSpec.parse(mesh)) for mesh in self.meshes))

    def asks_mesh(self, mesh: str) -> bool:
        """Return whether ``mesh`` is among those that are asked about."""
        return not self.meshes or mesh in self.meshes

    def asks_imports(self, header: RunHeader) -> bool:
        """Return whether a run had the imports that are asked about."""
        return self.imports is None or set(self.imports) == set(header.imports)

    def asks_op(self, op: str) -> bool:
        """Return whether an aten overload, or an op by the name of its sample, is asked about."""
        return not self.patterns or any(names_op(pattern, op) for pattern in self.patterns)

    def describe(self) -> str:
        """Return the question on one line."""
        what = " ".join(self.patterns) or "everything that was recorded"
        where = f" on {' '.join(self.meshes)}" if self.meshes else ""
        how = "" if self.imports is None else f" with {imports_text(self.imports)}"
        return f"{what}{where}{how}"


def options_text(patterns: Sequence[str], meshes: Sequence[str], imports: Sequence[str]) -> str:
    """Return what makes a command ask about the same.

    >>> options_text(["aten.r*"], ["2x2"], ["my rules.py"])
    "'aten.r*' --mesh 2x2 --import 'my rules.py'"
    """
    parts = [*map(shlex.quote, patterns), *(f"--mesh {mesh}" for mesh in meshes), import_options(imports)]
    return " ".join(filter(None, parts))


def asked_by(header: RunHeader, patterns: tuple[str, ...] = ()) -> Question:
    """Return the question that a run was made to answer: its ops, on its meshes, with its imports."""
    return Question(patterns or tuple(header.families), tuple(header.meshes), tuple(header.imports))


def imports_text(imports: Sequence[str]) -> str:
    """Return what a run imported, as options."""
    return " ".join(f"--import {name}" for name in imports) or "no imports"


def replaced_text(op: str, imports: Sequence[str]) -> str:
    """Return why an entry about torch's rules for ``op`` is not tried again."""
    return f"{imports_text(imports)} registers the rules of {op} in the place of torch's"


@cache
def families() -> dict[str, Family]:
    return installed_families()


@cache
def selected(patterns: tuple[str, ...]) -> dict[str, tuple[str, ...]] | None:
    """Return what ``patterns`` select in each family; None if there is no such op: an import may define it."""
    try:
        return select_ops(patterns, families())
    except ValueError:
        return None


@cache
def names_op(pattern: str, op: str) -> bool:
    """Return whether ``pattern`` names ``op``: as a glob, or as an op or a family that draws it."""
    if matches(op, pattern):
        return True
    by_family = selected((pattern,)) or {}
    return any(families()[name].covers(ops, op) for name, ops in by_family.items())
