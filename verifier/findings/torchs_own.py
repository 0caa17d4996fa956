"""Failures that a remedy for torch mends which is about no rule: redistributions, and the dispatcher."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing

from verifier.core.case import Trial
from verifier.core.verdict import VerdictKind
from verifier.execution.remedies import installed_remedies
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool, PoolSet
from verifier.meshes.processes import Starter
from verifier.meshes.remedied import run_remedied
from verifier.oracle.reference import Reference, make_reference
from verifier.oracle.verdicts import judge
from verifier.records.schema import FindingRecord
from verifier.records.values import load_trial

__all__ = ["mended_beside_rules"]

_WRONG = (VerdictKind.WRONG_VALUE, VerdictKind.WRONG_GRADIENT)
_AGAIN = 2
"""How often a trial has to fail again without the remedy: a rule that keeps state may have let it pass."""
_LIMIT = 10.0
"""Seconds for a trial."""


def mended_beside_rules(
    findings: Iterable[FindingRecord], blamed: Iterable[FindingRecord], imports: Sequence[str]
) -> dict[str, str]:
    """Return which remedy mends each finding, by fingerprint; only remedies that concern any op are tried.

    The trials run on ranks with ``imports``. A finding that does not fail each time without a remedy is not mended.

    Parameters
    ----------
    findings
        Those that no rule of the imports can have caused.
    blamed
        Those that look as if a rule of the imports had caused them. Only a remedy that refuses nothing tells that it
        has not, if the results are right under it: the rule is applied as it was, between redistributions that are
        mended.
    """
    of_any = [one for one in installed_remedies().values() if "*" in one.ops]
    tried = [(one, of_any) for one in findings]
    tried += [(one, [remedy for remedy in of_any if not remedy.refuses]) for one in blamed if one.verdict in _WRONG]

    def make(key: PoolKey) -> Pool:
        return Pool(key, imports, _LIMIT, starter=Starter(imports, None, hash_seeds=1))

    found: dict[str, str] = {}
    with closing(PoolSet(make, 1, lambda _mesh, _reason, _seconds: None)) as pools:
        for finding, remedies in tried:
            trial = load_trial(finding.trial)
            reference = make_reference(trial.case)
            if not _fails(pools, trial, reference):
                continue
            for remedy in remedies:
                if remedy.verdicts and finding.verdict not in remedy.verdicts:
                    continue
                kind = judge(run_remedied(pools, trial, (remedy.name,)), reference).kind
                if kind is VerdictKind.PASS or (kind is VerdictKind.UNSUPPORTED and remedy.refuses):
                    if all(_fails(pools, trial, reference) for _ in range(_AGAIN)):
                        found[finding.fingerprint] = remedy.name
                    break
    return found


def _fails(pools: PoolSet, trial: Trial, reference: Reference) -> bool:
    return judge(pools.run_alone(trial), reference).kind.bad
