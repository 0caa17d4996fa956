"""Calls of embedding bags in other ways than as a function with autograd, and under a strategy that is wrong."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from strategies.embedding_bag.ops import BAG_OPS
from verifier.torch_internals import RankView, ShardedOp, replaced_sharded_op

(FIRST_OF_MAX,) = (sharded for sharded in BAG_OPS if "first_of_max" in str(sharded.op))
R, S0 = Replicate(), Shard(0)


def inference(weight: torch.Tensor, input: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return means in inference mode, in which DTensor gets the composite op."""
    with torch.inference_mode():
        return torch.nn.functional.embedding_bag(input, weight, offsets)


def module(weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Return what ``nn.EmbeddingBag`` makes of ids of two dims."""
    bag = torch.nn.EmbeddingBag(weight.shape[0], weight.shape[1], mode="max", padding_idx=1)
    result: torch.Tensor = torch.func.functional_call(bag, {"weight": weight}, (input,))
    return result


def _maximum(sharded: ShardedOp, weight: torch.Tensor, input: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    with replaced_sharded_op(sharded):
        return torch.nn.functional.embedding_bag(input, weight, offsets, mode="max")


def maximum(weight: torch.Tensor, input: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return _maximum(FIRST_OF_MAX, weight, input, offsets)


def maximum_of_each_rank(weight: torch.Tensor, input: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Give the gradient of a maximum to the winner of every rank, whether or not another rank has more."""

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
