"""A guard of DTensor's rule of ``aten.view``, by which embedding bags flatten ids of two dims before the lookup.

Torch's rule (2.13.0) looks at one mesh dim at a time. It refuses to flatten shards that one mesh dim cuts unevenly, as
these are no shards of the flattened tensor. Where only several mesh dims together cut unevenly it goes on, and each
rank is told to view its elements as another number of them. And to flatten ``[0, n]`` it takes for ever.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from verifier.cases import Placements, format_placements
from verifier.placements import coordinates, local_shape, sharded_dim

__all__ = ["GUARDS", "refuse_another_number"]

aten = torch.ops.aten


def refuse_another_number(
    op: object, args: Sequence[object], mesh_shape: Sequence[int], before: Placements, after: Placements
) -> None:
    """Check that each rank has as many elements after a view as before.

    Parameters
    ----------
    args
        The shape of the tensor, in its place, and the sizes that it is viewed as.
    before, after
        The placements of the tensor, and those that are claimed of the view.

    Raises
    ------
    NotImplementedError
        If a rank would have another number.
    """
    cuts = [dim for dim in map(sharded_dim, before) if dim is not None]
    if len(set(cuts)) == len(cuts):
        return
    shape, sizes = args[0], args[1]
    assert isinstance(shape, Sequence)
    assert isinstance(sizes, Sequence)
    known = math.prod(size for size in sizes if size != -1)
    viewed = [math.prod(shape) // max(known, 1) if size == -1 else size for size in sizes]
    for at in coordinates(mesh_shape):
        held = math.prod(local_shape(shape, before, mesh_shape, at))
        if held != math.prod(local_shape(viewed, after, mesh_shape, at)):
            placed = format_placements(before)
            raise NotImplementedError(
                f"{op}: a tensor {list(shape)} placed as {placed} cannot be viewed as {viewed} on its shards, which "
                "are not even; redistribute it first"
            )


GUARDS = {aten.view.default: refuse_another_number, aten._unsafe_view.default: refuse_another_number}
"""The ops whose rules are asked about before DTensor goes by them."""
