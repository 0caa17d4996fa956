"""A trial on its way: what has come back of it, and what that makes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from verifier.core.case import Trial
from verifier.core.observation import Fate, ProcessReport
from verifier.meshes.tasks import Task

__all__ = ["Flight", "Terms"]

_FOR_REFUSALS = 10
"""So many times the usual grace: one rank refuses only if all do, or nearly always."""
_AT_WORK = 0.02
"""The share of a processor from which on a rank computes; one that waits in a collective uses none."""
_LONGEST = 10
"""So many times its limit a trial may take while ranks compute."""


@dataclass(frozen=True)
class Terms:
    """What the trials of a pool of ``size`` ranks get; see :class:`~verifier.meshes.pool.Pool`.

    ``computed`` returns the seconds of processors that each rank has used. They tell who waits ``on_cpu`` only.
    """

    size: int
    trial_limit: float
    grace: float
    on_cpu: bool
    computed: Callable[[], list[float]]


@dataclass
class Flight:
    """One trial on its way: what has come back of it so far, and what that makes of it."""

    trial: Trial | Task
    terms: Terms
    started: float = 0.0
    reports: dict[int, ProcessReport] = field(default_factory=dict)
    raised: dict[int, ProcessReport] = field(default_factory=dict)
    looks: list[list[float]] = field(default_factory=list)
    """What each rank had computed, in seconds, each time that half of the limit had passed."""
    grace_until: float = float("inf")
    """When the ranks that have not raised must have reached the end of their phase."""

    @property
    def patience(self) -> float:
        """How long the others get after a rank has raised: longer to refuse as well, since then all do."""
        errors = [report.raised for report in self.raised.values()]
        refused = all(error is not None and error.refusal for error in errors)
        return self.terms.grace * (_FOR_REFUSALS if refused else 1)

    @property
    def limit(self) -> float:
        """Seconds after which to look whether it has come to a halt."""
        if isinstance(self.trial, Task):
            return self.terms.trial_limit if self.trial.limit is None else self.trial.limit
        return self.terms.trial_limit * (len(self.looks) + 1) / 2

    def take(self, index: int, kind: str, report: ProcessReport) -> None:
        """Take in what rank ``index`` says."""
        if kind == "report":
            self.reports[index] = report
            return
        self.raised[index] = report
        if self.terms.size > 1:
            self.grace_until = time.monotonic() + self.patience

    def fate(self, lost: Collection[int], silent: bool) -> Fate | None:
        """Return what has become of it; None if it goes on.

        Parameters
        ----------
        lost
            The ranks whose processes have ended.
        silent
            Whether nobody said anything until :attr:`limit`, or until ``grace_until``.
        """
        if len(self.reports) == self.terms.size:
            return Fate.COMPLETED
        if any(index not in self.reports for index in lost):
            return Fate.DIED
        if not silent or (time.monotonic() < self.grace_until and self._goes_on()):
            return None
        if lost:
            return Fate.DIED
        return Fate.STUCK if self.raised else Fate.SLOW if self._computes() else Fate.HANG

    def _goes_on(self) -> bool:
        """Return whether a trial that has not ended may: it has half of its time left, or ranks that get little of it.

        Who waits for something that does not come computes nothing. Who computes may wait for a processor, and is given
        up only if that takes as much of one as a trial may take time. The limit of a task is what its caller says.
        """
        if isinstance(self.trial, Task):
            return False
        looks = self.looks
        looks.append(self.terms.computed())
        if len(looks) == 1:
            return True
        since = max(now - before for now, before in zip(looks[-1], looks[0], strict=True))
        return self._is_at_work() and since < self.terms.trial_limit and len(looks) < 2 * _LONGEST

    def _is_at_work(self) -> bool:
        lately = max(now - before for now, before in zip(self.looks[-1], self.looks[-2], strict=True))
        return lately > _AT_WORK * self.terms.trial_limit / 2

    def _computes(self) -> bool:
        """Return whether a rank still computes: DTensor may plan for minutes what it has no rule for.

        Ranks that wait for each other on GPUs may do so by asking again and again, which looks the same.
        """
        return self.terms.on_cpu and len(self.looks) > 1 and self._is_at_work()
