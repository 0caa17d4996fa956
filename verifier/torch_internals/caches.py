"""Caches of sharding propagation."""

from __future__ import annotations

from torch._ops import OpOverload
from torch.distributed.tensor.debug import _clear_sharding_prop_cache, _get_fast_path_sharding_prop_cache_stats

from verifier.torch_internals.sharded_ops import remembered_decisions

__all__ = [
    "cache_misses",
    "clear_caches",
    "endless_rules",
]

endless_rules: set[OpOverload] = set()
"""Ops of which a rule did not come back in this process; each further question would cost seconds."""


def cache_misses() -> int:
    """Return how often DTensor's sharding propagation missed its cache in this process so far."""
    return int(_get_fast_path_sharding_prop_cache_stats()[1])  # type: ignore[no-untyped-call]


def clear_caches() -> None:
    """Empty DTensor's sharding propagation caches, so that rules registered later are used."""
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    remembered_decisions.clear()
    endless_rules.clear()
