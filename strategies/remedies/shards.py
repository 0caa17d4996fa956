"""Remedies that veto a rule because of the shards that some rank would get."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from strategies.remedies.placing import VALUES, has_uneven_shards, is_sharded, local_shapes, shard_dims
from verifier.execution.remedies import Remedy
from verifier.torch_internals.amending.propagation import Decision, Placed, refused_first, replicated_first, vetoed
from verifier.torch_internals.amending.registrations import unsized_results_refused
from verifier.torch_internals.amending.watching import locals_measured

__all__ = ["REMEDIES"]

_PICKING = ("aten.gather.*", "aten.scatter_add.*", "aten.scatter_add_.*")
_SIZED_BY_VALUES = (
    *("aten.nonzero.default", "aten.bincount.default", "aten.masked_select.default", "aten.repeat_interleave.Tensor"),
    *(
        "aten._unique.default",
        "aten._unique2.default",
        "aten.unique_consecutive.default",
        "aten.unique_dim.default",
        "aten._ctc_loss.*",
        "aten.linalg_lstsq.default",
    ),
    *("aten.argwhere.default", "aten.nonzero_numpy.default", "aten.where.default"),
)
"""Overloads with the tag ``dynamic_output_shape`` that fail on fake tensors whatever they get, and composite ones that
call them.
"""


@contextmanager
def _sizes_decided_by_no_values() -> Iterator[None]:
    first = refused_first(
        ("aten.index.Tensor", *_SIZED_BY_VALUES),
        lambda one: one.op != "aten.index.Tensor" or bool(_masks(one)),
        "takes no values that decide about a size",
    )
    with first, unsized_results_refused():
        yield


def _leaves_a_rank_empty(decision: Decision) -> bool:
    """Return whether some rank gets nothing of a dim that has elements; other dims of the tensor may have none."""
    return any(
        size == 0 < whole
        for one in decision.inputs
        if is_sharded(one)
        for shape in local_shapes(one.shape, one.placements, one.mesh_shape)
        for size, whole in zip(shape, one.shape, strict=True)
    )


def _splits_blocks(decision: Decision) -> bool:
    """Return whether some rank's channels, height or width are no multiple of what the op divides them by.

    What the op multiplies may not be sharded unevenly either, because the result is cut in another way.
    """
    tensor, factor = decision.args[0], decision.args[1]
    *_, channels, height, width = range(len(tensor.shape)) if len(tensor.shape) > 2 else (0, 0, 1, 2)
    shapes = list(local_shapes(tensor.shape, tensor.placements, decision.mesh_shape))
    match decision.op.split(".")[1]:
        case "pixel_shuffle":
            blocks = {channels: factor * factor}
            if has_uneven_shards(decision):
                return True
        case "pixel_unshuffle":
            blocks = {height: factor, width: factor}
            if len({shape[channels] for shape in shapes}) > 1:
                return True
        case _:
            blocks = {1: factor}
    return any(shape[dim] % block for shape in shapes for dim, block in blocks.items() if dim < len(shape))


def _cuts_rows_of_images(decision: Decision) -> bool:
    """Return whether dim 1 of a tensor without batch is sharded, which is the height."""
    return any(len(one.shape) == 3 and 1 in shard_dims(one.placements) for one in decision.inputs)


def _shrinks_to_one(decision: Decision) -> bool:
    """Return whether a rank's shard has size 1 where the tensor has not."""
    (tensor,) = decision.inputs
    shapes = local_shapes(tensor.shape, tensor.placements, decision.mesh_shape)
    return any(size == 1 != whole for shape in shapes for size, whole in zip(shape, tensor.shape, strict=True))


def _masks(decision: Decision) -> list[Placed]:
    indices = decision.args[1]
    return [one for one in indices if isinstance(one, Placed) and one.dtype in (torch.bool, torch.uint8)]


def _cuts_a_mask(decision: Decision) -> bool:
    return any(map(is_sharded, _masks(decision)))


def _cuts_under_a_mask(decision: Decision) -> bool:
    """Return whether a mask of several dims selects in a tensor, or values go to one, that is sharded."""
    several = any(len(mask.shape) > 1 for mask in _masks(decision))
    return several and (is_sharded(decision.args[0]) or is_sharded(decision.argument(2, "values")))


def _cuts_apart(decision: Decision) -> bool:
    """Return whether tensors of unequal sizes are sharded along one dim, so that elements no longer meet."""
    sizes: dict[int, set[int]] = defaultdict(set)
    for one in decision.inputs:
        for dim in shard_dims(one.placements):
            sizes[dim].add(one.shape[dim])
    return any(len(found) > 1 for found in sizes.values())


def _batches_differ(decision: Decision) -> bool:
    """Return whether operands with batch dims of their own are not sharded in the same way."""
    sharded = [one for one in decision.inputs if is_sharded(one)]
    return bool(sharded) and len({(len(one.shape), one.placements) for one in decision.inputs}) > 1


def _lacks_the_dim(decision: Decision) -> bool:
    """Return whether a tensor is sharded along a dim that another one does not have.

    The other one would be sharded in the same way. What that costs cannot be told either, if it is sharded already.
    """
    least = min((len(one.shape) for one in decision.inputs), default=0)
    return any(dim >= least for one in decision.inputs for dim in shard_dims(one.placements))


