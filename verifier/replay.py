"""Runs one finding again."""

from __future__ import annotations

from collections.abc import Sequence

from verifier.cases import Verdict
from verifier.codec import load_trial
from verifier.meshes import Pool, PoolKey
from verifier.oracle import judge, make_reference
from verifier.records import FindingRecord

__all__ = ["replay"]


def replay(finding: FindingRecord, imports: Sequence[str] = ()) -> tuple[Verdict, bool]:
    """Return the verdict on the finding's smallest trial, and whether it fails as it did.

    Raises
    ------
    PoolError
        If the ranks do not start.
    """
    trial = load_trial(finding.trial)
    with Pool(PoolKey.of(trial.mesh), imports) as pool:
        (observation,) = pool.run([trial])
    verdict = judge(observation, make_reference(trial.case))
    return verdict, verdict.kind == finding.verdict
