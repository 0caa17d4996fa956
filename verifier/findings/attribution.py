"""Explains a failure by the causes whose remedies mend it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from verifier.core.case import Trial
from verifier.core.observation import Fate, Observation
from verifier.core.verdict import Verdict, VerdictKind
from verifier.core.wording import did_you_mean
from verifier.execution.remedies import Remedy, installed_remedies
from verifier.findings.failures import Failure
from verifier.findings.grouping import unlike
from verifier.gate.baseline import Baseline, BaselineError
from verifier.gate.entries import BaselineEntry, Cause
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge, moment, vacuous
from verifier.records.schema import KnownRecord
from verifier.torch_internals.amending.moving import is_refused_reduction
from verifier.torch_internals.amending.propagation import refused_by_amendment

__all__ = ["Attribution", "Recall", "RemediedRunner", "ops_of", "passed_again", "unmended"]

RemediedRunner = Callable[[Trial, tuple[str, ...]], Observation]
"""Runs one trial, alone, with the named remedies in force."""

Outcome = tuple[Observation, Verdict]
Recall = Callable[[Trial, tuple[str, ...], Callable[[], Outcome]], Outcome]
"""Returns what is known of a trial under remedies, or else what the function returns."""

_AGAIN = ("none, again", "none, once more")
"""What outcomes without remedies are recalled by, which are not those of the first time."""
_REDISTRIBUTES = ("placement_types.py", "_redistribute.py", "_collective_utils.py", "_mask_buffer.py")
"""The files of torch's that move data between placements."""


def ops_of(failure: Failure) -> frozenset[str]:
    """Return the ops that the failed trial is known to have run: its own, and those with redistributed arguments."""
    return frozenset({failure.trial.case.op, *_executed(failure.observation)})


def _executed(observation: Observation) -> set[str]:
    return {one.op for report in observation.reports if report is not None for one in report.executed}


def passed_again(entry: BaselineEntry, imports: Sequence[str]) -> KnownRecord:
    """Return the status of an entry whose trial has passed: a cause is not fixed by what a run imports."""
    if isinstance(entry, Cause) and imports:
        return KnownRecord(entry.fingerprint, "untested", f"passed with {', '.join(imports)}, not with torch alone")
    return KnownRecord(entry.fingerprint, "fixed", "passed when it was run again")


def unmended(name: str, baseline: Baseline) -> str:
    """Return the fingerprint of a finding that no remedy mends and that looks like ``name``: that of no cause.

    A cause may itself look like another one whose remedy does not mend it.
    """
    while isinstance(baseline.get(name), Cause):
        name = unlike(name)
    return name


