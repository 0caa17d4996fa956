"""Our own sharding strategy of ``aten._embedding_bag`` and its backwards, which DTensor refuses in torch 2.13.0.

DTensor calls these functions instead of the ops, with DTensors, below autograd. They turn offsets into spans, which can
be sharded. They share what all ranks must know: the counts of bags and, if a gradient will be needed, the maximum. The
ops of :mod:`strategies.embedding_bag.ops` and DTensor do the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.distributed import as_dtensors
from strategies.embedding.sharding import (
    ID_DTYPES,
    check_ids,
    divided_by_counts,
    has_gradient,
    share_ids_and_counts,
)
from strategies.embedding_bag import ops as _ops  # defines the library
from verifier.placements.algebra import sharded_dim
from verifier.torch_internals.dtensors import is_fake, with_local

__all__ = ["HANDLERS"]

aten = torch.ops.aten
library: Any = torch.ops.sharded_rows
assert _ops.BAG_OPS

MODES = {0: "sum", 1: "mean", 2: "max"}
SUM, MEAN, MAX = MODES


# -------------------------------------------------------------------------------------------------------------- lookup
def lookup(
    op: object,
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[DTensor, DTensor, DTensor, DTensor]:
    """Return the pooled bags ``[B, D]``, the bag of each position, the counts of bags, and the winners under mode max.

    The last three are for the gradients; without gradients they are empty. They differ from the same results of aten.

    Raises
    ------
    RuntimeError
        If an argument other than the offsets is no DTensor, if the offsets descend or do not fit the indices, or if
        aten does not take a dtype. Every rank raises, also a rank that has nothing to look up.
    NotImplementedError
        If a sparse gradient is required: DTensor has no sparse layout.
    """
    samples = {} if per_sample_weights is None else {"per_sample_weights": per_sample_weights}
    weight, indices, *others = as_dtensors(op, weight=weight, indices=indices, **samples)
    per_sample_weights = others[0] if others else None
    if sparse and has_gradient(weight):
        raise NotImplementedError(f"{op}: sparse=True is not supported, DTensor has no sparse layout")
    indices = _with_id_dtype(op, indices, offsets)
    if per_sample_weights is not None and per_sample_weights.dtype != weight.dtype:
        dtypes = f"per_sample_weights of {per_sample_weights.dtype} and a weight of {weight.dtype}"
        raise RuntimeError(f"{op}: expected one dtype, got {dtypes}")
    mesh = weight.device_mesh
    trains = op is aten._embedding_bag.default
    spans = _Spans(indices, offsets, include_last_offset)
    starts, stops = spans.placed()
    nothing = _replicated(torch.empty(0, dtype=torch.int64, device=mesh.device_type), mesh)
    counts, winners = nothing, nothing
    if mode != SUM:
        counts = _counts(spans, indices, starts, stops, padding_idx)
    if mode != MAX:
        divisors = counts if mode == MEAN else None
        result = library.sum_bags(
            weight, indices, starts, stops, per_sample_weights, divisors, padding_idx, spans.aligned
        )
    else:
        ids = indices
        if trains:
            weight, ids = _reduced(weight), _replicated_everywhere(indices)
            check_ids(ids.to_local(), weight.shape[0])  # all ranks raise before a rank waits for another
        result = library.max_bags(weight, indices, starts, stops, counts, padding_idx, spans.aligned)
        if trains:
            result, winners = _with_winners(result, weight, ids, starts, stops, padding_idx)
    bags = _replicated(spans.bag_of_each_position(), mesh) if trains else nothing
    return result, bags, counts, winners


def _with_winners(
    result: DTensor, weight: DTensor, ids: DTensor, starts: DTensor, stops: DTensor, padding_idx: int
) -> tuple[DTensor, DTensor]:
    """Return the reduced maxima, and for each maximum the row at the first position that has it; -1 in an empty bag.

    ``ids`` are replicated.
    """
    result = _reduced(result)
    positions = _reduced(library.first_of_max(weight, ids, starts, stops, result, padding_idx))
    local, all_ids = positions.to_local(), ids.to_local().long()
    padded = torch.cat([all_ids, all_ids.new_full((1,), -1)])  # -1 for the position N
    return result, with_local(positions, padded[local])


def _counts(spans: _Spans, indices: DTensor, starts: DTensor, stops: DTensor, padding_idx: int) -> DTensor:
    if padding_idx >= 0:
        return _reduced(library.count(indices, starts, stops, padding_idx))
    return with_local(starts, stops.to_local() - starts.to_local())


# ----------------------------------------------------------------------------------------------------------- gradients
def weight_gradient(
    op: object,
    grad_output: DTensor,
    indices: DTensor,
    offsets: torch.Tensor,
    bags: DTensor,
    counts: DTensor,
    winners: DTensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: DTensor | None,
    padding_idx: int = -1,
) -> object:
    """Return the gradient of the table ``[num_weights, D]`` from the results of :func:`lookup`.

    Raises
    ------
    NotImplementedError
        If ``sparse``, because DTensor has no sparse layout, and as :func:`dense_weight_gradient`.
    """
    if sparse:
        raise NotImplementedError(f"{op}: sparse=True is not supported, DTensor has no sparse layout")
    return dense_weight_gradient(
        op,
        grad_output,
        indices,
        bags,
        counts,
        winners,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )


def dense_weight_gradient(
    op: object,
    grad_output: torch.Tensor,
    indices: torch.Tensor,
    bags: torch.Tensor,
    counts: torch.Tensor,
    winners: torch.Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: torch.Tensor | None,
    padding_idx: int = -1,
) -> object:
    """Return the gradient of the table ``[num_weights, D]`` from the results of :func:`lookup` or of the aten op.

    Mode max needs neither indices nor bags, because the winners are those of all ranks together. So sharded indices do
    not make the gradient Partial.

    Raises
    ------
    RuntimeError
        If an argument is no DTensor, or if shapes or dtypes do not fit each other. Every rank raises.
    NotImplementedError
        If there are per-sample weights in another mode than sum: only sum has rules for them.
    """
    samples = {} if per_sample_weights is None else {"per_sample_weights": per_sample_weights}
    grad_output, indices, bags, counts, winners, *others = as_dtensors(
        op, grad=grad_output, indices=indices, offset2bag=bags, bag_size=counts, maximum_indices=winners, **samples
    )
    _check_saved(op, grad_output, indices, bags, counts, winners, mode, others)
    if mode == MAX:
        winners, of_bags = _with_counts(_reduced(winners), counts)
        # for an empty bag aten returns row 0
        won = winners.to_local().long().masked_fill(of_bags == 0, -1)
        return library.max_gradient(grad_output, with_local(winners, won), num_weights)
    if mode == MEAN:
        grad_output, of_bags = _with_counts(grad_output, counts)
        # division by a positive number commutes with every reduction
        grad_output = with_local(grad_output, divided_by_counts(grad_output.to_local(), of_bags))
    factors = others[0] if others else None
    if scale_grad_by_freq:
        indices, frequency = share_ids_and_counts(indices, num_weights)
        local = indices.to_local()
        ones = torch.ones(local.shape, dtype=grad_output.dtype, device=local.device)
        scales = with_local(indices, divided_by_counts(ones, frequency[local.long()]))
        factors = scales if factors is None else factors * scales  # type: ignore[assignment]
    return library.weight_gradient(grad_output, indices, bags, factors, num_weights, padding_idx)


def _with_counts(tensor: DTensor, counts: DTensor) -> tuple[DTensor, torch.Tensor]:
    """Return ``tensor``, which has one row per bag, and the counts of this rank's bags, as a column.

    Strided shards become plain shards, because the counts ``[B]`` cannot have the same strided shards.
    """
    plain = [p if cut is None else Shard(cut) for p in tensor.placements for cut in [sharded_dim(p)]]
    tensor = _redistributed(tensor, plain)
    cuts = [p if p == Shard(0) else Replicate() for p in tensor.placements]
    return tensor, _redistributed(counts, cuts).to_local().unsqueeze(-1)


def _check_saved(
    op: object,
    grad_output: DTensor,
    indices: DTensor,
    bags: DTensor,
    counts: DTensor,
    winners: DTensor,
    mode: int,
    samples: Sequence[DTensor],
) -> None:
    """Check tensors that a caller may have made; aten reads past the end of some if they are too short."""
    if mode not in MODES:
        raise RuntimeError(f"{op}: mode has to be one of {MODES}, got {mode}")
    if samples and mode != SUM:
        raise NotImplementedError(f"{op}: per_sample_weights are not supported in mode {MODES[mode]}, only in mode sum")
    expected = (
        {"offset2bag": (bags, indices.shape)} if mode != MAX else {"maximum_indices": (winners, grad_output.shape)}
    )
    if mode != SUM:
        expected["bag_size"] = (counts, grad_output.shape[:1])
    for one in samples:
        expected["per_sample_weights"] = (one, indices.shape)
        if one.dtype != grad_output.dtype:
            dtypes = f"per_sample_weights of {one.dtype} and a gradient of {grad_output.dtype}"
            raise RuntimeError(f"{op}: expected one dtype, got {dtypes}")
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise RuntimeError(f"{op}: {name} has to be of shape {list(shape)}, got {list(tensor.shape)}")


def sample_gradient(
    op: object,
    grad_output: DTensor,
    weight: DTensor,
    indices: DTensor,
    offsets: torch.Tensor,
    bags: DTensor,
    mode: int,
    padding_idx: int = -1,
) -> object:
    """Return the gradient of the per-sample weights ``[N]``."""
    return library.sample_gradient(grad_output, weight, indices, bags, padding_idx)


def decompose(op: Any, *args: object, **kwargs: object) -> object:
    """Decompose ``aten.embedding_bag``, which inference mode passes to DTensor undecomposed."""
    return op.decompose(*args, **kwargs)


HANDLERS: dict[Any, Callable[..., object]] = {
    aten._embedding_bag.default: lookup,
    aten._embedding_bag_forward_only.default: lookup,
    aten._embedding_bag_backward.default: weight_gradient,
    aten._embedding_bag_dense_backward.default: dense_weight_gradient,
    aten._embedding_bag_per_sample_weights_backward.default: sample_gradient,
    aten.embedding_bag.default: decompose,
    aten.embedding_bag.padding_idx: decompose,
}
"""The ops for which DTensor calls a function of this module, with the op before its arguments."""


# --------------------------------------------------------------------------------------------------------------- spans
class _Spans:
    """The positions of each bag, known to every rank.

    Parameters
    ----------
    indices
        ``[N]``.
    offsets
        Where each bag starts ``[B]``, and where the last bag stops if ``include_last_offset``. Sharded offsets are
        gathered, because a rank's last bag stops where the first bag of the next rank starts. For 2-d indices
        ``torch.nn.functional.embedding_bag`` makes plain offsets.

    Attributes
    ----------
    aligned
        Whether indices and bags shard at the same positions, so that each rank has the positions of its own bags.
    """

    def __init__(self, indices: DTensor, offsets: torch.Tensor, include_last_offset: bool) -> None:
        mesh = self.mesh = indices.device_mesh
        self.positions = indices.shape[0]
        placements: tuple[Placement, ...] = (Replicate(),) * mesh.ndim
        if isinstance(offsets, DTensor):
            placements = offsets.placements
            shape = offsets.shape
            offsets = _replicated_everywhere(offsets).to_local()
            if mesh.get_coordinate() is None:  # a rank outside the mesh knows only the shape
                offsets = offsets.new_zeros(shape)
        self._check(offsets, include_last_offset)
        last = offsets.new_full((1,), self.positions)
        self.edges = (offsets if include_last_offset else torch.cat([offsets, last])).long()
        bags = self.edges.shape[0] - 1
        sizes = self.edges.diff()
        cut = tuple(p if p == Shard(0) else Replicate() for p in indices.placements)
        self.aligned = (
            any(p == Shard(0) for p in cut)
            and all(p.is_replicate() for p in placements)
            and bags > 0
            and bags % mesh.size() == 0
            and not is_fake(sizes)
            and bool((sizes * bags == self.positions).all())
        )
        self._placements = cut if self.aligned else [p if p == Shard(0) else Replicate() for p in placements]

    def _check(self, offsets: torch.Tensor, include_last_offset: bool) -> None:
        """Check the offsets as aten does, with the same outcome on every rank."""
        if offsets.ndim != 1:
            raise RuntimeError(f"offsets has to be a 1D tensor, got {offsets.ndim} dims")
        if include_last_offset and not offsets.shape[0]:
            raise RuntimeError("include_last_offset: number of offset should be at least 1")
        if not offsets.shape[0] or offsets.device.type != "cpu" or is_fake(offsets):
            return
        first, last = int(offsets[0]), int(offsets[-1])
        if first != 0:
            raise RuntimeError(f"offsets[0] has to be 0, got {first}")
        if last > self.positions:
            raise RuntimeError(f"offsets[-1] is {last}, there are {self.positions} indices")
        if bool((offsets.diff() < 0).any()):  # aten would read out of bounds
            raise RuntimeError(f"offsets have to ascend, got {offsets.tolist()}")

    def placed(self) -> tuple[DTensor, DTensor]:
        """Return start and stop of each bag ``[B]``, sharded like the indices if aligned, else like the offsets."""
        starts = _replicated(self.edges[:-1].contiguous(), self.mesh)
        stops = _replicated(self.edges[1:].contiguous(), self.mesh)
        return starts.redistribute(placements=self._placements), stops.redistribute(placements=self._placements)

    def bag_of_each_position(self) -> torch.Tensor:
        """Return the bag of each position ``[N]``; ``B`` for positions after the last bag."""
        positions = torch.arange(self.positions, device=self.edges.device)
        return torch.searchsorted(self.edges[1:].contiguous(), positions, right=True)


# ------------------------------------------------------------------------------------------------------------ DTensors
def _with_id_dtype(op: object, indices: DTensor, offsets: torch.Tensor) -> DTensor:
    """Return ``indices`` in the dtype that aten promotes indices and offsets to.

    The cast is on local tensors, because DTensor takes seconds to find a rule for a cast of strided shards on three
    mesh dims, even if the dtype stays the same.

    Raises
    ------
    RuntimeError
        If the promoted dtype is no dtype for ids.
    """
    dtype = torch.promote_types(indices.dtype, offsets.dtype)
    if dtype not in ID_DTYPES:
        expected = " or ".join(map(str, ID_DTYPES))
        got = f"indices of {indices.dtype} and offsets of {offsets.dtype}"
        raise RuntimeError(f"{op}: expected {expected}, got {got}")
    if indices.dtype == dtype:
        return indices
    indices = _reduced(indices)
    return with_local(indices, indices.to_local().to(dtype))


def _replicated(value: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _reduced(tensor: DTensor) -> DTensor:
    """Return ``tensor`` with Replicate instead of every Partial."""
    return _redistributed(tensor, [Replicate() if p.is_partial() else p for p in tensor.placements])


def _replicated_everywhere(tensor: DTensor) -> DTensor:
    return _redistributed(tensor, [Replicate()] * tensor.device_mesh.ndim)


def _redistributed(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    return tensor.redistribute(placements=placements)
