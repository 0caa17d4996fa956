"""Caches of sharding propagation, and what is kept of the decompositions that it traces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._decompositions import DecompShardingStrategy
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema
from torch.utils import _pytree as pytree

from verifier.torch_internals.sharded_ops import remembered_decisions

__all__ = [
    "cache_misses",
    "call_by_shapes",
    "clear_caches",
    "counts_of_rules",
    "endless_rules",
    "traced_once",
    "traces_of_calls",
]

endless_rules: set[OpOverload] = set()
"""Ops of which a rule did not come back in this process; each further question would cost seconds."""
counts_of_rules: dict[OpOverload, tuple[int, ...]] = {}
"""By ops: how many rules the strategy has listed, each time that it was asked about one and the same call."""
traces_of_calls: dict[Hashable, dict[tuple[object, ...], object]] = {}
"""By calls, then by placements: what DTensor found, or raised, when it traced the call's decomposition."""
_CALLS = 4
"""So many calls are remembered. One is asked about on each mesh in turn, and a sample has several sizes."""
_REFUSALS = (RuntimeError, KeyError, IndexError)
"""What tells DTensor that a decomposition does not hold with some placements. Derived classes may say more."""
_OF_TORCH = DecompShardingStrategy._propagate_through_decomp


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
    counts_of_rules.clear()
    traces_of_calls.clear()


def call_by_shapes(op: OpOverload, leaves: Sequence[object], structure: object) -> Hashable:
    """Return all of a call on which the traces of its decomposition depend."""
    told = [
        (leaf.dtype, tuple(leaf.shape), leaf.stride()) if isinstance(leaf, torch.Tensor) else (type(leaf), repr(leaf))
        for leaf in leaves
    ]
    return op, str(structure), tuple(told)


def _call_of(schema: OpSchema) -> Hashable:
    """Return all of a call within a decomposition on which its traces depend."""
    leaves, structure = pytree.tree_flatten((schema.args_schema, schema.kwargs_schema))
    told = [leaf.tensor_meta if isinstance(leaf, DTensorSpec) else (type(leaf), repr(leaf)) for leaf in leaves]
    return schema.op, str(structure), tuple(told)


@contextlib.contextmanager
def traced_once(op: OpOverload, call: Hashable) -> Iterator[None]:
    """Let DTensor trace the decomposition of ``call``, a call of ``op``, once with each combination of placements.

    DTensor traces it with many combinations whenever it is asked about one. A trace is made on a mesh of one rank,
    whatever mesh DTensor is asked about. The same holds for what the decomposition calls and is decomposed itself. In a
    dispatch DTensor works below autograd, so that a composite op of the decomposition comes to it as it is.
    """
    strategy: Any = DTensor._op_dispatcher.sharding_propagator.decomp_strategy
    trace = cast(Callable[..., object], strategy._propagate_through_decomp)
    if getattr(trace, "__func__", None) is not _OF_TORCH:
        yield
        return
    known = traces_of_calls.setdefault(call, {})
    while len(traces_of_calls) > _CALLS:
        del traces_of_calls[next(iter(traces_of_calls))]
    within = False

    def once(schema: OpSchema, placements: Sequence[object], mesh: object) -> object:
        nonlocal within
        outermost = schema.op is op and not within
        key = tuple(placements) if outermost else (_call_of(schema), *placements)
        if key not in known:
            before, within = within, True
            try:
                with torch._C._AutoDispatchBelowAutograd():
                    known[key] = trace(schema, placements, mesh)
            except _REFUSALS as error:
                if type(error) not in _REFUSALS:
                    raise
                known[key] = error.with_traceback(None)
            finally:
                within = before
        found = known[key]
        if isinstance(found, Exception):
            raise found.with_traceback(None)
        return found

    strategy._propagate_through_decomp = once
    try:
        yield
    finally:
        del strategy._propagate_through_decomp
