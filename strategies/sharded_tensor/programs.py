"""Lookups in a legacy ``ShardedTensor`` with a ``ChunkShardingSpec``, as programs on DTensors.

Each program imports only torch. On plain tensors it calls the local op. On DTensors, which are all replicated, it gives
each rank its part of the batch and its shard of the table. It wraps the results with the placements that the kernels
promise. The ranks along the last mesh dim shard the table; along other mesh dims everything is repeated.

The kernels sum a shard's gradient over the batches of all ranks. So the gradient of the global table is Partial("sum"):
each rank has zeros for the rows or columns of other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from verifier.planning.boundary import declares
from verifier.torch_internals.groups import chunk_sharded

__all__ = ["BAG", "EMBEDDING", "TRAINED", "embedding", "embedding_bag", "trained"]

EMBEDDING = "strategies.sharded_tensor.programs.embedding"
BAG = "strategies.sharded_tensor.programs.embedding_bag"
TRAINED = "strategies.sharded_tensor.programs.trained"


def span_of(size: int, parts: int, number: int) -> tuple[int, int]:
    """Return start and stop of shard ``number`` of ``parts`` of a dim of ``size``, as in torch.chunk and the spec."""
    width = -(-size // parts)
    start = min(number * width, size)
    return start, min(start + width, size)


def own_span(table: DTensor, dim: int, order: Sequence[int]) -> tuple[int, int, list[int]]:
    """Return start and stop of this rank's shard along ``dim``, and the global ranks in the order of the shards.

    ``order`` is a permutation of the ranks along the last mesh dim. Numbers that are no rank are ignored; missing ranks
    come last.
    """
    mesh = table.device_mesh
    ranks = dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))
    numbers = [number for number in order if number < len(ranks)]
    numbers += [number for number in range(len(ranks)) if number not in numbers]
    number = numbers.index(mesh.get_local_rank(mesh.ndim - 1))
    return *span_of(table.shape[dim], len(ranks), number), [ranks[other] for other in numbers]


def own_part(tensor: DTensor) -> torch.Tensor:
    """Return the local tensor of a replicated DTensor; each rank uses only a part of it."""
    before = [Replicate()] * (tensor.device_mesh.ndim - 1)
    return tensor.to_local(grad_placements=[*before, Partial()])


def shard_table(table: DTensor, dim: int, order: Sequence[int], leaf: bool = False) -> Any:
    """Return the table as a ShardedTensor; gradients flow back to the table unless its shard is a ``leaf``."""
    start, stop, ranks = own_span(table, dim, order)
    piece = own_part(table).narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)
    if leaf:
        piece = piece.detach().requires_grad_()
    group = table.device_mesh.get_group(table.device_mesh.ndim - 1)
    return chunk_sharded(piece, dim, ranks, table.shape, group)


def held_table(sharded: Any, table: DTensor, dim: int, order: Sequence[int]) -> DTensor:
    """Return the current global table of the shards."""
    start, stop, _ = own_span(table, dim, order)
    whole = torch.zeros_like(table.to_local().detach(), memory_format=torch.contiguous_format)
    whole.narrow(dim, start, stop - start).copy_(sharded.local_shards()[0].tensor.detach())
    before = [Replicate()] * (table.device_mesh.ndim - 1)
    return DTensor.from_local(whole, table.device_mesh, [*before, Partial()], run_check=False)


def by_batch(result: torch.Tensor, table: DTensor, shape: Sequence[int]) -> DTensor:
    """Return a result of ``shape`` as a DTensor that is sharded by batch."""
    mesh = table.device_mesh
    places = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    stride = torch.empty(list(shape), device="meta").stride()
    return DTensor.from_local(result, mesh, places, run_check=False, shape=torch.Size(shape), stride=stride)


def rounded(tensor: torch.Tensor, max_norm: float | None) -> torch.Tensor:
    """Return ``tensor`` in float32 if it depends on a norm: aten divides by norm + 1e-7, the kernels by the norm."""
    return tensor.float() if max_norm is not None and tensor.dtype == torch.float64 else tensor


def embedding(
    weight: torch.Tensor,
    input: torch.Tensor,
    dim: int,
    order: list[int],
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
) -> list[torch.Tensor]:
    """Return a lookup and, with ``max_norm``, the table after it.

    The table is sharded along ``dim``; the ranks have the shards in ``order``. ``input`` is sharded on its first dim.
    """
    options: dict[str, Any] = {"padding_idx": padding_idx, "max_norm": max_norm, "norm_type": norm_type}
    if not isinstance(weight, DTensor) or not isinstance(input, DTensor):
        table: Any = weight.clone()
        found, after = F.embedding(input, table, **options), table.detach()
    else:
        mesh = weight.device_mesh
        table = shard_table(weight, dim, order)
        start, stop = span_of(input.shape[0], mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1))
        found = F.embedding(input.to_local()[start:stop], table, **options)
        found = by_batch(rounded(found, max_norm), weight, [*input.shape, weight.shape[1]])
        after = held_table(table, weight, dim, order)
    return [found] if max_norm is None else [rounded(found, max_norm), rounded(after, max_norm)]


def pooled(ids: torch.Tensor, table: Any, starts: torch.Tensor | None, options: dict[str, Any]) -> torch.Tensor:
    """Return the bags of this rank.

    If a rank has more bags than ids, the kernels read uninitialised memory. Torch then fills new memory, so that the
    results are the same each time.
    """
    before = torch.get_deterministic_debug_mode()
    if starts is not None and len(starts) - options["include_last_offset"] > len(ids):
        torch.set_deterministic_debug_mode("warn")
    try:
        return F.embedding_bag(ids, table, starts, **options)
    finally:
        torch.set_deterministic_debug_mode(before)


def embedding_bag(
    weight: torch.Tensor,
    input: torch.Tensor,
    dim: int,
    order: list[int],
    offsets: list[int] | None = None,
    include_last_offset: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    mode: str = "sum",
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
) -> list[torch.Tensor]:
    """Return pooled bags and, with ``max_norm``, the table after the lookup.

    The table is sharded along ``dim``; the ranks have the shards in ``order``. Each rank pools its part of the bags.
    """
    options: dict[str, Any] = {"mode": mode, "max_norm": max_norm, "norm_type": norm_type}
    options |= {"include_last_offset": include_last_offset, "padding_idx": padding_idx}
    if not isinstance(weight, DTensor) or not isinstance(input, DTensor):
        options["per_sample_weights"] = per_sample_weights
        table: Any = weight.clone()
        starts = None if offsets is None else torch.tensor(offsets, dtype=input.dtype)
        found, after = F.embedding_bag(input, table, starts, **options), table.detach()
        return [found] if max_norm is None else [rounded(found, max_norm), rounded(after, max_norm)]
    mesh = weight.device_mesh
    ranks, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    ids = input.to_local()
    samples = own_part(per_sample_weights) if isinstance(per_sample_weights, DTensor) else None
    starts = None
    if offsets is None:
        bags = len(ids)
        first, last = span_of(bags, ranks, rank)
    else:
        edges = offsets if include_last_offset else [*offsets, len(ids)]
        bags = len(edges) - 1
        begin, end = span_of(bags, ranks, rank)
        first, last = edges[begin] if begin else 0, edges[end]
        own = [edge - first for edge in edges[begin : end + include_last_offset]]
        starts = torch.tensor(own, dtype=ids.dtype, device=ids.device)
    if samples is not None:
        samples = samples[first:last]
    table = shard_table(weight, dim, order)
    options["per_sample_weights"] = samples
    found = pooled(ids[first:last], table, starts, options)
    placed = by_batch(rounded(found, max_norm), weight, [bags, weight.shape[1]])
    return [placed] if max_norm is None else [placed, rounded(held_table(table, weight, dim, order), max_norm)]


def trained(
    weight: torch.Tensor,
    input: torch.Tensor,
    dim: int,
    order: list[int],
    mode: str | None = None,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
) -> torch.Tensor:
    """Return the table after a step of SGD for each of the batches along the first dim of ``input``.

    The loss is half the sum of squares of a lookup, or of pooled bags if ``mode`` is given. Each rank makes one
    optimizer of its leaf of the table, as torch's own optimizer of sharded tensors does.
    """
    options: dict[str, Any] = {"padding_idx": padding_idx, "max_norm": max_norm, "norm_type": norm_type}
    if isinstance(weight, DTensor) and isinstance(input, DTensor):
        mesh = weight.device_mesh
        table = shard_table(weight, dim, order, leaf=True)
        optimizer = torch.optim.SGD([shard.tensor for shard in table.local_shards()], lr=2.0)
        start, stop = span_of(input.shape[1], mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1))
        batches: Any = input.to_local()[:, start:stop]
    else:
        table, batches = weight.detach().clone().requires_grad_(), input
        optimizer = torch.optim.SGD([table], lr=2.0)
    for batch in batches:
        optimizer.zero_grad()
        if mode is None:
            found = F.embedding(batch, table, **options)
        else:
            found = F.embedding_bag(batch, table, mode=mode, **options)
        torch.autograd.backward(found.square().sum() / 2)
        optimizer.step()
    if isinstance(weight, DTensor):
        return rounded(held_table(table, weight, dim, order), max_norm)
    return rounded(table.detach(), max_norm)


for _program in (EMBEDDING, BAG, TRAINED):
    declares(_program)
