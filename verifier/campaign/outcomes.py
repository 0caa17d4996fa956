"""What comes of trials: judged, announced, and kept where it is bad or has brought the ranks down."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from verifier.core.arguments import combination_rows
from verifier.core.case import Trial
from verifier.core.observation import Fate, Observation
from verifier.core.verdict import Verdict
from verifier.events import CaseSkipped, Listener, TrialFinished
from verifier.findings.failures import Drawn, Failure
from verifier.findings.grouping import Collector
from verifier.oracle.reference import Reference
from verifier.oracle.verdicts import judge

__all__ = ["Outcomes"]

_SLOW_ENOUGH = 2
"""After so many calls of an op in a row that ranks computed too long for, no others are tried: each takes a minute."""
_REMEMBERED = 256
"""So many cases of each op are kept, of which one may have left something that makes a later one fail."""


class Outcomes:
    """Takes observations one by one and tells ``emit`` of each.

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
        self, observation: Observation, reference: Reference, drawn: Drawn | None, position: str
    ) -> tuple[Verdict, Failure | None]:
        """Judge an observation, announce it, keep it if it is bad."""
        verdict = judge(observation, reference)
        return verdict, self.keep(observation, verdict, drawn, position, self._emit)

    def keep(
        self, observation: Observation, verdict: Verdict, drawn: Drawn | None, position: str, tell: Listener
    ) -> Failure | None:
        """Announce an observation by ``tell``; keep it, and return it as a failure, if it is bad."""
        trial = observation.trial
        tell(TrialFinished(observation, verdict, combination_rows(trial.case, trial.combination), position))
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
            return None
        failure = Failure(trial, observation, verdict, drawn)
        self.failures.add(failure)
        return failure

    def others(self, trial: Trial) -> Iterator[Trial]:
        """Yield a trial of each other case of the same op, the latest first."""
        yield from (one for one in reversed(self._seen.get(trial.case.op, ())) if one.case is not trial.case)

    def affordable(self, trial: Trial, tell: Listener) -> bool:
        """Return False for what has brought the ranks down before, and tell so: each time costs new processes."""
        fate = self._costly.get(self._cost_key(trial))
        reason = f"combination that ended {fate} before" if fate is not None else self.too_slow(trial)
        if not reason:
            return True
        tell(CaseSkipped(f"{trial.case.op} on mesh {trial.mesh}", reason))
        return False

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
