"""A table in a layout: what each rank holds as a ``LocalShardsWrapper`` inside a DTensor, and what ranks say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from strategies.layouts.tables import Chunk, TableLayout
from verifier.core.wording import plural
from verifier.placements.parsing import parse_placements
from verifier.torch_internals.names import LocalShardsWrapper
from verifier.torch_internals.placements import placement_text
from verifier.torch_internals.simulation import simulated_ranks

__all__ = ["ChunkClaim", "assemble", "claims_of", "distribute", "dtype_of", "group_of", "held", "wrap"]


def distribute(table: torch.Tensor, layout: TableLayout, mesh: DeviceMesh) -> DTensor:
    """Return ``table`` [rows, columns] in ``layout``, as TorchRec makes it; communicates nothing.

    Parameters
    ----------
    table
        The whole table, the same on every rank. What the rank holds is copied.
    mesh
        One mesh dim with a rank for each rank of ``layout``.

    Raises
    ------
    ValueError
        If table, layout and mesh do not fit each other.
    """
    if tuple(table.shape) != layout.shape:
        raise ValueError(
            f"a table of {list(table.shape)} does not fit the layout {layout.name} of {list(layout.shape)}"
        )
    if mesh.size() != layout.ranks:
        raise ValueError(f"a mesh of {mesh.size()} ranks does not fit the layout {layout.name} of {layout.ranks}")
    chunks = layout.chunks[dist.get_rank(group_of(mesh))]
    shards = [table.detach()[slice(*chunk.rows), slice(*chunk.columns)].clone() for chunk in chunks]
    return wrap(shards, [chunk.offsets for chunk in chunks], layout, mesh)


def wrap(
    shards: Sequence[torch.Tensor], offsets: Sequence[tuple[int, int]], layout: TableLayout, mesh: DeviceMesh
) -> DTensor:
    """Return a DTensor around the local ``shards`` [rows, columns of a chunk], which begin at ``offsets`` of the table.

    It is made the way TorchRec makes it: shape and placement are those of ``layout``, and torch checks nothing.
    """
    local = LocalShardsWrapper(list(shards), [tuple(offset) for offset in offsets])
    return DTensor.from_local(
        local, mesh, parse_placements(layout.placement), run_check=False,
        shape=torch.Size(layout.shape), stride=(layout.shape[1], 1),
    )  # fmt: skip


def group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the process group of a mesh of one dim.

    Raises
    ------
    NotImplementedError
        If the mesh has several dims, or if its ranks are simulated: a rank has to hold what the others do not.
    """
    if mesh.ndim != 1:
        raise NotImplementedError(f"layouts take a mesh of one dim, not of {mesh.ndim}; hosts are ranks in a row")
    if simulated_ranks() is not None:
        raise NotImplementedError("layouts need a process for each rank; simulated ranks hold all the same")
    return mesh.get_group()


def held(table: DTensor) -> list[tuple[Chunk, torch.Tensor]]:
    """Return the chunks that this rank says it holds and the tensor of each; no copies.

    Raises
    ------
    TypeError
        If the local tensor of ``table`` is no ``LocalShardsWrapper``, torch's or torchrec's, or it has other dims than
        rows and columns.
    ValueError
        If it has not as many tensors as its metadata has chunks.
    """
    chunks, shards = _chunks_and_shards(table)
    if len(chunks) != len(shards):
        raise ValueError(f"a LocalShardsWrapper has {plural(len(shards), 'tensor')} for {plural(len(chunks), 'chunk')}")
    return list(zip(chunks, shards, strict=True))


def _chunks_and_shards(table: DTensor) -> tuple[list[Chunk], list[torch.Tensor]]:
    """Return the chunks in the metadata of this rank, and the tensors that it holds."""
    with torch.no_grad():
        local: Any = table.to_local()
    # torchrec has a class of this name that is not torch's
    if not any(base.__name__ == LocalShardsWrapper.__name__ for base in type(local).__mro__):
        raise TypeError(f"the local tensor is a {type(local).__name__}, not a LocalShardsWrapper")
    if table.ndim != 2:
        raise TypeError(f"a DTensor of shape {list(table.shape)} is no table of rows and columns")
    shards = list(local.local_shards())
    chunks = [_chunk(meta.offsets, meta.sizes) for meta in local.local_chunks]
    # A wrapper of no shards has a chunk of size 0 by 0 in its metadata.
    return [chunk for chunk in chunks if shards or not chunk.empty], shards


def _chunk(offsets: Sequence[int], sizes: Sequence[int]) -> Chunk:
    (row, column), (rows, columns) = offsets, sizes
    return Chunk((row, row + rows), (column, column + columns))


@dataclass(frozen=True)
class ChunkClaim:
    """What a rank says of a table, without its values.

    ``chunks`` are those of its metadata, ``shapes`` and ``dtypes`` those of its tensors, which should be one for each;
    ``plan`` is what the rank takes the layout to be, None if it was given none.
    """

    shape: tuple[int, ...]
    placement: str
    chunks: tuple[Chunk, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    plan: TableLayout | None = None


def claims_of(table: DTensor, plan: TableLayout | None = None) -> list[ChunkClaim]:
    """Return what each rank says of ``table``, in order of ranks; every rank of its mesh has to call this.

    Raises
    ------
    TypeError
        On every rank, if one of them holds something other than rows and columns in a ``LocalShardsWrapper``.
    """
    group = group_of(table.device_mesh)
    try:
        own: ChunkClaim | str = _own_claim(table, plan)
    except TypeError as error:
        own = f"rank {dist.get_rank(group)}: {error}"
    everyone: list[ChunkClaim | str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group)
    claims = [claim for claim in everyone if isinstance(claim, ChunkClaim)]
    if len(claims) != len(everyone):
        raise TypeError(next(text for text in everyone if isinstance(text, str)))
    return claims


def _own_claim(table: DTensor, plan: TableLayout | None) -> ChunkClaim:
    chunks, shards = _chunks_and_shards(table)
    return ChunkClaim(
        tuple(table.shape),
        placement_text(table.placements),
        tuple(chunks),
        tuple(tuple(shard.shape) for shard in shards),
        tuple(str(shard.dtype).removeprefix("torch.") for shard in shards),
        plan,
    )


def dtype_of(claims: Sequence[ChunkClaim]) -> torch.dtype:
    """Return the dtype of the table: that of the local tensors, since a wrapper of chunks says float32 of any."""
    found: torch.dtype = next(getattr(torch, dtype) for claim in claims for dtype in claim.dtypes)
    return found


def assemble(
    pairs: Sequence[tuple[Chunk, torch.Tensor]], like: torch.Tensor, mesh: DeviceMesh, replicated: bool
) -> torch.Tensor:
    """Return the whole of what the ranks hold in ``pairs``, shaped and typed as ``like``; chunks must not overlap.

    Every rank has to call this. ``replicated`` returns what this rank holds and communicates nothing.
    """
    whole = torch.zeros_like(like)
    for chunk, shard in pairs:
        whole[slice(*chunk.rows), slice(*chunk.columns)] = shard.detach()
    if not replicated:
        dist.all_reduce(whole, group=group_of(mesh))
    return whole
