"""A lookup through chunks: a small reference that needs only the chunks of each rank.

Each rank has its own bags, as it has its own batch in training. The ids of all ranks are gathered, and each rank pools
the rows of its chunks. An all-to-all sends the results to the ranks that have the bags. There, results of the same
columns are summed, and results of different columns are concatenated. Gradients go the same way back. A replicated
table is looked up on each rank, and its gradients are summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from strategies.layouts.tables import Chunk
from strategies.torchrec.tables import ChunkClaim, dtype_of

__all__ = ["gather_ragged", "pool", "pooled", "sum_gradients"]


def pooled(
    leaves: Sequence[tuple[Chunk, torch.Tensor]],
    claims: Sequence[ChunkClaim],
    ids: torch.Tensor,
    lengths: torch.Tensor,
    mode: str,
    group: dist.ProcessGroup,
    replicated: bool = False,
) -> torch.Tensor:
    """Return this rank's bags [bags, columns], pooled over the whole table; every rank has to call this.

    Parameters
    ----------
    leaves
        The chunks of this rank and their tensors, which get gradients.
    claims
        The claims of all ranks, in order of ranks.
    ids, lengths
        Rows of the table, i64[n], and the number of rows of each bag, i64[bags].
    mode
        ``"sum"`` or ``"mean"``.
    """
    columns = claims[0].shape[1]
    if replicated:
        ((_, table),) = leaves
        total = pool(table, ids, lengths)
    else:
        all_ids, all_lengths = gather_ragged(ids, group), gather_ragged(lengths, group)
        bags = [len(some) for some in all_lengths]
        rank = dist.get_rank(group)
        parts = [_part(chunk, leaf, torch.cat(all_ids), torch.cat(all_lengths)) for chunk, leaf in leaves]
        # A rank without chunks also takes part in the all-to-all of the gradients.
        none = torch.zeros(0, dtype=dtype_of(claims), requires_grad=True)
        outgoing = [
            torch.cat([none, *(torch.split(part, bags)[to].flatten() for part in parts)]) for to in range(len(claims))
        ]
        widths = [[chunk.shape[1] for chunk in claim.chunks] for claim in claims]
        incoming = _AllToAll.apply(  # type: ignore[no-untyped-call]
            group, [len(flat) for flat in outgoing], [bags[rank] * sum(some) for some in widths], torch.cat(outgoing)
        )
        total = incoming.new_zeros(bags[rank], columns)
        blocks = torch.split(incoming, [bags[rank] * width for some in widths for width in some])
        for chunk, block in zip([chunk for claim in claims for chunk in claim.chunks], blocks, strict=True):
            padding = (chunk.columns[0], columns - chunk.columns[1])
            total = total + torch.nn.functional.pad(block.view(bags[rank], chunk.shape[1]), padding)
    return total / lengths.clamp(min=1).unsqueeze(1) if mode == "mean" else total


def pool(table: torch.Tensor, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the sum of the rows of each bag, [bags, columns]."""
    bag_of_id = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return torch.zeros(len(lengths), table.shape[1], dtype=table.dtype).index_add(0, bag_of_id, table[ids])


def _part(chunk: Chunk, leaf: torch.Tensor, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the chunk's contribution to each bag, [bags, columns of the chunk]; ids of other rows are dropped."""
    mine = (ids >= chunk.rows[0]) & (ids < chunk.rows[1])
    bag_of_id = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    rows = leaf[ids[mine] - chunk.rows[0]]
    return torch.zeros(len(lengths), leaf.shape[1], dtype=leaf.dtype).index_add(0, bag_of_id[mine], rows)


def gather_ragged(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return the 1-d tensors of all ranks, whose lengths may differ, in order of ranks."""
    size = torch.tensor([len(tensor)])
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group)
    longest = max(int(one) for one in sizes)
    padded = torch.nn.functional.pad(tensor, (0, longest - len(tensor)))
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group)
    return [one[: int(count)] for one, count in zip(gathered, sizes, strict=True)]


def sum_gradients(leaves: Sequence[tuple[Chunk, torch.Tensor]], group: dist.ProcessGroup) -> None:
    """Sum the gradients of a replicated table over the ranks, in place."""
    for _, leaf in leaves:
        assert leaf.grad is not None
        dist.all_reduce(leaf.grad, group=group)


class _AllToAll(torch.autograd.Function):
    """An all-to-all of runs of a 1-d tensor; gradients go back in the same way."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, sent: list[int], received: list[int], flat: torch.Tensor
    ) -> torch.Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _exchange(flat, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None, torch.Tensor]:
        return None, None, None, _exchange(grads[0].contiguous(), ctx.received, ctx.sent, ctx.group)


def _exchange(flat: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    result = flat.new_empty(sum(received))
    dist.all_to_all_single(result, flat.contiguous(), received, sent, group=group)
    return result
