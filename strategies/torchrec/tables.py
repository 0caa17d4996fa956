"""A table in a layout: each rank's ``LocalShardsWrapper`` inside a DTensor, and the claims of the ranks about it."""

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
    """Return ``table`` [rows, columns] in ``layout``, as TorchRec makes it, without communication.

    Parameters
    ----------
    table
        The global table, the same on every rank. The rank's chunks are copied.
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

    The DTensor is made as TorchRec does: shape and placement come from ``layout``, and torch does not check them.
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
        If the mesh has several dims, or if its ranks are simulated: each rank has to hold other chunks.
    """
    if mesh.ndim != 1:
        raise NotImplementedError(f"layouts take a mesh of one dim, not of {mesh.ndim}; hosts are ranks in a row")
    if simulated_ranks() is not None:
        raise NotImplementedError("layouts need a process for each rank; simulated ranks hold all the same")
    return mesh.get_group()


def held(table: DTensor) -> list[tuple[Chunk, torch.Tensor]]:
    """Return the chunks in this rank's metadata, each with its tensor; no copies.

    Raises
    ------
    TypeError
        If the local tensor of ``table`` is no ``LocalShardsWrapper`` of torch or torchrec, or if ``table`` is not 2-d.
    ValueError
        If the numbers of tensors and of chunks in the metadata differ.
    """
    chunks, shards = _chunks_and_shards(table)
    if len(chunks) != len(shards):
        raise ValueError(f"a LocalShardsWrapper has {plural(len(shards), 'tensor')} for {plural(len(chunks), 'chunk')}")
    return list(zip(chunks, shards, strict=True))


def _chunks_and_shards(table: DTensor) -> tuple[list[Chunk], list[torch.Tensor]]:
    """Return the chunks in this rank's metadata, and its tensors."""
    with torch.no_grad():
        local: Any = table.to_local()
    # torchrec has its own class of this name
    if not any(base.__name__ == LocalShardsWrapper.__name__ for base in type(local).__mro__):
        raise TypeError(f"the local tensor is a {type(local).__name__}, not a LocalShardsWrapper")
    if table.ndim != 2:
        raise TypeError(f"a DTensor of shape {list(table.shape)} is no table of rows and columns")
    shards = list(local.local_shards())
    chunks = [_chunk(meta.offsets, meta.sizes) for meta in local.local_chunks]
    # A wrapper without shards has a 0 by 0 chunk in its metadata.
    return [chunk for chunk in chunks if shards or not chunk.empty], shards


def _chunk(offsets: Sequence[int], sizes: Sequence[int]) -> Chunk:
    (row, column), (rows, columns) = offsets, sizes
    return Chunk((row, row + rows), (column, column + columns))


@dataclass(frozen=True)
class ChunkClaim:
    """A rank's description of a table, without values.

    ``chunks`` come from the metadata, ``shapes`` and ``dtypes`` from the tensors; there should be one of each per
    chunk. ``plan`` is the layout that the rank expects, or None.
    """

    shape: tuple[int, ...]
    placement: str
    chunks: tuple[Chunk, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    plan: TableLayout | None = None


def claims_of(table: DTensor, plan: TableLayout | None = None) -> list[ChunkClaim]:
    """Return the claim of each rank about ``table``, in order of ranks; every rank of the mesh has to call this.

    Raises
    ------
    TypeError
        On every rank, if the local tensor of a rank is no ``LocalShardsWrapper`` of rows and columns.
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
    """Return the dtype of the local tensors, because a ``LocalShardsWrapper`` always says float32."""
    found: torch.dtype = next(getattr(torch, dtype) for claim in claims for dtype in claim.dtypes)
    return found


def assemble(
    pairs: Sequence[tuple[Chunk, torch.Tensor]], like: torch.Tensor, mesh: DeviceMesh, replicated: bool
) -> torch.Tensor:
    """Return the global table from the ranks' ``pairs``, of the shape and dtype of ``like``; chunks must not overlap.

    Every rank has to call this. If ``replicated``, this rank's pairs are enough and nothing is communicated.
    """
    whole = torch.zeros_like(like)
    for chunk, shard in pairs:
        whole[slice(*chunk.rows), slice(*chunk.columns)] = shard.detach()
    if not replicated:
        dist.all_reduce(whole, group=group_of(mesh))
    return whole
