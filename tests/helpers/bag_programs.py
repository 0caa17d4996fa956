"""Embedding bags in other calls than the function with autograd, and under wrong strategies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from strategies.embedding_bag.ops import BAG_OPS
from strategies.embedding_bag.sharding import dense_weight_gradient
from verifier.torch_internals.registries import replaced_handler, replaced_sharded_op
from verifier.torch_internals.sharded_ops import RankView, ShardedOp

(FIRST_OF_MAX,) = (sharded for sharded in BAG_OPS if "first_of_max" in str(sharded.op))
R, S0 = Replicate(), Shard(0)
DENSE: Any = torch.ops.aten._embedding_bag_dense_backward.default


def inference(weight: torch.Tensor, input: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return means in inference mode, in which DTensor gets the composite op."""
    with torch.inference_mode():
        return torch.nn.functional.embedding_bag(input, weight, offsets)


def module(weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Return what ``nn.EmbeddingBag`` makes of ids of two dims."""
    bag = torch.nn.EmbeddingBag(weight.shape[0], weight.shape[1], mode="max", padding_idx=1)
    result: torch.Tensor = torch.func.functional_call(bag, {"weight": weight}, (input,))
    return result


def flattened_first(weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Return sums of bags of one size, of ids that are flattened first, by offsets of 64 bits."""
    offsets = torch.arange(0, input.numel(), input.shape[1])
    return torch.nn.functional.embedding_bag(input.reshape(-1), weight, offsets, mode="sum")


def flattened_by_shards(weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Return sums of bags of one size, of ids that each rank flattens separately; right if shards are even."""
    offsets = torch.arange(0, input.numel(), input.shape[1])
    flat = input.to_local().reshape(-1) if isinstance(input, DTensor) else input.reshape(-1)
    if isinstance(input, DTensor):
        where, shape = input.placements, torch.Size([input.numel()])
        flat = DTensor.from_local(flat, input.device_mesh, where, run_check=False, shape=shape, stride=(1,))
    if isinstance(weight, DTensor):
        offsets = DTensor.from_local(offsets, weight.device_mesh, weight.placements, run_check=False)
    return torch.nn.functional.embedding_bag(flat, weight, offsets, mode="sum")


def _maximum(sharded: ShardedOp, weight: torch.Tensor, input: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    with replaced_sharded_op(sharded):
        return torch.nn.functional.embedding_bag(input, weight, offsets, mode="max")


def maximum(weight: torch.Tensor, input: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return _maximum(FIRST_OF_MAX, weight, input, offsets)


def maximum_of_each_rank(weight: torch.Tensor, input: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Give the gradient of a maximum to the winner of every rank, even if another rank has a larger value."""

    def kernel(view: RankView, *args: torch.Tensor) -> torch.Tensor:
        weight, indices, starts, stops, values, padding_idx = args
        own = torch.full_like(values, -torch.inf)
        first, last = view.bounds(0, 0)
        for bag, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
            ids = indices[start:stop]
            ids = ids[(ids >= first) & (ids < last)] - first
            if ids.numel():
                own[bag] = weight[ids].amax(0)
        result: torch.Tensor = FIRST_OF_MAX.kernel(view, weight, indices, starts, stops, own, padding_idx)
        return result

    return _maximum(replace(FIRST_OF_MAX, kernel=kernel), weight, input, offsets)


def maximum_without_tie_break(weight: torch.Tensor, input: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Let every rank that has the maximum take its gradient."""
    rules = [[R, S0, R, R, R, R]]
    return _maximum(replace(FIRST_OF_MAX, rules=lambda *_: rules), weight, input, offsets)


def maximum_of_last(weight: torch.Tensor, input: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Give the gradient to the rank that has the maximum last."""

    def kernel(view: RankView, *args: object) -> torch.Tensor:
        found: torch.Tensor = FIRST_OF_MAX.kernel(view, *args)
        return found.masked_fill(found == view.shapes[1][0], -1)

    sharded = replace(FIRST_OF_MAX, kernel=kernel, rules=lambda *_: [[Partial("max"), S0, R, R, R, R]])
    return _maximum(sharded, weight, input, offsets)


# -------------------------------------------------------------------------------------------------- gradient by itself
def scaled_gradient(grad: torch.Tensor, indices: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
    """Return the gradient of sums, scaled by frequency; for plain tensors from counts, because aten's is wrong."""
    nothing = bags[:0]
    sharded = isinstance(grad, DTensor)
    result: torch.Tensor = DENSE(grad, indices, bags, nothing, nothing, 5, sharded, 0, None, 1)
    return result if sharded else result / torch.bincount(indices, minlength=5).clamp(min=1).unsqueeze(-1)


def _of_maximum(handler: Callable[..., object], *saved: torch.Tensor) -> torch.Tensor:
    with replaced_handler(DENSE, handler):
        result: torch.Tensor = DENSE(*saved, 5, False, 2, None, 1)
    return result


def gradient_of_maximum(
    grad: torch.Tensor, indices: torch.Tensor, bags: torch.Tensor, counts: torch.Tensor, winners: torch.Tensor
) -> torch.Tensor:
    return _of_maximum(dense_weight_gradient, grad, indices, bags, counts, winners)


def gradient_of_maximum_by_ids(
    grad: torch.Tensor, indices: torch.Tensor, bags: torch.Tensor, counts: torch.Tensor, winners: torch.Tensor
) -> torch.Tensor:
    """Declare the gradient Partial on mesh dims that shard the ids, as the gradient of a sum is."""

    def handler(op: object, grad: DTensor, indices: DTensor, *rest: object) -> DTensor:
        result: Any = dense_weight_gradient(op, grad, indices, *rest)  # type: ignore[arg-type]
        parts = [Partial() if p == S0 else own for p, own in zip(indices.placements, result.placements, strict=True)]
        return DTensor.from_local(result.to_local(), result.device_mesh, parts, run_check=False)

    return _of_maximum(handler, grad, indices, bags, counts, winners)


def gradient_of_empty_bags(
    grad: torch.Tensor, indices: torch.Tensor, bags: torch.Tensor, counts: torch.Tensor, winners: torch.Tensor
) -> torch.Tensor:
    """Give the gradient of a bag without ids to row 0, which aten names as its winner."""

    def handler(op: object, grad: DTensor, indices: DTensor, bags: DTensor, counts: DTensor, *rest: object) -> object:
        return dense_weight_gradient(op, grad, indices, bags, counts.clamp(min=1), *rest)  # type: ignore[arg-type]

    return _of_maximum(handler, grad, indices, bags, counts, winners)
