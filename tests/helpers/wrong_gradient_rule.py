"""A wrong rule: with sharded ids, it declares the table's gradient replicated, but each rank has only a summand."""

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding


@register_sharding(torch.ops.aten.embedding_dense_backward.default)
def gradient(grad_output, indices, *options):
    rest = [None] * len(options)
    replicated = [Replicate()], [Replicate(), Replicate(), *rest]
    by_batch = [Replicate()], [Shard(0), Shard(0), *rest]  # wrong: Partial() is due
    return [replicated, by_batch]