@dataclass(frozen=True)
class Attribution:
    """Tries remedies on failures.

    Parameters
    ----------
    run
        Runs a trial with remedies in force.
    causes
        The known causes.
    remedies
        Those of the causes, by name.
    recall
        Knows the outcomes of earlier trials, if any.
    """

    run: RemediedRunner
    causes: Sequence[Cause]
    remedies: Mapping[str, Remedy]
    recall: Recall = lambda _trial, _remedies, make: make()

    @classmethod
    def of(cls, baseline: Baseline, run: RemediedRunner, recall: Recall | None = None) -> Attribution:
        """Return the attribution to the causes of ``baseline``.

        Raises
        ------
        BaselineError
            If no installed package declares the remedy of a cause.
        """
        installed = installed_remedies() if baseline.causes else {}
        for cause in baseline.causes:
            if cause.remedy not in installed:
                hint = (
                    did_you_mean(cause.remedy, installed)
                    or "; install the package that declares it again, so that its entry points are read"
                )
                raise BaselineError(f"no installed package declares the remedy {cause.remedy!r} of the baseline{hint}")
        made = cls(run, baseline.causes, installed)
        return made if recall is None else replace(made, recall=recall)

    def shows_alone(self, failure: Failure) -> bool:
        """Return whether the trial fails again without a remedy, and so can show what a remedy changes.

        A hang is not repeated, because it costs the time limit of a trial.
        """
        if failure.verdict.kind is VerdictKind.HANG:
            return True
        return self._outcome(failure.trial, ())[1].kind.bad

    def _outcome(self, trial: Trial, remedies: tuple[str, ...], again: str = "") -> Outcome:
        def make() -> Outcome:
            observation = self.run(trial, remedies)
            return observation, judge(observation, make_reference(trial.case))

        return self.recall(trial, (*remedies, again) if again else remedies, make)

    def explain(
        self,
        failure: Failure,
        alone: bool = False,
        first: Sequence[tuple[Cause, ...]] = (),
        before: Collection[Cause] = (),
    ) -> tuple[Cause, ...]:
        """Return the causes whose remedies together mend ``failure``, as few as were found; none if no remedies do.

        Groups of causes that explained failures like this one come ``first``. Then each likely cause is tried alone:
        the most special ones first, and of these those that explained anything ``before``. Those that change how the
        trial fails are tried beside each cause that explained anything before. Then the likely remedies are in force
        together, then all remedies, and as many are left out as can be. Then the other causes are tried whose remedies
        let DTensor refuse, because an op that a function of torch calls is not known if nothing is redistributed for
        it. Then causes are added one by one, as each shows the next, also in ops that the trial runs only now. At last,
        all remedies are in force, whatever their verdicts, if under those of the failure's verdict the trial fails
        otherwise or elsewhere. Remedies explain nothing if the trial also passes without them by then.

        Parameters
        ----------
        alone
            Whether to try no more than each likely cause alone, which takes the least time.
        """
        group = next((causes for causes in dict.fromkeys(first) if causes and self.is_mended(failure, causes)), ())
        causes = tuple(self._fewest(failure, list(group))) or self._mending(failure, alone, before)
        return causes if causes and self._still_fails(failure) else ()

    def _still_fails(self, failure: Failure) -> bool:
        """Return whether the trial, which remedies mend, fails twice in a row without them; a trial that hangs, once.

        Otherwise a rule that keeps state, or one that ranks apply differently, may have changed what came of it.
        """
        again = _AGAIN[:1] if failure.verdict.kind is VerdictKind.HANG else _AGAIN
        return all(self._outcome(failure.trial, (), name)[1].kind.bad for name in again)

    def _mending(self, failure: Failure, alone: bool, before: Collection[Cause]) -> tuple[Cause, ...]:
        kind = failure.verdict.kind
        may = [cause for cause in self.causes if self._may_have(cause, kind)]
        ops = ops_of(failure)
        likely = self._likely(ops, before)
        changed: list[tuple[Cause, VerdictKind, set[str]]] = []
        gets_on, far = False, _how_far(failure.observation)
        # a trial that hangs costs its time limit under each remedy, so that only those that name a hang are tried alone
        for cause in (one for one in likely if one in may and (kind is not VerdictKind.HANG or self._says(one, kind))):
            observation, left = self._left(failure, (cause,))
            if left is None:
                return (cause,)
            if left is not kind or _how_far(observation) != far:
                changed.append((cause, left, _executed(observation)))
        if alone:
            return ()
        for cause, left, _ in changed:
            for further in self.causes:
                if further in before and self._may_have(further, left) and self.is_mended(failure, (cause, further)):
                    return cause, further
        close = [cause for cause in may if cause in likely]
        if 1 < len(close) < len(may) and self.is_mended(failure, close):
            return tuple(self._fewest(failure, close))
        if len(may) > 1:
            observation, left = self._left(failure, may)
            if left is None:
                return tuple(self._fewest(failure, may))
            gets_on = left is not kind or _how_far(observation) != far
        for cause in may:
            if not self.remedies[cause.remedy].refuses or cause in likely:
                continue
            if (kind is not VerdictKind.HANG or self._says(cause, kind)) and self.is_mended(failure, (cause,)):
                return (cause,)
        for cause, left, ran in changed:  # under its remedy, the trial gets as far as another defect
            refusing = [one for one in self.causes if self.remedies[one.remedy].refuses]
            for further in dict.fromkeys([*self._likely(ops | ran, before), *refusing]):
                if self._may_have(further, left) and self.is_mended(failure, (cause, further)):
                    return cause, further
        if gets_on and self.is_mended(failure, self.causes):
            return tuple(self._fewest(failure, list(self.causes)))
        return ()

    def is_mended(self, failure: Failure, causes: Sequence[Cause]) -> bool:
        """Return whether the trial passes under the remedies of exactly these causes.

        It counts as passed if the results are now right, be they all zero: the trial itself has shown what is wrong
        without the remedies. It also counts if DTensor refuses what comes after the phase or the backward pass that
        failed, which was right then; and if what raised has now run, and DTensor refuses a later op of the same phase.
        A refusal of the call counts if a remedy itself refuses it, because no right rule is left for the placements of
        what the op writes to, or if the only remedy in force says that DTensor may. So does that of a collective if a
        remedy refuses it and both in force say so: no collective reduces what the right rule leaves to be reduced.
        """
        return self._left(failure, causes)[1] is None

    def _left(self, failure: Failure, causes: Sequence[Cause]) -> tuple[Observation, VerdictKind | None]:
        """Return what the trial does under the remedies of ``causes``, and the verdict on it; None if they mend it."""
        # one order, in which they are declared: a remedy may rely on what another has put right
        wanted = {cause.remedy for cause in causes}
        observation, verdict = self._outcome(failure.trial, tuple(name for name in self.remedies if name in wanted))
        return observation, None if self._mends(failure, causes, observation, verdict) else verdict.kind

    def _mends(self, failure: Failure, causes: Sequence[Cause], observation: Observation, verdict: Verdict) -> bool:
        match verdict.kind:
            case VerdictKind.PASS:
                return True
            case VerdictKind.INCONCLUSIVE if observation.fate is Fate.COMPLETED and (
                failure.verdict.kind is VerdictKind.CRASH or vacuous(make_reference(failure.trial.case))
            ):
                return True
            case VerdictKind.UNSUPPORTED if _when(verdict) > _when(failure.verdict):
                return True
            case VerdictKind.UNSUPPORTED if failure.verdict.kind is VerdictKind.CRASH and _goes_on(
                failure.observation, observation
            ):
                return True
            case VerdictKind.UNSUPPORTED if len(causes) == 1 and self.remedies[causes[0].remedy].refuses:
                return True
            case VerdictKind.UNSUPPORTED if len(causes) <= 2 and _refused(observation, refused_by_amendment):
                return True
            case VerdictKind.UNSUPPORTED if len(causes) == 2 and _refused(observation, is_refused_reduction):
                return all(self.remedies[cause.remedy].refuses for cause in causes)
        return False

    def _likely(self, ops: frozenset[str], before: Collection[Cause]) -> list[Cause]:
        """Return the causes that concern ``ops``, those of any op last; of each kind, those ``before`` first."""
        likely = [cause for cause in self.causes if self.remedies[cause.remedy].is_likely(ops)]
        return sorted(likely, key=lambda one: (self._concerns_any(one), one not in before))

    def _concerns_any(self, cause: Cause) -> bool:
        return "*" in self.remedies[cause.remedy].ops

    def _may_have(self, cause: Cause, verdict: VerdictKind) -> bool:
        return not self.remedies[cause.remedy].verdicts or self._says(cause, verdict)

    def _says(self, cause: Cause, verdict: VerdictKind) -> bool:
        return verdict in self.remedies[cause.remedy].verdicts

    def _fewest(self, failure: Failure, mending: list[Cause]) -> list[Cause]:
        """Return a smallest subset of ``mending`` that still mends: leave out halves, then quarters, and so on.

        Causes that concern any op are left out first.
        """
        mending = sorted(mending, key=self._concerns_any, reverse=True)
        size = len(mending)
        while size > 1:
            size = (size + 1) // 2
            start = 0
            while start < len(mending) > 1:
                fewer = mending[:start] + mending[start + size :]
                if fewer and self.is_mended(failure, fewer):
                    mending = fewer
                else:
                    start += size
        return [cause for cause in self.causes if cause in mending]


