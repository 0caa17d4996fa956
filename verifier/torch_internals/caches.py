"""Caches of sharding propagation."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from verifier.torch_internals.sharded_ops import remembered_decisions

__all__ = [
    "cache_misses",
    "clear_caches",
    "endless_rules",
    "traces_of_calls",
]

endless_rules: set[OpOverload] = set()
"""Ops of which a rule did not come back in this process; each further question would cost seconds."""
traces_of_calls: dict[Hashable, dict[tuple[object, ...], object]] = {}
"""By calls, then by placements: what DTensor found, or raised, when it traced the call's decomposition."""


def cache_misses() -> int:
    """Return how often DTensor's sharding propagation missed its cache in this process so far."""
    return int(torch._C._get_DTensor_sharding_propagator_cache_stats()[1])


def clear_caches() -> None:
    """Empty DTensor's sharding propagation caches, so that rules registered later are used.

    ``torch.distributed.tensor.debug`` does the same. To import it loads torch's compiler, which takes 0.4 s.
    """
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[no-untyped-call]
    torch._C._clear_DTensor_sharding_propagator_cache()
    remembered_decisions.clear()
    endless_rules.clear()
    traces_of_calls.clear()
