"""Work for the ranks that is no trial of an op: a function that each rank calls, and what came of that."""

from __future__ import annotations

from dataclasses import dataclass

from verifier.core.case import MeshSpec
from verifier.core.observation import Fate, Raised

__all__ = ["Task", "TaskOutcome"]


@dataclass(frozen=True)
class Task:
    """A function at a dotted path that every rank calls with the mesh and ``args``, which can be packed.

    Parameters
    ----------
    call
        Dotted path of ``function(mesh: DeviceMesh, *args) -> object``; what it returns is packed, too.
    mesh
        The mesh, of one process per rank.
    dim_names
        Names of its dims, as plans for submeshes need them; empty for none.
    limit
        Seconds without an answer after which it counts as hung; None for the limit of the pool.
    """

    call: str
    args: tuple[object, ...]
    mesh: MeshSpec
    dim_names: tuple[str, ...] = ()
    limit: float | None = None


@dataclass(frozen=True)
class TaskOutcome:
    """What a task did: ``returned`` and ``raised`` have one entry per rank, in order.

    Attributes
    ----------
    fate
        ``COMPLETED`` also where all ranks raised.
    detail
        For other fates: which ranks were where.
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
        """Return the first rank that raised and what it raised; of errors of communication only if there is no other.

        A rank that raises makes the others lose their connections, and what these raise then is no cause. A rank that
        skips a test does not make up for another one that fails.
        """
        raised = [(rank, error) for rank, error in enumerate(self.raised) if error is not None]
        causes = [(rank, error) for rank, error in raised if error.type != "DistBackendError" and not _cut_off(error)]
        causes.sort(key=lambda cause: cause[1].type == "SkipTest")
        return next(iter([*causes, *raised]), None)


def _cut_off(error: Raised) -> bool:
    return "Connection closed by peer" in error.message or "Connection reset by peer" in error.message
