"""Judges and announces the outcomes of trials, and keeps bad ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from verifier.campaign.costs import Costs
from verifier.campaign.history import Answer
from verifier.core.arguments import combination_rows
from verifier.core.case import Trial
from verifier.core.verdict import Verdict
from verifier.events import Listener, TrialFinished
from verifier.findings.failures import Drawn, Failure
from verifier.findings.grouping import Collector
from verifier.oracle.reference import Reference, make_reference
from verifier.oracle.verdicts import judge

__all__ = ["Outcomes"]

_REMEMBERED = 256
"""Number of cases of each op that are kept, because one of them may have made a later case fail."""


class Outcomes:
    """Takes answers one by one and tells ``emit`` of each.

    Attributes
    ----------
    failures
        The failures, in groups.
    costs
        What the trials have cost.
    """

    def __init__(self, emit: Listener, waits_little: bool = False) -> None:
        self._emit = emit
        self.failures = Collector()
        self.costs = Costs(waits_little=waits_little)
        self._seen: dict[str, deque[Trial]] = {}
        """The first trial of each case, by op."""

    def take(
        self, answer: Answer, drawn: Drawn | None = None, reference: Reference | None = None
    ) -> tuple[Verdict, Failure | None]:
        """Judge an answer without a verdict, announce it, and keep a failure; return the verdict and the failure.

        The ``reference`` of the case is made if it is not given.
        """
        observation, trial = answer.observation, answer.observation.trial
        verdict = answer.verdict or judge(observation, reference or make_reference(trial.case))
        rows = combination_rows(trial.case, trial.combination)
        self._emit(TrialFinished(observation, verdict, rows, answer.position, recalled=answer.verdict is not None))
        seen = self._seen.setdefault(trial.case.op, deque(maxlen=_REMEMBERED))
        if not seen or seen[-1].case is not trial.case:
            seen.append(trial)
        self.costs.note(observation)
        if not verdict.kind.bad:
            return verdict, None
        failure = Failure(trial, observation, verdict, drawn)
        self.failures.add(failure)
        return verdict, failure

    def others(self, trial: Trial) -> Iterator[Trial]:
        """Yield a trial of each other case of the same op, the latest first."""
        yield from (one for one in reversed(self._seen.get(trial.case.op, ())) if one.case is not trial.case)
