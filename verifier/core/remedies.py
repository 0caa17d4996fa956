"""Remedies: code that mends one cause of failures in a process, and can be taken back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from verifier.core.entry_points import load_entry_points

__all__ = ["GROUP", "Remedies", "Remedy", "installed_remedies"]

GROUP = "dtensor_verifier.remedies"
"""The entry points that declare remedies; each loads a :class:`Remedies`."""


@dataclass(frozen=True)
class Remedy:
    """One change to torch, made in a process.

    Parameters
    ----------
    patch
        What to change in torch, in words.
    apply
        Returns a context in which torch is mended. Caches are emptied by whoever puts the remedy in force.
    ops
        The ops that may show the cause, as patterns of overloads. They say what is likely, and decide nothing.
    verdicts
        The verdicts that the cause may have; empty for any.
    refuses
        Whether DTensor refuses the call under this remedy, where torch cannot compute it without other changes.
    """

    name: str
    patch: str
    apply: Callable[[], AbstractContextManager[None]]
    ops: tuple[str, ...] = ("*",)
    verdicts: frozenset[str] = frozenset()
    refuses: bool = False

    def is_likely(self, ops: frozenset[str]) -> bool:
        """Return whether the cause may show in one of ``ops``."""
        return any(fnmatchcase(op, pattern) for op in ops for pattern in self.ops)


@dataclass(frozen=True)
class Remedies:
    """The remedies that one package declares."""

    name: str
    remedies: tuple[Remedy, ...]


@cache
def installed_remedies() -> dict[str, Remedy]:
    """Return the remedies of all installed packages by name, in the order in which packages declare them."""
    declared = load_entry_points(GROUP, Remedies).values()
    return {remedy.name: remedy for package in declared for remedy in package.remedies}
