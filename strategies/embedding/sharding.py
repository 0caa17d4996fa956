"""Our own sharding strategy of ``aten.embedding`` and its backward: rules, and the kernels that they hold for.

A row-wise lookup is a plain ``Partial``: each rank looks up the ids of its own rows and leaves 0 for all others. The
masked partial of torch keeps the mask in the placement instead, from where the first reduction removes it; here there
is nothing to keep, so the result may be used by any op, any number of times. Rules are for one mesh dim, and DTensor
takes their products; the kernel knows how all mesh dims together cut the rows, so any of them may, and several at once.
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
"""Size of a count, an int64."""
ID_DTYPES = (torch.int64, torch.int32)
"""What ids may be of."""
LINEAR = ("sum", "avg")
"""Reductions that every linear function of the parts commutes with."""
ELEMENTWISE = ("sum", "avg", "max", "min", "product")
"""Reductions that a choice among elements commutes with: all of them."""


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
    """Return the rank's part ``[..., D]`` of a lookup: 0 for the ids of rows that it does not have.

    Raises
    ------
    IndexError
        If an id is no row of the whole table, on every rank that has the id.
    """
    if has_all_rows(view):
        return cast(torch.Tensor, aten.embedding.default(weight, indices, *options))
    indices = comparable_ids(indices, view.shapes[0][0])
    check_ids(indices, view.shapes[0][0])
    start, stop = view.bounds(0, 0)
    if start == stop:  # the local kernel refuses a table without rows
        return weight.new_zeros(*indices.shape, weight.shape[1])
    own, foreign = owned_ids(indices, start, stop)
    # what padding_idx and the other options say concerns the backward, which is an op of its own
    result = cast(torch.Tensor, aten.embedding.default(weight, own))
    return result.masked_fill_(foreign.unsqueeze(-1), 0)


def has_all_rows(view: RankView) -> bool:
    """Return whether the rank has all rows of the table, so that it looks up as without any sharding."""
    return not view.cuts(0, 0) or not view.shapes[0][0]


def check_ids_dtype(args: tuple[object, ...]) -> None:
    """Check that the ids are integers, on every rank, also on one that has no row to look up.

    Raises
    ------
    RuntimeError
        If they are not.
    """
    indices = args[1]
    if isinstance(indices, torch.Tensor) and indices.dtype not in ID_DTYPES:
        raise RuntimeError(f"indices have to be of {ID_DTYPES[0]} or {ID_DTYPES[1]}, got {indices.dtype}")


def refuse_sparse_gradient(args: tuple[object, ...]) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments of a lookup with ``sparse=True`` as they are, if no gradient will be asked for.

    Raises
    ------
    NotImplementedError
        If one will, on every rank, where DTensor would fail at one op or another of the backward.
    """
    if has_gradient(args[0]):
        raise NotImplementedError("a sparse gradient of aten.embedding is not supported: DTensor has no sparse layout")
    return args, {}


def has_gradient(weight: object) -> bool:
    """Return whether a gradient of ``weight`` will be asked for."""
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

    Where gradients are scaled by frequency, ranks that have different ids cannot do without each other, so there is
    no rule for that; :func:`share_frequencies` comes before it.
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
    """Return the rank's part of the gradient of the table.

    Parameters
    ----------
    counts
        How often each row is looked up by all ranks together ``[V]``; by default ``indices`` are all that there are,
        and the flag says whether it matters.
    """
    if scale_grad_by_freq:
        counts = count_ids(indices, num_weights)
    if counts is not None and num_weights:
        # an id out of range has no row to scale, and the kernel drops it
        frequency = counts[indices.clamp(0, num_weights - 1).long()]
        grad_output = divided_by_counts(grad_output, frequency.unsqueeze(-1))
    result = aten.embedding_dense_backward.default(grad_output, indices, num_weights, padding_idx, False)
    return cast(torch.Tensor, result)


def share_frequencies(args: tuple[object, ...]) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments of a scaled gradient without the flag, and the frequencies instead.

    With them the gradient may be cut like any other.
    """
    grad_output, indices, num_weights, padding_idx, *_ = args
    if not isinstance(indices, DTensor):
        return args, {}
    assert isinstance(num_weights, int)
    indices, counts = share_ids_and_counts(indices, num_weights)
    return (grad_output, indices, num_weights, padding_idx, False), {"counts": counts}


def share_ids_and_counts(indices: DTensor, rows: int) -> tuple[DTensor, torch.Tensor]:
    """Return the indices, perhaps gathered, and how often all ranks together look up each row ``[rows]``.

    Where the indices are cut that takes one collective for each mesh dim, of ids or of counts, whichever moves less: an
    all-gather moves each id once, an all-reduce each count twice.
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
    """Return ``values`` divided by ``counts``, of the dtype of ``values``; a count of 0 is taken for 1.

    Not in dtypes of 16 bits, in which a count may be infinite: float16 ends at 65504.
    """
    wide = torch.promote_types(values.dtype, torch.float32)
    return (values.to(wide) / counts.clamp(min=1)).to(values.dtype)


# ----------------------------------------------------------------------------------------------------------------- ids
def check_ids(indices: torch.Tensor, rows: int) -> None:
    """Check that all ids are rows of a table of ``rows`` rows.

    Raises
    ------
    IndexError
        If one is not; on a GPU an assertion there fails instead, as with the op on whole tensors, and in a compiled
        graph one in the graph.
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
    """Return ids that can be compared with each of ``rows`` rows: int64, where the table has more than int32 counts."""
    return indices.long() if rows > torch.iinfo(torch.int32).max else indices


def owned_ids(indices: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids counted from row ``start``, with 0 for those not in ``[start, stop)``, and a mask of these."""
    foreign = (indices < start) | (indices >= stop)
    return (indices - start).masked_fill_(foreign, 0), foreign


def count_ids(indices: torch.Tensor, rows: int) -> torch.Tensor:
    """Return how often each of ``rows`` rows occurs ``[rows]``; ids out of range count for none."""
    ids = indices.flatten().long()
    ids = torch.where((ids >= 0) & (ids < rows), ids, rows)
    counts = torch.zeros(rows + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, ids, torch.ones_like(ids))[:rows]


def _ndim(tensor: object) -> int:
    return len(tensor.shape)  # type: ignore[attr-defined]


def _scaled(args: tuple[object, ...]) -> bool:
    return bool(args[4])