_WRITING = ("aten.index_put*", "aten._index_put_impl_.*", "aten._unsafe_index_put.*")
REMEDIES = (
    Remedy(
        "empty-shards",
        "claim no shard of a tensor dim that leaves a rank empty, for ops whose local kernel refuses empty tensors",
        lambda: vetoed(("aten.*", "prims.*"), _leaves_a_rank_empty),
        verdicts=frozenset({"CRASH", "DIED"}),
    ),
    Remedy(
        "dropout-of-empty-shards",
        "claim no shard for native_dropout that leaves a rank empty: for an empty tensor the CPU kernel makes a "
        "mask of the input's dtype",
        lambda: vetoed(("aten.native_dropout.*",), _leaves_a_rank_empty),
        ("aten.native_dropout.*",),
        frozenset({"WRONG_DTYPE", "CRASH"}),
    ),
    Remedy(
        "sums-of-nothing",
        "claim no shard for addmv that leaves a rank empty: where there is nothing to multiply, the local kernel does "
        "not broadcast the tensor that is added",
        lambda: vetoed(("aten.addmv.*", "aten.addmv_.*"), _leaves_a_rank_empty),
        ("aten.addmv*",),
        frozenset({"WRONG_SHAPE", "CRASH"}),
    ),
    Remedy(
        "blocks-of-pixels",
        "claim a shard for pixel_shuffle, pixel_unshuffle and channel_shuffle only if the size of every rank's shard "
        "is a multiple of what the op divides it by",
        lambda: vetoed(("aten.pixel_shuffle.*", "aten.pixel_unshuffle.*", "aten.channel_shuffle.*"), _splits_blocks),
        ("aten.pixel_shuffle.*", "aten.pixel_unshuffle.*", "aten.channel_shuffle.*"),
        frozenset({"CRASH", "WRONG_SHAPE", "WRONG_VALUE"}),
    ),
    Remedy(
        "images-without-batch",
        "count the channels of _adaptive_avg_pool2d_backward from the end, so that an image without batch is not cut "
        "along its height",
        lambda: vetoed(("aten._adaptive_avg_pool2d_backward.*",), _cuts_rows_of_images),
        ("aten._adaptive_avg_pool2d*",),
        VALUES,
    ),
    Remedy(
        "masks-of-several-dims",
        "count a mask of several dims as an index of each of them in index_put_single_dim_strategy "
        "(_ops/_tensor_ops.py)",
        lambda: vetoed(_WRITING, _cuts_under_a_mask),
        _WRITING,
    ),
    Remedy(
        "shards-of-dims-that-lack",
        "leave a tensor of one dim without elements replicated in cat, which takes it beside tensors of more dims "
        "(cat_strategy in _ops/_tensor_ops.py)",
        lambda: replicated_first(("aten.cat.*",), _lacks_the_dim),
        ("aten.cat.*",),
        frozenset({"CRASH"}),
    ),
    Remedy(
        "squeeze-copy-of-shards",
        "rewrite squeeze_copy as squeeze is, so that only dims of global size 1 go (squeeze_op_to_dims_variant in "
        "_sharding_prop.py)",
        lambda: vetoed(("aten.squeeze_copy.*",), _shrinks_to_one),
        ("aten.squeeze_copy.*",),
    ),
    Remedy(
        "masks-as-indices",
        "do not shard an index that is a mask (index_single_dim_strategy in _ops/_tensor_ops.py)",
        lambda: vetoed(("aten.index.Tensor", "aten.index.Tensor_out"), _cuts_a_mask),
        ("aten.index.*",),
        refuses=True,
    ),
    Remedy(
        "masks-without-a-size",
        "refuse an index that is a mask, and ops such as nonzero, because the size of the result depends on values "
        "(ShardingPropagator._propagate_tensor_meta_non_cached in _sharding_prop.py)",
        _sizes_decided_by_no_values,
        ("aten.index.Tensor", "aten.embedding_backward.*", "aten.embedding.*", *_SIZED_BY_VALUES),
        frozenset({"CRASH"}),
        refuses=True,
        beside_rules=True,
    ),
    Remedy(
        "indices-cut-apart",
        "shard tensor, index and source along a dim only if all have the same size there (gather_strategy and "
        "scatter_add_strategy in _ops/_tensor_ops.py)",
        lambda: vetoed(_PICKING, _cuts_apart),
        _PICKING,
        VALUES | {"CRASH"},
    ),
    Remedy(
        "crosses-cut-apart",
        "shard both tensors of linalg_cross along a dim only if they have the same size there, because a size of 1 is "
        "broadcast (linalg_cross_strategy in _ops/_math_ops.py)",
        lambda: vetoed(("aten.linalg_cross.*",), _cuts_apart),
        ("aten.linalg_cross.*",),
        VALUES | {"WRONG_SHAPE", "CRASH"},
    ),
    Remedy(
        "shapes-that-are-unequal",
        "replicate both tensors in equal_strategy if their shapes differ (_ops/_tensor_ops.py)",
        lambda: replicated_first(("aten.equal.default",), lambda one: len({x.shape for x in one.inputs}) > 1),
        ("aten.equal.default",),
    ),
    Remedy(
        "batches-of-solvers",
        "shard a batch dim of a linear system only if both operands have it, counted from the end "
        "(linalg_batch_dim_strategy in _ops/_math_ops.py)",
        lambda: vetoed(("aten.linalg_ldl_solve.*", "aten.linalg_solve_triangular.*"), _batches_differ),
        ("aten.linalg_ldl_solve.*", "aten.linalg_solve_triangular.*"),
    ),
    Remedy(
        "shapes-of-local-maps",
        "ask all ranks for the sizes of their local tensors in local_map and in the parallel styles, instead of taking "
        "all for equal (_local_map_wrapped in experimental/_func_map.py, _prepare_input_fn in parallel/style.py)",
        locals_measured,
        ("composite.local_function", "composite.parallel_style"),
    ),
)
