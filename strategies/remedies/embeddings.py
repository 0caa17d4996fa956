"""Remedies for the rules of embeddings."""

from __future__ import annotations

from strategies.remedies.placing import is_partial, is_sharded, shard_dims
from verifier.execution.remedies import Remedy
from verifier.torch_internals.amending.propagation import Decision, vetoed

__all__ = ["REMEDIES"]

_GRADIENT = ("aten.embedding_dense_backward.default",)
_LOOKUP = ("aten.embedding.default",)


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
    """Return whether several mesh dims shard the rows."""
    rows = [placement for placement in decision.args[0].placements if 0 in shard_dims((placement,))]
    return len(rows) > 1


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
        "let only one mesh dim shard the rows of a lookup's table, or let each mask know of the other mesh dim "
        "(_MaskPartial in placement_types.py)",
        lambda: vetoed(_LOOKUP, _masks_twice),
        _LOOKUP,
    ),
)
