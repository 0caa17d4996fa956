"""The ranks of a campaign: processes of this machine, or those that torchrun started."""

from __future__ import annotations

from verifier.campaign.campaign import Campaign
from verifier.campaign.history import Past
from verifier.campaign.plan import Plan
from verifier.core.case import MeshSpec
from verifier.events import Listener, PoolRestarted
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool, PoolSet
from verifier.meshes.processes import Starter

__all__ = ["campaign_on_ranks"]


def campaign_on_ranks(plan: Plan, emit: Listener, past: Past | None = None) -> Campaign:
    """Return a campaign that runs ``plan`` on ranks, which start when it needs them."""
    imports, memory = plan.imports, plan.rank_memory
    if plan.cluster is not None:  # ranks that torchrun has started have the hash seeds that it gave them
        return Campaign(plan, _pools(plan, emit, plan.cluster.starter(imports, memory)), emit, past)
    pools = _pools(plan, emit, Starter(imports, memory))
    return Campaign(plan, pools, emit, past, _pools(plan, emit, Starter(imports, memory, one_hash_seed=True), keep=1))


def _pools(plan: Plan, emit: Listener, starter: Starter, keep: int = 2) -> PoolSet:
    def make(key: PoolKey) -> Pool:
        mesh = MeshSpec((key.world_size,), key.backend, key.device)  # type: ignore[arg-type]
        return Pool(
            key, plan.imports, plan.trial_limit, memory_limit=plan.rank_memory, starter=starter,
            on_restart=lambda reason, seconds: emit(PoolRestarted(mesh, reason, seconds)),
        )  # fmt: skip

    return PoolSet(make, keep)
