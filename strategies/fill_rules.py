"""Rules for ``fill_`` and ``masked_fill_`` of a Partial tensor, such as the result of a row-wise lookup.

Torch 2.13.0 is wrong for ``fill_``: each rank holds the whole value, so P(sum) adds the value once for each rank. Its
rule for ``masked_fill_`` refuses a Partial tensor, and so the gradient of every norm of one is refused. Here the local
tensors reduce to the value: under P(sum) the first rank holds the value, and the other ranks hold 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.embedding.sharding import ELEMENTWISE
from verifier.placements.algebra import sharded_dim
from verifier.torch_internals.placements import on_dim
from verifier.torch_internals.sharded_ops import RankView, ShardedOp, given_strides

__all__ = ["FILLING_OPS"]

aten = torch.ops.aten

FillRule = list[Placement | None]
Value = Any
"""A number or a 0-d tensor. Torch declares an overload for each."""
NEUTRAL = {"sum": 0, "product": 1}
"""Neutral elements. For the other reductions every rank can hold the value, because repeating it changes nothing."""


def fill_rules(op: object, args: tuple[object, ...], kwargs: dict[str, object]) -> list[FillRule]:
    """Return the rules on one mesh dim: result, tensor, and the value if it is a tensor."""
    value: FillRule = [Replicate()] if hasattr(args[1], "shape") else []
    placements = [*map(Shard, range(_ndim(args[0]))), *given_strides(), *map(Partial, ELEMENTWISE)]
    return [[placement, placement, *value] for placement in placements]


def masked_fill_rules(op: object, args: tuple[object, ...], kwargs: dict[str, object]) -> list[FillRule]:
    """Return the rules on one mesh dim: result, tensor, mask, and the value if it is a tensor."""
    value: FillRule = [Replicate()] if hasattr(args[2], "shape") else []
    ndim, mask = _ndim(args[0]), tuple(args[1].shape)  # type: ignore[attr-defined]
    rules: list[FillRule] = [[Partial(kind), Partial(kind), Replicate(), *value] for kind in ELEMENTWISE]
    for placement in (*map(Shard, range(ndim)), *given_strides()):
        dim = sharded_dim(placement)
        assert dim is not None
        of_mask = dim - ndim + len(mask)
        cut = of_mask >= 0 and mask[of_mask] != 1
        rules.append([placement, placement, on_dim(placement, of_mask) if cut else Replicate(), *value])
    return rules


def fill(view: RankView, tensor: torch.Tensor, value: Value) -> torch.Tensor:
    """Fill the rank's local tensor."""
    return tensor.fill_(_part(view, value))


def masked_fill(view: RankView, tensor: torch.Tensor, mask: torch.Tensor, value: Value) -> torch.Tensor:
    """Fill the rank's local tensor where the mask is true."""
    return tensor.masked_fill_(mask, _part(view, value))


def _part(view: RankView, value: Value) -> Value:
    """Return the number or tensor that the rank fills with, so that the local tensors reduce to ``value``."""
    for at, placement in zip(view.coordinate, view.placements[0], strict=True):
        if at and isinstance(placement, Partial) and placement.reduce_op in NEUTRAL:
            neutral = NEUTRAL[placement.reduce_op]
            return torch.full_like(value, neutral) if isinstance(value, torch.Tensor) else neutral
    return value


def _ndim(tensor: object) -> int:
    return len(tensor.shape)  # type: ignore[attr-defined]


FILLING_OPS = (
    ShardedOp(aten.fill_.Scalar, fill_rules, fill, static_argnum=1),
    ShardedOp(aten.fill_.Tensor, fill_rules, fill),
    ShardedOp(aten.masked_fill_.Scalar, masked_fill_rules, masked_fill, static_argnum=2),
    ShardedOp(aten.masked_fill_.Tensor, masked_fill_rules, masked_fill),
)
"""The ops that DTensor runs by these rules and kernels."""
