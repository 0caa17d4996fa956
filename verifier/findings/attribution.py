"""Explains a failure by the causes whose remedies mend it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verifier.core.case import Trial
from verifier.core.observation import Observation
from verifier.core.remedies import Remedy
from verifier.core.verdict import VerdictKind
from verifier.findings.failures import Failure
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge

__all__ = ["Attribution", "RemediedRunner", "ops_of"]

RemediedRunner = Callable[[Trial, tuple[str, ...]], Observation]
"""Runs one trial, alone, with the named remedies in force."""


def ops_of(failure: Failure) -> frozenset[str]:
    """Return the ops that the failed trial is known to have run: its own, and those with redistributed arguments."""
    reports = [report for report in failure.observation.reports if report is not None]
    return frozenset({failure.trial.case.op, *(one.op for report in reports for one in report.executed)})


@dataclass(frozen=True)
class Attribution:
    """Tries remedies on failures.

    Parameters
    ----------
    run
        Runs a trial with remedies in force.
    remedies
        Those of known causes.
    """

    run: RemediedRunner
    remedies: Sequence[Remedy]

    def shows_alone(self, failure: Failure) -> bool:
        """Return whether the trial fails again without a remedy, and so can show what a remedy changes.

        A hang is not repeated, because it costs the time limit of a trial.
        """
        return failure.verdict.kind is VerdictKind.HANG or self._verdict(failure.trial, ()).bad

    def explain(self, failure: Failure) -> tuple[Remedy, ...]:
        """Return the fewest remedies found under which the trial passes; none if it fails under all of them.

        A trial counts as passed if DTensor refuses the call because of a remedy that says so.
        """
        likely, others = self._in_order(failure)
        able = [*likely, *others]
        # most failures have one likely cause, most others no cause at all
        for remedy in likely[:1]:
            if self._mends(failure, [remedy]):
                return (remedy,)
        if not able or not self._mends(failure, able):
            return next(((remedy,) for remedy in likely[1:] if self._mends(failure, [remedy])), ())
        for remedy in likely[1:]:
            if self._mends(failure, [remedy]):
                return (remedy,)
        return tuple(self._fewest(failure, able))

    def is_mended(self, failure: Failure, remedies: Sequence[Remedy]) -> bool:
        """Return whether the trial passes under exactly these remedies."""
        return self._mends(failure, list(remedies))

    def _in_order(self, failure: Failure) -> tuple[list[Remedy], list[Remedy]]:
        """Return the remedies that are likely to mend ``failure``, the most special first, and those that may."""
        may = [one for one in self.remedies if not one.verdicts or failure.verdict.kind in one.verdicts]
        ops = ops_of(failure)
        likely = [one for one in may if one.is_likely(ops)]
        likely.sort(key=lambda one: "*" in one.ops)
        return likely, [one for one in may if one not in likely]

    def _fewest(self, failure: Failure, mending: list[Remedy]) -> list[Remedy]:
        """Return a smallest subset of ``mending`` that still mends: leave out halves, then quarters, and so on."""
        size = len(mending)
        while size > 1:
            size = (size + 1) // 2
            start = 0
            while start < len(mending) > 1:
                fewer = mending[:start] + mending[start + size :]
                if fewer and self._mends(failure, fewer):
                    mending = fewer
                else:
                    start += size
        return mending

    def _mends(self, failure: Failure, remedies: list[Remedy]) -> bool:
        kind = self._verdict(failure.trial, tuple(remedy.name for remedy in remedies))
        return kind is VerdictKind.PASS or (kind is VerdictKind.UNSUPPORTED and any(one.refuses for one in remedies))

    def _verdict(self, trial: Trial, remedies: tuple[str, ...]) -> VerdictKind:
        return judge(self.run(trial, remedies), make_reference(trial.case)).kind
