"""Work for the ranks other than trials of ops: a function that each rank calls, and the outcome."""

from __future__ import annotations

from dataclasses import dataclass

from verifier.core.case import MeshSpec
from verifier.core.observation import Fate, Raised

__all__ = ["Task", "TaskOutcome"]


@dataclass(frozen=True)
class Task:
    """A function at a dotted path that every rank calls with the mesh and ``args``; ``args`` have to be packable.

    Parameters
    ----------
    call
        Dotted path of ``function(mesh: DeviceMesh, *args) -> object``; the result is packed, too.
    mesh
        The mesh, of one process per rank.
    dim_names
        Names of the mesh dims, which plans for submeshes need; empty for none.
    limit
        Seconds without an answer after which the task counts as hung; None for the limit of the pool.
    """

    call: str
    args: tuple[object, ...]
    mesh: MeshSpec
    dim_names: tuple[str, ...] = ()
    limit: float | None = None


@dataclass(frozen=True)
class TaskOutcome:
    """The outcome of a task: ``returned`` and ``raised`` have one entry per rank, in order.

    Attributes
    ----------
    fate
        ``COMPLETED`` even if all ranks raised.
    detail
        For other fates: the phase of each rank.
    """

    fate: Fate
    returned: tuple[object, ...]
    raised: tuple[Raised | None, ...]
    detail: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every rank returned."""
        return self.fate is Fate.COMPLETED and not any(self.raised)

    def failure(self) -> tuple[int, Raised] | None:
        """Return the first rank that raised, and its error; communication errors count only if there is no other.

        If a rank raises, the others lose their connections, so their communication errors are not the cause. A rank
        that skips a test does not hide another rank that fails.
        """
        raised = [(rank, error) for rank, error in enumerate(self.raised) if error is not None]
        causes = [(rank, error) for rank, error in raised if not error.cut_off]
        causes.sort(key=lambda cause: cause[1].type == "SkipTest")
        return next(iter([*causes, *raised]), None)
