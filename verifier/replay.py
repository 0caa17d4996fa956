"""Runs one finding again."""

from __future__ import annotations

from collections.abc import Sequence

from verifier.cases import Trial, Verdict
from verifier.meshes import Pool, PoolKey
from verifier.oracle import judge
from verifier.reference import make_reference

__all__ = ["replay"]


def replay(
    trial: Trial, expected: str, imports: Sequence[str] = (), memory_limit: int | None = None
) -> tuple[Verdict, bool]:
    """Return the verdict on ``trial``, and whether it is the ``expected`` one, by ranks under ``memory_limit`` (bytes).

    Raises
    ------
    PoolError
        If the ranks do not start.
    """
    with Pool(PoolKey.of(trial.mesh), imports, memory_limit=memory_limit) as pool:
        (observation,) = pool.run([trial])
    verdict = judge(observation, make_reference(trial.case))
    return verdict, verdict.kind == expected
