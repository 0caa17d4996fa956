"""Our own sharding strategy of ``aten.embedding`` and its backward: rules, and the kernels that they hold for.

A row-wise lookup is a plain ``Partial``: each rank looks up the ids of its own rows and leaves 0 for all other ids.
Torch's masked partial keeps a mask in the placement, and the first reduction removes the mask. Here no mask is kept, so
any op can use the result, any number of times. Rules are for one mesh dim, and DTensor takes their products. The kernel
knows how all mesh dims together shard the rows, so several mesh dims may.
"""

from __future__ import annotations

from typing import cast

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from verifier.torch_internals.dtensors import is_fake
from verifier.torch_internals.sharded_ops import RankView, ShardedOp

__all__ = [
    "ELEMENTWISE",
    "GRADIENT",
    "ID_DTYPES",
    "LINEAR",
    "LOOKUP",
    "check_ids",
    "comparable_ids",
    "count_ids",
    "divided_by_counts",
    "has_gradient",
    "owned_ids",
    "share_ids_and_counts",
]

aten = torch.ops.aten

COUNT_BYTES = 8
"""Bytes of a count, an int64."""
ID_DTYPES = (torch.int64, torch.int32)
"""Dtypes of ids."""
LINEAR = ("sum", "avg")
"""Reductions that every linear function commutes with."""
ELEMENTWISE = ("sum", "avg", "max", "min", "product")
"""Reductions that a selection of elements commutes with: all of them."""


# -------------------------------------------------------------------------------------------------------------- lookup
def lookup_rules(op: object, args: tuple[object, ...], kwargs: dict[str, object]) -> list[list[Placement | None]]:
    """Return the rules of a lookup on one mesh dim, each as result, weight ``[V, D]``, indices ``[...]``."""
    ndim = _ndim(args[1])
    rules: list[list[Placement | None]] = [
        [Shard(ndim), Shard(1), Replicate()],
        [Partial("sum"), Shard(0), Replicate()],
    ]
    rules += [[Shard(dim), Replicate(), Shard(dim)] for dim in range(ndim)]
    rules += [[Partial(kind), Partial(kind), Replicate()] for kind in ELEMENTWISE]
    return rules


def lookup(view: RankView, weight: torch.Tensor, indices: torch.Tensor, *options: object) -> torch.Tensor:
    """Return the rank's local result ``[..., D]`` of a lookup: 0 for the ids of rows that the rank does not have.

    Raises
    ------
    IndexError
        If an id is no row of the global table, on every rank that has the id.
    """
    if has_all_rows(view):
        return cast(torch.Tensor, aten.embedding.default(weight, indices, *options))
    indices = comparable_ids(indices, view.shapes[0][0])
    check_ids(indices, view.shapes[0][0])
    start, stop = view.bounds(0, 0)
    if start == stop:  # the local kernel refuses a table without rows
        return weight.new_zeros(*indices.shape, weight.shape[1])
    own, foreign = owned_ids(indices, start, stop)
    # padding_idx and the other options concern only the backward, which is a separate op
    result = cast(torch.Tensor, aten.embedding.default(weight, own))
    return result.masked_fill_(foreign.unsqueeze(-1), 0)


def has_all_rows(view: RankView) -> bool:
    """Return whether the rank has all rows of the table, so that the plain op is right for it."""
    return not view.cuts(0, 0) or not view.shapes[0][0]


def check_ids_dtype(args: tuple[object, ...]) -> None:
    """Check that the ids are integers, on every rank, also on a rank without rows to look up.

    Raises
    ------
    RuntimeError
        If the ids are not integers.
    """
    indices = args[1]
    if isinstance(indices, torch.Tensor) and indices.dtype not in ID_DTYPES:
        raise RuntimeError(f"indices have to be of {ID_DTYPES[0]} or {ID_DTYPES[1]}, got {indices.dtype}")


def refuse_sparse_gradient(args: tuple[object, ...]) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments of a lookup with ``sparse=True`` unchanged, if no gradient will be needed.

    Raises
    ------
    NotImplementedError
        If a gradient will be needed, on every rank. DTensor alone would fail later, at some op of the backward.
    """
    if has_gradient(args[0]):
        raise NotImplementedError("a sparse gradient of aten.embedding is not supported: DTensor has no sparse layout")
    return args, {}


def has_gradient(weight: object) -> bool:
    """Return whether a gradient of ``weight`` will be needed."""
    return isinstance(weight, torch.Tensor) and weight.requires_grad and torch.is_grad_enabled()


LOOKUP = ShardedOp(
    aten.embedding.default,
    lookup_rules,
    lookup,
    check=check_ids_dtype,
    flag=4,  # sparse
    before=refuse_sparse_gradient,
    as_it_is=has_all_rows,
)


# ------------------------------------------------------------------------------------------------------------ gradient
def gradient_rules(op: object, args: tuple[object, ...], kwargs: dict[str, object]) -> list[list[Placement | None]]:
    """Return the rules of the gradient on one mesh dim, each as result ``[V, D]``, gradient ``[..., D]``, indices.

    There is no rule for gradients scaled by frequency, because ranks need the ids of each other. DTensor calls
    :func:`share_frequencies` before.
    """
    ndim = _ndim(args[1])
    rules: list[list[Placement | None]] = [[Shard(1), Shard(ndim), Replicate()]]
    if not _scaled(args):
        rules += [[Partial("sum"), Shard(dim), Shard(dim)] for dim in range(ndim)]
    rules += [[Partial(kind), Partial(kind), Replicate()] for kind in LINEAR]
    return rules


def gradient(
    view: RankView,
    grad_output: torch.Tensor,
    indices: torch.Tensor,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the rank's local gradient of the table.

    Parameters
    ----------
    counts
        How often all ranks together look up each row ``[V]``. If None, ``indices`` are all ids of all ranks, and
        ``scale_grad_by_freq`` says whether gradients are divided by counts.
    """
    if scale_grad_by_freq:
        counts = count_ids(indices, num_weights)
    if counts is not None and num_weights:
        # an id out of range has no count; the kernel drops it
        frequency = counts[indices.clamp(0, num_weights - 1).long()]
        grad_output = divided_by_counts(grad_output, frequency.unsqueeze(-1))
    result = aten.embedding_dense_backward.default(grad_output, indices, num_weights, padding_idx, False)
    return cast(torch.Tensor, result)


