"""Lookups with ``max_norm``: by a module, and under a strategy that is wrong in one way each.

Plain tensors know nothing of a strategy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from strategies.embedding.ops import ROW_POWERS
from strategies.embedding.renorm import renorm
from verifier.torch_internals.registries import replaced_handler, replaced_sharded_op
from verifier.torch_internals.sharded_ops import ShardedOp

aten = torch.ops.aten


def module(weight: torch.Tensor, input: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return a lookup of an ``nn.Embedding`` with this weight, which scales rows of the weight."""
    made = torch.nn.Embedding(*weight.shape, max_norm=3.0, norm_type=norm_type, device="meta")
    found: torch.Tensor = torch.func.functional_call(made, {"weight": weight}, (input,))
    return found


def _lookup(sharded: ShardedOp, weight: torch.Tensor, input: torch.Tensor, norm_type: float) -> torch.Tensor:
    with replaced_sharded_op(sharded):
        return torch.nn.functional.embedding(input, weight, max_norm=3.0, norm_type=norm_type)


def _ruled(rule: list[object]) -> ShardedOp:
    return replace(ROW_POWERS, rules=lambda *_: [rule])


def norm_of_own_columns(weight: torch.Tensor, input: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Scale a rank's columns by their own norm instead of the norm of whole rows."""
    return _lookup(_ruled([Replicate(), Shard(1), Replicate()]), weight, input, norm_type)


def largest_entries_added(weight: torch.Tensor, input: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Add the largest entries of the column blocks; the right norm is their maximum."""
    assert norm_type == math.inf
    return _lookup(_ruled([Partial("sum"), Shard(1), Replicate()]), weight, input, norm_type)


def rows_of_own_ids(weight: torch.Tensor, input: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Scale only the rows that the rank itself looks up, so that replicas of the table differ."""
    handler: Callable[..., object] = renorm

    def own(op: object, weight: DTensor, indices: DTensor, *rest: float) -> object:
        mine = DTensor.from_local(indices.to_local(), indices.device_mesh, [Replicate()] * indices.device_mesh.ndim)
        return handler(op, weight, mine, *rest)

    with replaced_handler(aten.embedding_renorm_.default, own):
        return torch.nn.functional.embedding(input, weight, max_norm=3.0, norm_type=norm_type)
