"""The outcomes of trials: judged, announced, and kept if they are bad or have brought the ranks down."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from verifier.campaign.history import Answer
from verifier.core.arguments import combination_rows
from verifier.core.case import Trial
from verifier.core.observation import Fate
from verifier.core.verdict import Verdict
from verifier.events import Listener, TrialFinished
from verifier.findings.failures import Drawn, Failure
from verifier.findings.grouping import Collector
from verifier.oracle.reference import Reference, make_reference
from verifier.oracle.verdicts import judge

__all__ = ["Outcomes"]

_SLOW_ENOUGH = 2
"""After so many calls of an op in a row that ranks computed too long for, no others are tried: each takes a minute."""
_REMEMBERED = 256
"""So many cases of each op are kept, of which one may have left something that makes a later one fail."""


class Outcomes:
    """Takes answers one by one and tells ``emit`` of each.

    Attributes
    ----------
    failures
        The bad ones, in groups.
    """

    def __init__(self, emit: Listener) -> None:
        self._emit = emit
        self.failures = Collector()
        self._costly: dict[tuple[str, str, str], str] = {}
        self._slow: Counter[tuple[str, str, bool]] = Counter()
        self._seen: dict[str, deque[Trial]] = {}
        """The first trial of each case, by op."""

    def take(
        self, answer: Answer, drawn: Drawn | None = None, reference: Reference | None = None
    ) -> tuple[Verdict, Failure | None]:
        """Judge an answer unless that is done, announce it, and keep it if it is bad; return the verdict and failure.

        ``reference`` is that of the case, which is made if it is not given.
        """
        observation, trial = answer.observation, answer.observation.trial
        verdict = answer.verdict or judge(observation, reference or make_reference(trial.case))
        rows = combination_rows(trial.case, trial.combination)
        self._emit(TrialFinished(observation, verdict, rows, answer.position, recalled=answer.verdict is not None))
        seen = self._seen.setdefault(trial.case.op, deque(maxlen=_REMEMBERED))
        if not seen or seen[-1].case is not trial.case:
            seen.append(trial)
        if observation.fate in (Fate.HANG, Fate.DIED):
            self._costly[self._cost_key(trial)] = observation.fate
        if observation.fate is Fate.SLOW:
            self._slow[self._slow_key(trial)] += 1
        else:
            self._slow.pop(self._slow_key(trial), None)
        if not verdict.kind.bad:
            return verdict, None
        failure = Failure(trial, observation, verdict, drawn)
        self.failures.add(failure)
        return verdict, failure

    def others(self, trial: Trial) -> Iterator[Trial]:
        """Yield a trial of each other case of the same op, the latest first."""
        yield from (one for one in reversed(self._seen.get(trial.case.op, ())) if one.case is not trial.case)

    def unaffordable(self, trial: Trial) -> str:
        """Return why a trial is not tried, or nothing if it is: what brings the ranks down costs new processes."""
        fate = self._costly.get(self._cost_key(trial))
        return f"combination that ended {fate} before" if fate is not None else self.too_slow(trial)

    def too_slow(self, trial: Trial) -> str:
        """Return why no more calls of this op are tried, or nothing if they are."""
        slow = self._slow[self._slow_key(trial)]
        return f"ranks computed too long for the {slow} combinations before" if slow >= _SLOW_ENOUGH else ""

    def _cost_key(self, trial: Trial) -> tuple[str, str, str]:
        """Return what trials share that bring the ranks down alike: the placements, mesh dim by mesh dim."""
        case, columns = trial.case, {tuple(map(str, column)) for column in zip(*trial.combination, strict=True)}
        called = f"{case.op} by {case.call}"  # a program is called for many ops
        return called, str(trial.mesh), " x ".join(",".join(column) for column in sorted(columns))

    def _slow_key(self, trial: Trial) -> tuple[str, str, bool]:
        """Return what trials share that are slow alike: what DTensor plans, which may be a backward pass."""
        return trial.case.op, str(trial.mesh), bool(trial.cotangents)
