"""The op by which rows of a table are renormalised, with its rules and its kernel."""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.library import sharded_op
from verifier.torch_internals.sharded_ops import RankView

__all__ = ["ROW_POWERS"]


def _rules(op: object, args: tuple[object, ...], kwargs: dict[str, object]) -> list[list[Placement | None]]:
    # result, weight, rows
    order = args[2]
    parts = Partial("max" if order == math.inf else "min" if order == -math.inf else "sum")
    return [[parts, Shard(1), Replicate()], [parts, Shard(0), Replicate()]]


def _kernel(view: RankView, weight: torch.Tensor, rows: torch.Tensor, order: float) -> torch.Tensor:
    """Return the contribution of the rank's entries to the norm of each of ``rows`` ``[k]``.

    By ``order``, the contribution is a sum of powers of magnitudes, a count of nonzero entries, or the largest or
    smallest magnitude. It is float32 for 16-bit dtypes, because it is an intermediate result.
    """
    first, last = view.bounds(0, 0)
    own = (rows >= first) & (rows < last)
    nothing = math.inf if order == -math.inf else 0
    result = weight.new_full(rows.shape, nothing, dtype=torch.promote_types(weight.dtype, torch.float32))
    entries = weight[rows[own].long() - first].to(result.dtype).abs()
    if not entries.numel():
        return result
    match order:
        case math.inf:
            result[own] = entries.amax(-1)
        case _ if order == -math.inf:
            result[own] = entries.amin(-1)
        case 0:
            result[own] = (entries != 0).sum(-1).to(result.dtype)
        case _:
            result[own] = entries.pow(order).sum(-1)
    return result


ROW_POWERS = sharded_op(
    "row_powers",
    "(Tensor weight, Tensor rows, float order) -> Tensor",
    _rules,
    _kernel,
    lambda weight, rows, order: weight.new_empty(rows.shape, dtype=torch.promote_types(weight.dtype, torch.float32)),
    2,
)
