"""Remedies for the rules of views and of their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from strategies.remedies.placing import VALUES, is_partial, local_shapes, shard_dims
from verifier.execution.remedies import Remedy
from verifier.placements.algebra import coordinates, take_local
from verifier.torch_internals.amending.distributing import strides_of_kernels
from verifier.torch_internals.amending.propagation import Decision, normalised, refused_first, replicated_first, vetoed
from verifier.torch_internals.amending.registrations import empty_views_replicated, lost_strides_refused
from verifier.torch_internals.placements import Placements

__all__ = ["REMEDIES"]

_VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.view_copy.default", "aten.reshape.default")
_PIECES = ("aten.unbind_copy.int", "aten.unsafe_split.Tensor")
_INSERTING = ("aten.select_backward.default",)
_SLICING = ("aten.slice_backward.default",)


def _sizes_do_not_fit(decision: Decision) -> bool:
    """Return whether the local shape that is promised has another number of elements than the local tensor."""
    tensor, sizes, placements = decision.args[0], list(decision.args[1]), decision.outputs[0]
    if placements is None or 0 in tensor.shape:
        return False
    if -1 in sizes:
        sizes[sizes.index(-1)] = math.prod(tensor.shape) // -math.prod(sizes)
    before = local_shapes(tensor.shape, tensor.placements, decision.mesh_shape)
    after = local_shapes(sizes, placements, decision.mesh_shape)
    return any(math.prod(one) != math.prod(other) for one, other in zip(before, after, strict=True))


def _mixes_strides(decision: Decision) -> bool:
    """Return whether some rank's elements of a strided shard are not those that the placements of the view promise."""
    tensor, sizes, placements = decision.args[0], list(decision.args[1]), decision.outputs[0]
    if placements is None or 0 in tensor.shape or not any(hasattr(one, "split_factor") for one in tensor.placements):
        return False
    whole = torch.arange(math.prod(tensor.shape))
    pairs = (whole.view(tensor.shape), tensor.placements), (whole.view(sizes), placements)
    return any(
        before.tolist() != after.tolist()
        for before, after in zip(*(_cut(value, cuts, decision.mesh_shape) for value, cuts in pairs), strict=True)
    )


def _cut(value: torch.Tensor, placements: Placements, mesh_shape: Sequence[int]) -> Iterator[torch.Tensor]:
    """Yield the elements of each rank in order, whatever is pending."""
    shards = tuple(Replicate() if placement.is_partial() else placement for placement in placements)
    for coordinate in coordinates(mesh_shape):
        yield take_local(value, shards, mesh_shape, coordinate, 0).flatten()


def _expands_a_shard(decision: Decision) -> bool:
    """Return whether a sharded dim of size 1 is expanded."""
    tensor, sizes = decision.args[0], decision.args[1]
    new = len(sizes) - len(tensor.shape)
    return any(tensor.shape[dim] == 1 and sizes[new + dim] not in (1, -1) for dim in shard_dims(tensor.placements))


def _reinterprets_parts(decision: Decision) -> bool:
    """Return whether elements that are viewed as another dtype are parts of a reduction, or lie on several ranks."""
    (tensor,) = decision.inputs
    return is_partial(tensor) or len(tensor.shape) - 1 in shard_dims(tensor.placements)