def _when(verdict: Verdict) -> tuple[int, int, int]:
    return moment(verdict.phase, verdict.backward)


def _how_far(observation: Observation) -> list[tuple[str, str, int]]:
    """Return where the first rank raised that did, and how many calls it had made."""
    reports = [report for report in observation.reports if report is not None]
    return [(one.raised.type, one.raised.where, len(one.executed)) for one in reports if one.raised is not None][:1]


def _goes_on(crashed: Observation, refused: Observation) -> bool:
    """Return whether every rank has got past the point at which it raised, before DTensor refused anything.

    That point is a redistribution, or the decision on an op. A call is recorded once its arguments are about to be
    redistributed, which is after DTensor has accepted it. The observation of a journal has no report of a rank that did
    what another did.
    """
    crashes = {before.ranks: before for before in crashed.reports if before is not None}
    if not crashes or None in crashed.reports:
        return False
    last = [*crashes.values()][-1]
    for now in refused.reports:
        if now is None or (before := crashes.get(now.ranks, last)).raised is None:
            return False
        ran = [(one.phase, one.backward, one.op) for one in before.executed]
        runs = [(one.phase, one.backward, one.op) for one in now.executed]
        if runs[: len(ran)] != ran:
            return False
        if before.raised.file not in _REDISTRIBUTES:  # the decision on an op, which may be the one that is refused now
            if len(runs) == len(ran) or runs[len(ran)][0] is not before.raised.phase:
                return False
        elif not ran or ran[-1][0] is not before.raised.phase:
            return False
    return True


def _refused(observation: Observation, by_remedy: Callable[[str], bool]) -> bool:
    """Return whether a remedy refused the call on every rank, as ``by_remedy`` says of the function that raised."""
    raised = [report.raised for report in observation.reports if report is not None]
    return bool(raised) and all(error is not None and by_remedy(error.where) for error in raised)
