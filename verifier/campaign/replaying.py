"""Runs one finding again."""

from __future__ import annotations

from collections.abc import Sequence

from verifier.core.case import Trial
from verifier.core.verdict import Verdict, is_expected
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool
from verifier.meshes.torchrun.controller import Cluster
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge

__all__ = ["replay"]


def replay(
    trial: Trial,
    expected: str,
    imports: Sequence[str] = (),
    memory_limit: int | None = None,
    cluster: Cluster | None = None,
) -> tuple[Verdict, bool]:
    """Run ``trial`` with a memory limit in bytes; return the verdict, and whether the trial fails as ``expected``.

    An expected verdict that says why a trial fails, not how, is met by any failure. The ranks are processes of this
    machine, or those of ``cluster``.

    Raises
    ------
    PoolError
        If the ranks do not start.
    """
    starter = None if cluster is None else cluster.starter(tuple(imports), memory_limit)
    with Pool(PoolKey.of(trial.mesh), imports, memory_limit=memory_limit, starter=starter) as pool:
        (observation,) = pool.run([trial])
    verdict = judge(observation, make_reference(trial.case))
    return verdict, is_expected(verdict.kind, expected)
