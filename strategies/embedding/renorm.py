"""Our own sharding of ``aten.embedding_renorm_`` (``max_norm``), which DTensor refuses in torch 2.13.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from strategies.distributed import as_dtensors
from strategies.embedding.ops import ROW_POWERS
from strategies.embedding.sharding import check_ids, comparable_ids
from verifier.core.placement_text import format_placements
from verifier.placements.algebra import is_shard_order, sharded_dim
from verifier.torch_internals.sharded_ops import RankView, on_each_rank

__all__ = ["HANDLERS", "renorm"]

aten = torch.ops.aten

EPSILON = 1e-7
"""Number that aten adds to a norm before it divides by the norm."""


def renorm(op: object, weight: torch.Tensor, indices: torch.Tensor, max_norm: float, norm_type: float = 2.0) -> DTensor:
    """Scale the rows of ``weight`` that are looked up and whose norm is larger than ``max_norm``, in place.

    All ranks get all ids, so that replicas stay equal. Each mesh dim that shards the columns takes one all-reduce, of
    one number for each distinct id.

    Raises
    ------
    NotImplementedError
        If the table is Partial, because a norm of a sum is no sum of norms. Also if it has strided shards that are no
        shard order, because a rank's rows are then no contiguous rows of the table.
    RuntimeError
        If an argument is no DTensor.
    IndexError
        If an id is no row of the table, on every rank.
    """
    weight, indices = as_dtensors(op, weight=weight, indices=indices)
    if any(placement.is_partial() for placement in weight.placements):
        raise NotImplementedError(
            f"{op}: a Partial table is not supported, since norms are not linear; reduce it first"
        )
    mesh = weight.device_mesh
    if not is_shard_order(weight.placements, mesh.shape):
        placed = format_placements(weight.placements)
        raise NotImplementedError(f"{op}: a table placed as {placed} is not supported; redistribute it first")
    everywhere = [Replicate()] * mesh.ndim
    ids = comparable_ids(indices.redistribute(placements=everywhere).to_local(), weight.shape[0])
    check_ids(ids, weight.shape[0])
    rows = DTensor.from_local(torch.unique(ids), mesh, everywhere, run_check=False)
    if not any(sharded_dim(placement) == 1 for placement in weight.placements):
        on_each_rank(_whole_rows(max_norm, norm_type), weight, rows)
        return weight
    powers: DTensor = ROW_POWERS.op(weight, rows, norm_type)
    # Mesh dims that shard rows need no reduction: the ranks with a row have all its summands. Under strided shards the
    # powers are those of redistributed rows.
    plain = all(isinstance(cut, Shard | Replicate) for cut in weight.placements)
    kept = [
        part if plain and cut != Shard(1) else Replicate()
        for cut, part in zip(weight.placements, powers.placements, strict=True)
    ]
    on_each_rank(_parts_of_rows(max_norm, norm_type), weight, rows, powers.redistribute(placements=kept))
    return weight


def _whole_rows(max_norm: float, order: float) -> Callable[..., None]:
    def scale(view: RankView, weight: torch.Tensor, rows: torch.Tensor) -> None:
        first, last = view.bounds(0, 0)
        own = rows[(rows >= first) & (rows < last)] - first
        if own.numel():
            aten.embedding_renorm_.default(weight, own, max_norm, order)

    return scale


def _parts_of_rows(max_norm: float, order: float) -> Callable[..., None]:
    def scale(view: RankView, weight: torch.Tensor, rows: torch.Tensor, powers: torch.Tensor) -> None:
        first, last = view.bounds(0, 0)
        own = (rows >= first) & (rows < last)
        norms = powers[own] if order in (0, torch.inf, -torch.inf) else powers[own].pow(1 / order)
        factors = torch.where(norms > max_norm, max_norm / (norms + EPSILON), 1).unsqueeze(-1)
        chosen = rows[own].long() - first
        weight[chosen] = (weight[chosen] * factors).to(weight.dtype)

    return scale


HANDLERS: dict[Any, Callable[..., object]] = {aten.embedding_renorm_.default: renorm}
"""The op for which DTensor calls a function of this module, with the op before its arguments."""
