"""Trials on running ranks in which remedies are in force."""

from __future__ import annotations

from dataclasses import replace

from verifier.core.case import Trial
from verifier.core.observation import Observation
from verifier.meshes.pool import PoolSet
from verifier.meshes.processes import PoolError
from verifier.meshes.tasks import Task

__all__ = ["run_remedied"]

_PUT_IN_FORCE = "verifier.execution.remedies.put_in_force"


def run_remedied(pools: PoolSet, trial: Trial, remedies: tuple[str, ...] = ()) -> Observation:
    """Run one trial with DTensor's caches empty and exactly these ``remedies`` in force, which are then taken back.

    A trial of simulated ranks runs on gloo, because remedies go into processes that are one rank each.

    Raises
    ------
    PoolError
        If a remedy cannot be put in force.
    """
    if trial.mesh.backend == "simulated":
        trial = replace(trial, mesh=replace(trial.mesh, backend="gloo"))
    if not remedies:
        return pools.run_alone(trial)
    pool = pools.of(trial.mesh)
    put = pool.call(Task(_PUT_IN_FORCE, (remedies,), trial.mesh))
    if failure := put.failure():
        raise PoolError(f"rank {failure[0]} cannot have remedies {', '.join(remedies)}: {failure[1].message}")
    try:
        return pools.run_alone(trial)
    finally:  # ranks that replaced lost ones have none
        pool.call(Task(_PUT_IN_FORCE, ((),), trial.mesh))
