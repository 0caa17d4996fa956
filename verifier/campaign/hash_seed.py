"""The diagnosis that ranks disagree because each has a hash seed of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from verifier.core.verdict import VerdictKind
from verifier.findings.failures import Failure, Runner
from verifier.findings.grouping import group_key, is_of_several_ranks, shows_on_some_ranks
from verifier.findings.minimising import Minimiser
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge

__all__ = ["HashSeed"]


@dataclass
class HashSeed:
    """A :class:`verifier.campaign.investigation.Diagnosis`: ranks choose by the order of a set of texts, say.

    Parameters
    ----------
    run
        Runs one trial on ranks with hash seeds of their own.
    run_alike
        Runs one trial on ranks that all have one hash seed.
    """

    run: Runner
    run_alike: Runner

    def mark(self, failure: Failure) -> Failure | None:
        """Return ``failure``, marked if it shows again on ranks that have hash seeds of their own, and not with one."""
        simulated = failure.trial.mesh.backend == "simulated"
        if simulated or not is_of_several_ranks(failure) or not self.holds(failure):
            return None
        again = Minimiser(self.run, None, 0, float("inf")).replay(failure.trial, replace(failure, by_hash_seed=True))
        return None if again is None else replace(again, drawn=failure.drawn)

    def holds(self, failure: Failure) -> bool:
        """Return whether ranks that all have one hash seed agree in the trial of ``failure``.

        If such ranks all fail, that is a separate defect, which the disagreement was hiding. A wrong result is
        different: they have to pass, because ranks may choose differently and be wrong by a rule that all of them have.
        """
        observation = self.run_alike(failure.trial)
        verdict = judge(observation, make_reference(failure.trial.case))
        if verdict.kind is VerdictKind.TOOL_ERROR or is_of_several_ranks(Failure(failure.trial, observation, verdict)):
            return False
        return shows_on_some_ranks(failure) or verdict.kind is VerdictKind.PASS

    def same(self, failure: Failure, known: Failure) -> bool:
        """Return whether ranks disagreed in ``known`` on the same op, and do not with one hash seed."""
        of_ranks = is_of_several_ranks(known) and group_key(replace(known, by_hash_seed=True)) == group_key(failure)
        return of_ranks and self.holds(known)

    def cause(self, failure: Failure) -> str:
        text = "ranks that have one hash seed all do the same: do they choose by the order of a set of texts?"
        return text if failure.by_hash_seed else ""
