"""Remedies for the rules of fused attention and of scaled matrix products."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from strategies.remedies.placing import VALUES, is_sharded, local_shapes, shard_dims
from verifier.execution.remedies import Remedy
from verifier.torch_internals.amending.propagation import Decision, Placed, refused, vetoed
from verifier.torch_internals.amending.registrations import bias_of_cudnn_attention, cached_by

__all__ = ["REMEDIES"]

aten = torch.ops.aten

_CUDNN, _EFFICIENT = (f"aten._scaled_dot_product_{name}_attention" for name in ("cudnn", "efficient"))
_GROUPED = ("aten._scaled_dot_product_flash_attention*", f"{_CUDNN}*")
_SCALED_MM = ("aten._scaled_mm.*",)


def _separates_groups(decision: Decision) -> bool:
    """Return whether some rank's heads of the query are not those that its heads of key and value belong to."""
    query, key = decision.args[1:3] if "_backward" in decision.op else decision.args[:2]
    heads, kept = query.shape[1], key.shape[1]
    queries = local_shapes(query.shape, query.placements, decision.mesh_shape)
    keys = local_shapes(key.shape, key.placements, decision.mesh_shape)
    return any(one[1] * kept != other[1] * heads for one, other in zip(queries, keys, strict=True))


def _has_no_logsumexp(decision: Decision) -> bool:
    return not decision.args[4] and any(map(is_sharded, decision.inputs))


def _separates_tolerances(decision: Decision) -> bool:
    """Return whether matrices are sharded along a batch whose tolerances, given by keyword, are not."""
    tolerances = [decision.kwargs.get(name) for name in ("atol", "rtol")]
    whole = any(isinstance(one, Placed) and len(one.shape) > 0 and not is_sharded(one) for one in tolerances)
    return whole and is_sharded(decision.args[0])


# ------------------------------------------------------------------------------------------------------ scaled products
_BLOCK, _TILE_ROWS, _MX_BLOCK, _TILE_BLOCKS = 128, 128, 32, 4


def _separates_blocks(decision: Decision) -> bool:
    """Return whether some rank has a block without its scale, or a scale without its block."""
    first, second, scale_a, scale_b = decision.args[:4]
    return _differ(first, scale_a, (0, 1), decision.mesh_shape) or _differ(second, scale_b, (1, 0), decision.mesh_shape)


def _differ(matrix: Placed, scale: Placed, dims: tuple[int, int], mesh_shape: Sequence[int]) -> bool:
    """Return whether the shards of a matrix and of its scales differ; ``dims`` are the free and the inner dim."""
    if max((*scale.shape, 1)) == 1 or not shard_dims(matrix.placements):
        return False
    free, inner = dims
    shapes = local_shapes(matrix.shape, matrix.placements, mesh_shape)
    scales = local_shapes(scale.shape, scale.placements, mesh_shape)
    sizes = list(zip(shapes, scales, strict=True))
    if len(scale.shape) == 1:
        down, across = (-(-matrix.shape[dim] // size) for dim, size in ((free, _TILE_ROWS), (inner, _MX_BLOCK)))
        whole = -(-across // _TILE_BLOCKS) * _TILE_BLOCKS * _TILE_ROWS
        assert scale.shape[0] == down * whole
        return any(kept[0] * _TILE_ROWS != local[free] * whole for local, kept in sizes)
    for dim in dims:
        block = 1 if scale.shape[dim] == matrix.shape[dim] else _BLOCK
        if scale.shape[dim] > 1 and any(kept[dim] * block != local[dim] for local, kept in sizes):
            return True
    return False


# ----------------------------------------------------------------------------------------------------- grouped products
_GROUPED_MM = ("aten._grouped_mm.default",)


def _has_short_rows(decision: Decision) -> bool:
    """Return whether some rank has a shard of a matrix whose rows are no multiple of 16 bytes."""
    return any(
        local[-1] * matrix.dtype.itemsize % 16
        for matrix in decision.args[:2]
        if is_sharded(matrix)
        for local in local_shapes(matrix.shape, matrix.placements, decision.mesh_shape)
    )


REMEDIES = (
    Remedy(
        "tolerances-of-batches",
        "shard the tolerances of pinv with the batch of its matrices, or replicate both (_ops/_matrix_ops.py)",
        lambda: vetoed(("aten.linalg_pinv.atol_rtol_tensor",), _separates_tolerances),
        ("aten.linalg_pinv.atol_rtol_tensor",),
    ),
    Remedy(
        "heads-of-groups",
        "shard the heads of fused attention only if every rank's heads of the query are those of its heads of key and "
        "value (_scaled_dot_product_flash_attention_base_strategies and its siblings in _ops/_matrix_ops.py)",
        lambda: vetoed(_GROUPED, _separates_groups),
        _GROUPED,
        VALUES | {"CRASH"},
    ),
    Remedy(
        "bias-of-cudnn-attention",
        "add the placement of attn_bias to the rules that shard heads or batch in "
        "_scaled_dot_product_cudnn_attention_base_strategies (_ops/_matrix_ops.py)",
        bias_of_cudnn_attention,
        (f"{_CUDNN}.default",),
        frozenset({"CRASH"}),
    ),
    Remedy(
        "empty-logsumexp",
        "shard the empty logsumexp as the output, which has the batch and the heads of the rank "
        "(_scaled_dot_product_efficient_attention_base_strategies in _ops/_matrix_ops.py)",
        lambda: vetoed((f"{_EFFICIENT}.default",), _has_no_logsumexp),
        (f"{_EFFICIENT}.default",),
        frozenset({"WRONG_SHAPE"}),
    ),
    Remedy(
        "masks-of-attention-cached",
        "register the rule of _scaled_dot_product_efficient_attention_backward with RuntimeSchemaInfo(10) "
        "(_ops/_matrix_ops.py)",
        lambda: cached_by(aten._scaled_dot_product_efficient_attention_backward.default, 10),
        (f"{_EFFICIENT}_backward.default",),
    ),
    Remedy(
        "rows-of-grouped-products",
        "shard a matrix of _grouped_mm only if the rows of every rank's shard, which is contiguous, are a multiple of "
        "16 bytes (valid_grouped_mm_strides in _ops/_matrix_ops.py)",
        lambda: vetoed(_GROUPED_MM, _has_short_rows),
        _GROUPED_MM,
        frozenset({"CRASH"}),
    ),
    Remedy(
        "scales-of-blocks",
        "shard a matrix of _scaled_mm with scales for blocks only if the shards end where blocks end "
        "(_scaled_mm_scale_placement in _ops/_matrix_ops.py); here: refuse, because gloo gathers no float8",
        lambda: refused(_SCALED_MM, _separates_blocks, "has shards that do not end where blocks end"),
        _SCALED_MM,
        VALUES | {"CRASH"},
        refuses=True,
    ),
)
