"""What the predicates of remedies ask about tensors on a mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from verifier.placements.algebra import coordinates, local_shape, sharded_dim
from verifier.torch_internals.amending.propagation import Decision, Placed
from verifier.torch_internals.placements import Placements

__all__ = ["VALUES", "has_uneven_shards", "is_partial", "is_sharded", "local_shapes", "partials", "shard_dims"]

VALUES = frozenset({"WRONG_VALUE", "WRONG_GRADIENT"})
"""The verdicts of a rule that is right about shapes and placements, and wrong about values."""


def local_shapes(shape: Sequence[int], placements: Placements, mesh_shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the shape of each rank's local tensor."""
    for coordinate in coordinates(mesh_shape):
        yield local_shape(shape, placements, mesh_shape, coordinate)


def shard_dims(placements: Placements) -> set[int]:
    """Return the tensor dims that some mesh dim shards."""
    return {dim for placement in placements if (dim := sharded_dim(placement)) is not None}


def is_sharded(tensor: object) -> bool:
    """Return whether ``tensor`` is a tensor of the call that some mesh dim shards."""
    return isinstance(tensor, Placed) and bool(shard_dims(tensor.placements))


def partials(placements: Placements) -> set[str]:
    """Return the reductions of the partial placements."""
    return {str(getattr(placement, "reduce_op", "")) for placement in placements if placement.is_partial()}


def is_partial(tensor: Placed, *reductions: str) -> bool:
    """Return whether ``tensor`` waits for one of ``reductions``, or for any if none is named."""
    found = partials(tensor.placements)
    return bool(found.intersection(reductions) if reductions else found)


def has_uneven_shards(decision: Decision) -> bool:
    """Return whether local tensors of some argument differ in size."""
    return any(
        len({math.prod(shape) for shape in local_shapes(one.shape, one.placements, one.mesh_shape)}) > 1
        for one in decision.inputs
    )
