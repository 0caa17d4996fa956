"""Failures that a remedy for torch mends which is about no rule: redistributions, and the dispatcher."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing

from verifier.core.verdict import VerdictKind
from verifier.execution.remedies import installed_remedies
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool, PoolSet
from verifier.meshes.processes import Starter
from verifier.meshes.remedied import run_remedied
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.records.schema import FindingRecord
from verifier.records.values import load_trial

__all__ = ["mended_beside_rules"]

_LIMIT = 10.0
"""Seconds for a trial."""


def mended_beside_rules(findings: Iterable[FindingRecord], imports: Sequence[str]) -> dict[str, str]:
    """Return which remedy mends each of ``findings``, by fingerprint; only remedies that concern any op are tried.

    The trials run on ranks with ``imports``. A finding that does not fail again is not mended.
    """
    remedies = [one for one in installed_remedies().values() if "*" in one.ops]

    def make(key: PoolKey) -> Pool:
        return Pool(key, imports, _LIMIT, starter=Starter(imports, None, hash_seeds=1))

    found: dict[str, str] = {}
    with closing(PoolSet(make, 1, lambda _mesh, _reason, _seconds: None)) as pools:
        for finding in findings:
            trial = load_trial(finding.trial)
            reference = make_reference(trial.case)
            if not judge(pools.run_alone(trial), reference).kind.bad:
                continue
            for remedy in remedies:
                if remedy.verdicts and finding.verdict not in remedy.verdicts:
                    continue
                kind = judge(run_remedied(pools, trial, (remedy.name,)), reference).kind
                if kind is VerdictKind.PASS or (kind is VerdictKind.UNSUPPORTED and remedy.refuses):
                    found[finding.fingerprint] = remedy.name
                    break
    return found
