"""Remedies: code that mends one cause of failures in a process, and is taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from torch.distributed.device_mesh import DeviceMesh

from verifier.core.entry_points import load_entry_points
from verifier.core.wording import did_you_mean
from verifier.torch_internals.recording import forget_calls

__all__ = ["GROUP", "Remedies", "Remedy", "installed_remedies", "put_in_force", "remedied"]

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
        Whether DTensor may refuse the call under this remedy, because no right rule for it is left.
    beside_rules
        Whether a call that it mends or refuses has failed whatever rules a user has registered: none was applied.
    """

    name: str
    patch: str
    apply: Callable[[], AbstractContextManager[None]]
    ops: tuple[str, ...] = ("*",)
    verdicts: frozenset[str] = frozenset()
    refuses: bool = False
    beside_rules: bool = False

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


@contextmanager
def remedied(names: Iterable[str]) -> Iterator[None]:
    """Have the named remedies in force inside the block, with DTensor's caches emptied at both ends.

    Raises
    ------
    ValueError
        If no installed package declares a remedy of that name.
    """
    installed = installed_remedies()
    with ExitStack() as stack:
        try:
            for name in names:
                if name not in installed:
                    raise ValueError(f"remedy {name!r} is not installed{did_you_mean(name, installed)}")
                stack.enter_context(installed[name].apply())
            forget_calls()
            yield
        finally:
            stack.close()
            forget_calls()


_in_force = ExitStack()


def put_in_force(mesh: DeviceMesh, names: tuple[str, ...]) -> None:
    """Have exactly the named remedies in force in this rank, until the next call; a task of ranks calls this."""
    _in_force.close()
    if names:
        _in_force.enter_context(remedied(names))
