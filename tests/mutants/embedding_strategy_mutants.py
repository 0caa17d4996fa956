"""Our own strategy of embeddings made wrong in one way each, as functions that make one call under it.

The strategy is in force during the call only, and only DTensors know of it, so the same function on plain tensors is
its reference, and all of them share the ranks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from strategies.embedding import sharding
from strategies.embedding.sharding import GRADIENT, LOOKUP
from verifier.torch_internals.registries import replaced_sharded_op
from verifier.torch_internals.sharded_ops import RankView, ShardedOp

aten = torch.ops.aten
gradient_rules = sharding.gradient_rules


def _lookup(sharded: ShardedOp, weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    with replaced_sharded_op(sharded):
        return torch.nn.functional.embedding(input, weight)


def _gradient(
    sharded: ShardedOp, grad_output: torch.Tensor, indices: torch.Tensor, num_weights: int, scale: bool
) -> torch.Tensor:
    with replaced_sharded_op(sharded):
        result: torch.Tensor = aten.embedding_dense_backward.default(grad_output, indices, num_weights, -1, scale)
    return result


def true_lookup(weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    return _lookup(LOOKUP, weight, input)


def true_gradient(grad_output: torch.Tensor, indices: torch.Tensor, num_weights: int, scale: bool) -> torch.Tensor:
    return _gradient(GRADIENT, grad_output, indices, num_weights, scale)


def _foreign_rows_kept(view: RankView, weight: torch.Tensor, indices: torch.Tensor, *rest: object) -> torch.Tensor:
    start, stop = view.bounds(0, 0)
    own, _ = sharding.owned_ids(indices, start, stop)
    result: torch.Tensor = aten.embedding.default(weight, own)
    return result


def foreign_rows_kept(weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """What is looked up in the place of another rank's rows has to be 0."""
    return _lookup(replace(LOOKUP, kernel=_foreign_rows_kept), weight, input)


def _one_mesh_dim(view: RankView, weight: torch.Tensor, indices: torch.Tensor, *rest: object) -> torch.Tensor:
    last = view.cuts(0, 0)[-1:]
    kept = tuple(p if i in last else Replicate() for i, p in enumerate(view.placements[0]))
    return sharding.lookup(replace(view, placements=(kept, *view.placements[1:])), weight, indices)


def rows_by_one_mesh_dim(weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Where two mesh dims cut the rows, the first row of a rank depends on both."""
    return _lookup(replace(LOOKUP, kernel=_one_mesh_dim), weight, input)


def _unchecked(view: RankView, weight: torch.Tensor, indices: torch.Tensor, *rest: object) -> torch.Tensor:
    own, foreign = sharding.owned_ids(indices, *view.bounds(0, 0))
    result: torch.Tensor = aten.embedding.default(weight, own)
    return result.masked_fill_(foreign.unsqueeze(-1), 0)


def ids_unchecked(weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """An id that is no rank's row is an error, and not a row of zeros. A rank without rows is refused here as well."""
    return _lookup(replace(LOOKUP, kernel=_unchecked), weight, input)


def partial_ids(weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Parts of ids are no ids."""

    def rules(*args: object) -> list[list[object]]:
        return [[Partial("sum"), Shard(0), Partial("sum")]]

    return _lookup(replace(LOOKUP, rules=rules), weight, input)


def frequencies_of_one_rank(
    grad_output: torch.Tensor, indices: torch.Tensor, num_weights: int, scale: bool
) -> torch.Tensor:
    """An id is as frequent as all ranks together look it up."""

    def rules(op: object, args: tuple[object, ...], kwargs: dict[str, object]) -> list[list[object]]:
        return gradient_rules(op, (*args[:4], False), kwargs)

    return _gradient(replace(GRADIENT, rules=rules, before=None), grad_output, indices, num_weights, scale)


def replicas_counted(grad_output: torch.Tensor, indices: torch.Tensor, num_weights: int, scale: bool) -> torch.Tensor:
    """Ranks that have the same ids do not make them more frequent."""

    def before(args: tuple[object, ...]) -> tuple[tuple[object, ...], dict[str, object]]:
        grad_output, indices, *rest = args
        assert isinstance(indices, DTensor)
        counts = sharding.count_ids(indices.to_local(), num_weights)
        everywhere = DTensor.from_local(counts, indices.device_mesh, [Partial()] * indices.device_mesh.ndim)
        return (grad_output, indices, *rest[:2], False), {"counts": everywhere.full_tensor()}

    return _gradient(replace(GRADIENT, before=before), grad_output, indices, num_weights, scale)


def largest_gradient(grad_output: torch.Tensor, indices: torch.Tensor, num_weights: int, scale: bool) -> torch.Tensor:
    """The largest of sums is not the sum of the largest."""

    def rules(*args: object) -> list[list[object]]:
        return [[Partial("max"), Partial("max"), Replicate()]]

    return _gradient(replace(GRADIENT, rules=rules), grad_output, indices, num_weights, scale)
