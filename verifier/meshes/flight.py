"""A running trial: the messages that its ranks have sent so far, and how the trial ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from verifier.core.case import Trial
from verifier.core.observation import Fate, ProcessReport
from verifier.meshes.tasks import Task

__all__ = ["Flight", "Hangs", "Terms"]

_FOR_REFUSALS = 10
"""Factor of the usual grace: if one rank refuses, nearly always all do."""
_AT_WORK = 0.02
"""Least share of a processor that a computing rank uses; a rank that waits in a collective uses none."""
_GLANCE = 0.1
"""The share of the limit between two looks at a trial that may hang as one before it."""
_LONGEST = 10
"""A trial may take this many times its limit while ranks compute."""
_CATCHES_UP = 0.015
"""CPU seconds, within a grace, of a rank that is late on a busy machine; a rank that waits for others uses none."""


class Hangs:
    """The hangs whose whole limit was waited for: the op, and the states that the ranks were in.

    A trial of the op that gets into the same states is a hang after a fifth of the limit. Pools may share them, also
    those of several threads.
    """

    def __init__(self) -> None:
        self._seen: dict[str, set[frozenset[str]]] = {}

    def note(self, op: str, states: Collection[str]) -> None:
        """Take in a hang."""
        self._seen.setdefault(op, set()).add(frozenset(states))

    def has(self, op: str, states: Collection[str] | None = None) -> bool:
        """Return whether the op has hung, in these states if any are given."""
        seen = self._seen.get(op, set())
        return bool(seen) if states is None else frozenset(states) in seen


@dataclass(frozen=True)
class Terms:
    """The limits of trials in a pool of ``size`` ranks; see :class:`~verifier.meshes.pool.Pool`.

    ``computed`` returns each rank's CPU seconds. They show which ranks wait only if the ranks run ``on_cpu``. ``hangs``
    are those before, and ``states`` returns the states that the ranks are in.
    """

    size: int
    trial_limit: float
    grace: float
    on_cpu: bool
    computed: Callable[[], list[float]]
    hangs: Hangs | None = None
    states: Callable[[], Collection[str]] = tuple


@dataclass
class Flight:
    """One running trial: the messages that its ranks have sent so far, and the decision how it ends."""

    trial: Trial | Task
    terms: Terms
    started: float = 0.0
    reports: dict[int, ProcessReport] = field(default_factory=dict)
    raised: dict[int, ProcessReport] = field(default_factory=dict)
    looks: list[list[float]] = field(default_factory=list)
    """The CPU seconds of each rank, read each time that half of the limit had passed."""
    glances: list[list[float]] | None = None
    """The same, read earlier if a trial of the op has hung; None if none has, or once the trial is another case."""
    grace_until: float = float("inf")
    """When the ranks that have not raised must have reached the end of their phase, if they do not compute."""
    _before_grace: list[float] = field(default_factory=list)
    """The CPU seconds of each rank when the grace began."""

    @property
    def patience(self) -> float:
        """How long the others get after a rank has raised: longer after a refusal, because nearly always all refuse."""
        errors = [report.raised for report in self.raised.values()]
        refused = all(error is not None and error.refusal for error in errors)
        return self.terms.grace * (_FOR_REFUSALS if refused else 1)

    @property
    def limit(self) -> float:
        """Seconds after which to check whether the trial still makes progress."""
        if isinstance(self.trial, Task):
            return self.terms.trial_limit if self.trial.limit is None else self.trial.limit
        if self.glances is not None:
            return self.terms.trial_limit * _GLANCE * (len(self.glances) + 1)
        return self.terms.trial_limit * (len(self.looks) + 1) / 2

    @property
    def waited(self) -> float:
        """Seconds after which a trial that hangs was given up."""
        if isinstance(self.trial, Task) or not (self.looks or self.glances):
            return self.limit
        return self.terms.trial_limit * (_GLANCE * len(self.glances) if self.glances else len(self.looks) / 2)

    def take(self, index: int, kind: str, report: ProcessReport) -> None:
        """Take in a message of rank ``index``."""
        if kind == "report":
            self.reports[index] = report
            return
        self.raised[index] = report
        self._begin_grace()

    def begin(self) -> None:
        """Note that the trial before it has ended; ranks may have begun it already."""
        self.started = time.monotonic()
        hangs = self.terms.hangs if self.terms.on_cpu else None
        if hangs is not None and isinstance(self.trial, Trial) and hangs.has(self.trial.case.op):
            self.glances = []
        if self.raised:
            self._before_grace = []
            self._begin_grace()

    def _begin_grace(self) -> None:
        if self.terms.size > 1:
            self.grace_until = time.monotonic() + self.patience
            self._before_grace = self._before_grace or self.terms.computed()

    def fate(self, lost: Collection[int], silent: bool) -> Fate | None:
        """Return how the trial ended; None if it still runs.

        Parameters
        ----------
        lost
            The ranks whose processes have ended.
        silent
            Whether no rank sent a message until :attr:`limit`, or until ``grace_until``.
        """
        if len(self.reports) == self.terms.size:
            return Fate.COMPLETED
        if any(index not in self.reports for index in lost):
            return Fate.DIED
        if not silent or (time.monotonic() < self.grace_until and self._goes_on()):
            return None
        if lost:
            return Fate.DIED
        if self.raised and self._catches_up():
            return None
        return Fate.STUCK if self.raised else Fate.SLOW if self._computes() else Fate.HANG

    def _goes_on(self) -> bool:
        """Return whether a trial may continue: half of its time is left, or its ranks compute and got little CPU time.

        A rank that waits for a message that never comes computes nothing. A rank that computes on a busy machine is
        given up only once its CPU time reaches the limit of a trial. A task has the limit that its caller sets.
        """
        if isinstance(self.trial, Task):
            return False
        if self.glances is not None:
            self.glances.append(self.terms.computed())
            if len(self.glances) == 1:
                return True
            if self._waits_as_before(self.trial, self.glances):
                return False
            self.glances = None
            return True
        looks = self.looks
        looks.append(self.terms.computed())
        if len(looks) == 1:
            return True
        since = max(now - before for now, before in zip(looks[-1], looks[0], strict=True))
        return self._is_at_work() and since < self.terms.trial_limit and len(looks) < 2 * _LONGEST

    def _waits_as_before(self, trial: Trial, glances: Sequence[Sequence[float]]) -> bool:
        """Return whether no rank computes, and the ranks are where a trial of the op has hung."""
        lately = max(now - before for now, before in zip(glances[-1], glances[-2], strict=True))
        idle = lately <= _AT_WORK * self.terms.trial_limit * _GLANCE
        assert self.terms.hangs is not None
        return idle and not self.raised and self.terms.hangs.has(trial.case.op, self.terms.states())

    def _catches_up(self) -> bool:
        """Return whether a rank that has not raised yet still computes, and give it another grace then."""
        before, self._before_grace = self._before_grace, self.terms.computed()
        late = set(range(self.terms.size)) - self.raised.keys() - self.reports.keys()
        computes = any(self._before_grace[rank] - before[rank] >= _CATCHES_UP for rank in late)
        waited = time.monotonic() - self.started
        if not computes or not self.terms.on_cpu or isinstance(self.trial, Task) or waited > self.terms.trial_limit:
            return False
        self.grace_until = time.monotonic() + self.terms.grace
        return True

    def _is_at_work(self) -> bool:
        lately = max(now - before for now, before in zip(self.looks[-1], self.looks[-2], strict=True))
        return lately > _AT_WORK * self.terms.trial_limit / 2

    def _computes(self) -> bool:
        """Return whether a rank still computes: without a rule for an op, DTensor may plan for minutes.

        On GPUs the answer is always no, because ranks may wait for each other by polling, which looks like computing.
        """
        return self.terms.on_cpu and len(self.looks) > 1 and self._is_at_work()
