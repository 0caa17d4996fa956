"""Remedies for the rules of embeddings."""

from __future__ import annotations

from strategies.remedies.placing import is_partial, is_sharded, shard_dims
from verifier.execution.remedies import Remedy
from verifier.torch_internals.amending.propagation import Decision, replicated_first, vetoed
from verifier.torch_internals.amending.watching import masks_of_their_own
from verifier.torch_internals.placements import masked_extent

__all__ = ["REMEDIES"]

_GRADIENT = ("aten.embedding_dense_backward.default",)
_LOOKUP = ("aten.embedding.default",)
_GATHER = ("aten.gather.default", "aten.gather.out")
_MOVING = tuple(
    f"aten.{op}.*"
    for op in (
        "_unsafe_view", "any", "broadcast_to", "cat", "chunk", "expand", "flatten", "gather", "movedim", "nansum",
        "narrow", "permute", "repeat", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "stack",
        "sum", "t", "tensor_split", "tile", "transpose", "unbind", "unflatten", "unsqueeze", "view",
    )
)  # fmt: skip
"""Ops that move, repeat, pick or sum up elements, and pass partial placements on."""


def _counts_some_of_the_ids(decision: Decision) -> bool:
    indices = decision.args[1]
    return bool(decision.argument(4, "scale_grad_by_freq", False)) and (is_sharded(indices) or is_partial(indices))


def _masks_before_redistributing(decision: Decision) -> bool:
    """Return whether one mesh dim shards the rows, and the ids are redistributed or sharded on another one."""
    weight, given = decision.args[0], decision.given[1]
    return (
        0 in shard_dims(weight.placements)
        and len(decision.mesh_shape) > 1
        and not all(placement.is_replicate() for placement in given.placements)
    )


def _masks_twice(decision: Decision) -> bool:
    """Return whether several mesh dims mask the ids, because each of them shards the rows."""
    ids = decision.args[1] if decision.op in _LOOKUP else decision.args[2]
    return sum(masked_extent(placement) is not None for placement in ids.placements) > 1


def _moves_a_masked_result(decision: Decision) -> bool:
    return any(masked_extent(placement) is not None for one in decision.inputs for placement in one.placements)


REMEDIES = (
    Remedy(
        "frequencies-of-shards",
        "claim no shard of the indices for embedding_dense_backward if scale_grad_by_freq is True, because each rank "
        "counts its own ids only (_ops/_embedding_ops.py)",
        lambda: vetoed(_GRADIENT, _counts_some_of_the_ids),
        (*_GRADIENT, *_LOOKUP),
        frozenset({"WRONG_VALUE", "WRONG_GRADIENT"}),
    ),
    Remedy(
        "masks-of-other-ids",
        "make the mask of a row-wise lookup of the ids that the rank looks up, after they are redistributed on every "
        "mesh dim (_MaskPartial in placement_types.py)",
        lambda: vetoed(_LOOKUP, _masks_before_redistributing),
        _LOOKUP,
    ),
    Remedy(
        "rows-cut-twice",
        "let only one mesh dim shard the rows that embedding or gather looks up, or let each mask know of the other "
        "mesh dim (_MaskPartial in placement_types.py)",
        lambda: vetoed((*_LOOKUP, *_GATHER), _masks_twice),
        (*_LOOKUP, *_GATHER),
    ),
    Remedy(
        "masks-of-views",
        "reduce a masked result before its elements get other positions or become one, since its mask keeps the old "
        "ones (propagate_shape_and_sharding in _ops/_view_ops.py, linear reductions in _ops/_math_ops.py)",
        lambda: replicated_first(_MOVING, _moves_a_masked_result),
        _MOVING,
    ),
    Remedy(
        "masks-shared",
        "give each masked result a mask of its own, and keep the mask as long as the result (_MaskPartial in "
        "placement_types.py, and the cached placements of lookups)",
        masks_of_their_own,
        ("aten.*",),
        frozenset({"CRASH", "WRONG_VALUE", "WRONG_GRADIENT"}),
    ),
)