def share_frequencies(args: tuple[object, ...]) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments of a scaled gradient with the frequencies instead of the flag.

    With the frequencies the gradient can be sharded like any other.
    """
    grad_output, indices, num_weights, padding_idx, *_ = args
    if not isinstance(indices, DTensor):
        return args, {}
    assert isinstance(num_weights, int)
    indices, counts = share_ids_and_counts(indices, num_weights)
    return (grad_output, indices, num_weights, padding_idx, False), {"counts": counts}


def share_ids_and_counts(indices: DTensor, rows: int) -> tuple[DTensor, torch.Tensor]:
    """Return the indices, perhaps gathered, and how often all ranks together look up each row ``[rows]``.

    Each mesh dim that shards the indices takes one collective, of ids or of counts, whichever moves fewer bytes: an
    all-gather moves each id once, an all-reduce moves each count twice.
    """
    mesh = indices.device_mesh
    gather = indices.numel() * indices.element_size() <= 2 * rows * COUNT_BYTES
    kept = [p if isinstance(p, Shard) and not gather else Replicate() for p in indices.placements]
    indices = indices.redistribute(placements=kept)
    parts = [Replicate() if p.is_replicate() else Partial("sum") for p in kept]
    counts = DTensor.from_local(count_ids(indices.to_local(), rows), mesh, parts, run_check=False)
    return indices, counts.redistribute(placements=[Replicate()] * mesh.ndim).to_local()


GRADIENT = ShardedOp(
    aten.embedding_dense_backward.default,
    gradient_rules,
    gradient,
    static_argnum=2,
    flag=4,  # scale_grad_by_freq
    before=share_frequencies,
    as_it_is=lambda view: True,  # without counts
)


def divided_by_counts(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return ``values`` divided by ``counts``, in the dtype of ``values``; a count of 0 is replaced by 1.

    16-bit dtypes are divided in float32, because float16 ends at 65504 and a count could become infinite.
    """
    wide = torch.promote_types(values.dtype, torch.float32)
    return (values.to(wide) / counts.clamp(min=1)).to(values.dtype)


# ----------------------------------------------------------------------------------------------------------------- ids
def check_ids(indices: torch.Tensor, rows: int) -> None:
    """Check that all ids are rows of a table of ``rows`` rows.

    Raises
    ------
    IndexError
        If an id is no row. On a GPU a device assertion fails instead, as in the plain op, and in a compiled graph an
        assertion of the graph.
    """
    compiling = torch.compiler.is_compiling() or is_fake(indices)
    if not compiling and not indices.numel():
        return
    if compiling or indices.device.type != "cpu":
        ids = comparable_ids(indices, rows)
        torch._assert_async(((ids >= 0) & (ids < rows)).all(), "index out of range in self")
        return
    smallest, largest = (int(end) for end in torch.aminmax(indices))
    if smallest < 0 or largest >= rows:
        found = f"ids from {smallest} to {largest}"
        raise IndexError(f"index out of range in self: {found} in a table of {rows} rows")


def comparable_ids(indices: torch.Tensor, rows: int) -> torch.Tensor:
    """Return ids that can be compared with each of ``rows`` rows: int64 if int32 cannot count the rows."""
    return indices.long() if rows > torch.iinfo(torch.int32).max else indices


def owned_ids(indices: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids minus ``start``, with 0 for ids outside ``[start, stop)``, and the mask of the ids outside."""
    foreign = (indices < start) | (indices >= stop)
    return (indices - start).masked_fill_(foreign, 0), foreign


def count_ids(indices: torch.Tensor, rows: int) -> torch.Tensor:
    """Return how often each of ``rows`` rows occurs ``[rows]``; ids out of range are not counted."""
    ids = indices.flatten().long()
    ids = torch.where((ids >= 0) & (ids < rows), ids, rows)
    counts = torch.zeros(rows + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, ids, torch.ones_like(ids))[:rows]


def _ndim(tensor: object) -> int:
    return len(tensor.shape)  # type: ignore[attr-defined]


def _scaled(args: tuple[object, ...]) -> bool:
    return bool(args[4])