def _dim_of_sizes(op: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the arguments of a gradient of select or slice with the dim counted from the front."""
    return (*args[:2], args[2] + len(args[1]), *args[3:]) if args[2] < 0 else None


def _split_size(decision: Decision) -> int:
    """Return the size of the dim that a call splits."""
    position = 1 if decision.op.startswith("aten.unbind") else 2
    dim = decision.argument(position, "dim", 0)
    return int(decision.args[0].shape[dim])


def _makes_one_piece(decision: Decision) -> bool:
    """Return whether a list of results has one tensor alone."""
    pieces = 1 if decision.op.startswith("aten.unbind") else decision.args[1]
    return isinstance(pieces, int) and _split_size(decision) <= pieces


def _has_no_elements(decision: Decision) -> bool:
    return any(0 in one.shape for one in decision.inputs)


REMEDIES = (
    Remedy(
        "views-of-empty-tensors",
        "replicate a tensor without elements before it is viewed in another shape: view_groups divides by sizes, or "
        "multiplies zeros for ever (_ops/_view_ops.py)",
        empty_views_replicated,
        verdicts=frozenset({"CRASH", "HANG"}),
        refuses=True,
    ),
    Remedy(
        "strides-lost-in-views",
        "say that a view is not supported where the dim of a strided shard is flattened and is not the first of its "
        "group (_ViewShardingPropagator._rewrite_strided_shard in _ops/_view_ops.py)",
        lost_strides_refused,
        verdicts=frozenset({"CRASH"}),
        refuses=True,
    ),
    Remedy(
        "strides-mixed-up-in-views",
        "redistribute a strided shard before a view whose placements do not promise the elements that each rank has "
        "(_ViewShardingPropagator in _ops/_view_ops.py)",
        lambda: vetoed(_VIEWS, _mixes_strides),
        (*_VIEWS, "chain.*", "composite.*"),
        VALUES,
        refuses=True,
    ),
    Remedy(
        "squeeze-of-empty-tensors",
        "keep dims of size 0 in dim_squeeze, which keeps those of more than one element (_ops/_view_ops.py)",
        lambda: replicated_first(("aten.squeeze.*", "aten.squeeze_.*"), _has_no_elements),
        ("aten.squeeze.*", "aten.squeeze_.*"),
    ),
    Remedy(
        "lists-of-one-tensor",
        "make a list of specs for a list of one tensor in unsafe_split and unbind_copy, whose rules name one placement "
        "for all pieces (ShardingPropagator._wrap_output_spec_tensor_meta in _sharding_prop.py)",
        lambda: refused_first(_PIECES, _makes_one_piece, "makes no list of one tensor"),
        _PIECES,
        frozenset({"CRASH"}),
        refuses=True,
    ),
    Remedy(
        "splits-of-empty-dims",
        "take a dim of size 0 for one piece of size 0 in split_strategy (_ops/_tensor_ops.py)",
        lambda: refused_first(("aten.split.Tensor",), lambda one: _split_size(one) == 0, "splits no dim of size 0"),
        ("aten.split.Tensor",),
        frozenset({"CRASH"}),
        refuses=True,
    ),
    Remedy(
        "local-sizes-of-views",
        "redistribute before a view if the local sizes of its result do not fit every rank's local tensor "
        "(_ops/_view_ops.py, and _adjust_shape_and_stride_args in _sharding_prop.py)",
        lambda: vetoed(_VIEWS, _sizes_do_not_fit),
        (*_VIEWS, "aten.max_unpool*", "aten._embedding_bag*"),
        frozenset({"CRASH", "WRONG_VALUE", "WRONG_SHAPE"}),
        refuses=True,
    ),
    Remedy(
        "views-as-another-dtype",
        "replicate a tensor that is Partial or sharded in its last dim before it is viewed as another dtype "
        "(propagate_single_input_strategy in _ops/_tensor_ops.py)",
        lambda: replicated_first(("aten.view.dtype",), _reinterprets_parts),
        ("aten.view.dtype",),
    ),
    Remedy(
        "expanded-shards",
        "redistribute a sharded dim of size 1 before it is expanded (_ops/_view_ops.py)",
        lambda: replicated_first(("aten.expand.default", "aten.expand_copy.default"), _expands_a_shard),
        ("aten.expand*", "aten.sum.dim_IntList", "aten.mean.dim", "chain.*", "composite.*"),
        frozenset({"CRASH"}),
        refuses=True,  # a view in the same backward pass may then need a redistribution
    ),
    Remedy(
        "negative-dim-of-select-backward",
        "normalise the dim that shift_shard_dims_after_insert is given (_ops/_tensor_ops.py)",
        lambda: normalised(_INSERTING, _dim_of_sizes),
        (*_INSERTING, "aten.select.*"),
    ),
    Remedy(
        "negative-dim-of-slice-backward",
        "normalise the dim in slice_backward_rules (_ops/_tensor_ops.py)",
        lambda: normalised(_SLICING, _dim_of_sizes),
        (*_SLICING, "aten.slice.*"),
    ),
    Remedy(
        "strides-of-kernels",
        "tell in the functions for fake tensors the strides that the CPU kernels return, of pow, log_sigmoid and batch "
        "norm, and of the gradients of log_softmax, layer_norm, elu, dropout and losses",
        strides_of_kernels,
        (
            *("aten.pow.Scalar", "aten.log_sigmoid_forward.*", "aten.native_batch_norm*", "aten._log_softmax*"),
            *("aten.native_layer_norm*", "aten.native_dropout*", "aten.elu*", "aten.mse_loss*"),
            "aten.binary_cross_entropy.*",
        ),
        frozenset({"CRASH"}) | VALUES,
    ),
)
