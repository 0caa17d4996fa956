"""The operator ``scaled_rows::scale``, and the strategies of this project."""

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

import verifier


@torch.library.custom_op("scaled_rows::scale", mutates_args=())
def scale(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return ``rows`` [n, d], each multiplied by its factor in ``factors`` [n]."""
    return rows * factors[:, None]


@scale.register_fake
def _(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(rows)


@verifier.samples("scaled_rows::scale")
def calls_of_scale():
    yield torch.randn(8, 4), torch.randn(8)
    yield torch.randn(5, 3, dtype=torch.float64), torch.randn(5, dtype=torch.float64)


@register_sharding(torch.ops.scaled_rows.scale.default)
def scale_strategy(rows, factors):
    replicated = [Replicate()], [Replicate(), Replicate()]
    by_row = [Shard(0)], [Shard(0), Shard(0)]
    by_column = [Shard(1)], [Shard(1), Replicate()]
    return [replicated, by_row, by_column]


@register_sharding(torch.ops.aten.cumsum.default)
def cumsum_strategy(x, dim, dtype=None):
    others = [d for d in range(x.ndim) if d != dim % x.ndim]
    return [([Replicate()], [Replicate(), None, None]), *(([Shard(d)], [Shard(d), None, None]) for d in others)]
