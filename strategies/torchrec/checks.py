"""Checks of a table that ranks hold as chunks in a DTensor, whatever code made the table.

The chunks in the metadata of the ranks are the truth; the placements of the DTensor need not match them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from strategies.layouts.tables import Chunk, TableLayout
from strategies.torchrec.tables import ChunkClaim, claims_of, group_of, held

__all__ = ["LayoutError", "check_table", "overlaps", "problems", "uncovered"]


class LayoutError(AssertionError):
    """The ranks together do not hold each element of one table once."""


def check_table(table: DTensor, values: torch.Tensor | None = None, layout: TableLayout | None = None) -> None:
    """Check the chunks of ``table``; every rank has to call this, and every rank raises the same error.

    Parameters
    ----------
    values
        The expected global table [rows, columns]; None skips the check of contents.
    layout
        The expected layout, the same on every rank. None accepts any chunks that cover the table once, and the whole
        table on every rank.

    Raises
    ------
    LayoutError
        For the first problem: ranks that disagree, a chunk outside of the table, an overlap, elements that no rank
        holds, a local tensor of another shape than its chunk, values of another shape than the table, wrong contents.
    TypeError
        If a rank's local tensor is no ``LocalShardsWrapper`` of rows and columns.
    """
    claims = claims_of(table, layout)
    whole = Chunk((0, claims[0].shape[0]), (0, claims[0].shape[1]))
    replicated = layout.replicated if layout is not None else len(claims) > 1 and all(
        claim.chunks == (whole,) for claim in claims
    )  # fmt: skip
    found = next(problems(claims, replicated), None)
    if found is None and values is not None:
        group = group_of(table.device_mesh)
        texts: list[str | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(texts, _wrong_content(table, values, dist.get_rank(group)), group)
        found = next((text for text in texts if text is not None), None)
    if found is not None:
        name = "a table" if layout is None else f"a {layout.name} table"
        raise LayoutError(f"{found}\n  in {name} of {list(claims[0].shape)} on {len(claims)} ranks")


def problems(claims: Sequence[ChunkClaim], replicated: bool = False) -> Iterator[str]:
    """Yield the problems in the claims of the ranks, which have no values; each names the difference, then a cause."""
    yield from _disagreements(claims)
    rows, columns = claims[0].shape
    everything = [(rank, chunk) for rank, claim in enumerate(claims) for chunk in claim.chunks if not chunk.empty]
    for rank, chunk in everything:
        if min(chunk.offsets) < 0 or chunk.rows[1] > rows or chunk.columns[1] > columns:
            yield f"rank {rank} holds {chunk}, which is outside of the table of {[rows, columns]}"
    for rank, claim in enumerate(claims):
        if len(claim.chunks) != len(claim.shapes):
            counts = f"got {len(claim.shapes)}, expected {len(claim.chunks)} for its chunks {_listed(claim.chunks)}"
            yield f"local tensors of rank {rank}: {counts}; does the metadata list them all?"
        for chunk, shape in zip(claim.chunks, claim.shapes, strict=False):
            if chunk.shape != shape:
                yield (
                    f"local tensor of rank {rank}: got shape {list(shape)}, expected {list(chunk.shape)} for its chunk "
                    f"{chunk}"
                )
    shares = [[(rank, chunk)] for rank, chunk in everything] if replicated else [everything]
    for share in shares:
        for (one, first), (other, second), both in overlaps(share):
            who = f"rank {one} ({first}) and rank {other} ({second})"
            yield f"chunks overlap: {both} is held by {who}; are offsets cumulative?"
    if replicated:
        shares = [[(rank, chunk) for rank, chunk in everything if rank == own] for own in range(len(claims))]
    for own, share in enumerate(shares):
        for gap in uncovered((rows, columns), [chunk for _, chunk in share]):
            who = f"not by rank {own}, though it is replicated" if replicated else "by no rank"
            yield f"a chunk is missing: {gap} is held {who}; do the ranks use the same split?"


def _disagreements(claims: Sequence[ChunkClaim]) -> Iterator[str]:
    first = claims[0]
    for rank, claim in enumerate(claims):
        for what, got, expected in (
            ("shape of the table", list(claim.shape), list(first.shape)),
            ("placement", claim.placement, first.placement),
            ("layout", _plan_text(claim.plan), _plan_text(first.plan)),
        ):
            if got != expected:
                yield f"ranks disagree: {what} is {got} on rank {rank} and {expected} on rank 0"
    dtypes = {dtype: rank for rank, claim in reversed(list(enumerate(claims))) for dtype in claim.dtypes}
    if len(dtypes) > 1:
        texts = [f"{dtype} on rank {rank}" for dtype, rank in sorted(dtypes.items(), key=lambda item: item[1])]
        yield f"ranks disagree: the local tensors are {' and '.join(texts)}"
    for rank, claim in enumerate(claims):
        if claim.plan is not None and claim.plan.ranks != len(claims):
            counts = f"got {claim.plan.ranks} ranks, expected {len(claims)}, those of the mesh"
            yield f"layout {claim.plan.name} on rank {rank}: {counts}"
    for rank, claim in enumerate(claims):
        chunks = tuple(chunk for chunk in claim.chunks if not chunk.empty)
        for planner, other in enumerate(claims):
            plan = other.plan
            planned = chunks if plan is None or plan.ranks != len(claims) else plan.chunks[rank]
            if sorted(chunks) != sorted(planned):
                yield (
                    f"ranks disagree: rank {rank} holds {_listed(chunks)}, the layout on rank {planner} says "
                    f"{_listed(planned)}"
                )


def _plan_text(plan: TableLayout | None) -> str:
    if plan is None:
        return "not given"
    return f"{plan.name} of {list(plan.shape)} as {'; '.join(_listed(chunks) for chunks in plan.chunks)}"


def _listed(chunks: Sequence[Chunk]) -> str:
    return ", ".join(map(str, chunks)) or "nothing"


def overlaps(
    chunks: Sequence[tuple[int, Chunk]],
) -> Iterator[tuple[tuple[int, Chunk], tuple[int, Chunk], Chunk]]:
    """Yield each two (rank, chunk) pairs whose chunks share elements, and the shared chunk."""
    for one, other in combinations(chunks, 2):
        rows, columns = (
            (max(a[0], b[0]), min(a[1], b[1]))
            for a, b in ((one[1].rows, other[1].rows), (one[1].columns, other[1].columns))
        )
        both = Chunk(rows, columns)
        if not both.empty:
            yield one, other, both


def uncovered(shape: tuple[int, int], chunks: Sequence[Chunk]) -> Iterator[Chunk]:
    """Yield the parts of a table of ``shape`` that no chunk covers, as boxes between the edges of chunks.

    >>> [str(gap) for gap in uncovered((4, 2), [Chunk((0, 1), (0, 2)), Chunk((3, 4), (0, 2))])]
    ['[1:3, 0:2]']
    """
    edges = [
        sorted({0, size, *(edge for chunk in chunks for edge in (chunk.rows, chunk.columns)[dim] if 0 < edge < size)})
        for dim, size in enumerate(shape)
    ]
    for rows in pairwise(edges[0]):
        for columns in pairwise(edges[1]):
            box = Chunk(rows, columns)
            if not any(
                chunk.rows[0] <= box.rows[0] < chunk.rows[1] and chunk.columns[0] <= box.columns[0] < chunk.columns[1]
                for chunk in chunks
            ):
                yield box


def _wrong_content(table: DTensor, values: torch.Tensor, rank: int) -> str | None:
    if values.shape != table.shape:
        return f"values on rank {rank}: got shape {list(values.shape)}, expected {list(table.shape)}, that of the table"
    for chunk, shard in held(table):
        expected = values[slice(*chunk.rows), slice(*chunk.columns)]
        differing = ~((shard == expected) | (shard.isnan() & expected.isnan()))
        if bool(differing.any()):
            row, column = differing.nonzero()[0].tolist()
            return (
                f"wrong content on rank {rank}: got {shard[row, column].item()}, expected "
                f"{expected[row, column].item()} at [{row}, {column}] of its chunk {chunk}; are the rows those of "
                "another chunk?"
            )
    return None
