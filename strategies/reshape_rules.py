"""How embedding bags flatten 2-d ids before the lookup: ``ids.reshape(-1)``, which DTensor dispatches as ``aten.view``.

Torch's rule for views (2.13.0) looks at one mesh dim at a time:

- It refuses to flatten shards if one mesh dim shards unevenly, because they are no shards of the flattened tensor.
- It accepts shards that only several mesh dims together make uneven. A guard refuses these: numbers of elements differ.
- It never returns for a tensor ``[0, n]``.

A view must alias its input, so it cannot redistribute. ``torch.nn.functional.embedding_bag`` does so instead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from verifier.core.placement_text import format_placements
from verifier.placements.algebra import coordinates, local_shape, sharded_dim
from verifier.torch_internals.placements import Placements, strides_of

__all__ = [
    "GUARDS",
    "embedding_bag",
    "flattenable",
    "flattens",
    "install_embedding_bag",
    "refuse_another_number",
    "replaced_embedding_bag",
]

aten = torch.ops.aten
torch_embedding_bag = torch.nn.functional.embedding_bag


def refuse_another_number(
    op: object, args: Sequence[object], mesh_shape: Sequence[int], before: Placements, after: Placements
) -> None:
    """Check that a view keeps the number of elements of each rank.

    Parameters
    ----------
    args
        The shape of the tensor instead of the tensor, and the sizes of the view.
    before, after
        The placements of the tensor, and the placements that the rule claims for the view.

    Raises
    ------
    NotImplementedError
        If a rank would have another number of elements.
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
"""The ops whose rules a guard checks before DTensor follows them."""


# ---------------------------------------------------------------------------------------------------------- flattening
def flattens(shape: Sequence[int], placements: Placements, mesh_shape: Sequence[int]) -> bool:
    """Return whether DTensor can flatten a tensor ``[rows, columns]`` of these placements without communication.

    Partial does not matter, because flattening commutes with the reduction. The answer for strided shards is False,
    although DTensor can flatten some of them.

    >>> flattens((4, 3), (Shard(0),), (2,)), flattens((5, 3), (Shard(0),), (2,)), flattens((5, 3), (Shard(1),), (2,))
    (True, False, True)
    """
    rows, columns = shape
    if not rows * columns:
        return True
    if any(strides_of(placement) for placement in placements):
        return False
    by_rows, by_columns = (
        [ranks for placement, ranks in zip(placements, mesh_shape, strict=True) if placement == Shard(dim)]
        for dim in (0, 1)
    )
    if columns == 1:
        return not by_columns
    even_columns = len(by_columns) <= 1 or columns % math.prod(by_columns) == 0
    return even_columns and rows % math.prod(by_rows) == 0


def flattenable(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` if DTensor can flatten it, else ``tensor`` replicated.

    Replicating takes one all-gather for each mesh dim that shards it. The gradient has the placements of ``tensor``.
    """
    if not isinstance(tensor, DTensor) or tensor.ndim != 2:
        return tensor
    mesh = tensor.device_mesh
    if flattens(tensor.shape, tensor.placements, tuple(mesh.shape)):
        return tensor
    everywhere = [Replicate()] * mesh.ndim
    tensor = tensor.redistribute(placements=everywhere)
    if tensor.requires_grad:  # again, because a Partial gradient cannot become Partial of another kind
        tensor = tensor.redistribute(placements=everywhere)
    return tensor


def _may_be_flattened(input: torch.Tensor, samples: torch.Tensor, offsets: object) -> bool:
    """Return whether 2-d ids and their per-sample weights are legal, so that they may be flattened here."""
    return input.ndim == 2 and input.shape == samples.shape and offsets is None and input.shape[1] > 0


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` flattened and reduced; its gradient is reduced too, so that DTensor can unflatten it."""
    tensor = tensor.reshape(-1)
    if not isinstance(tensor, DTensor):
        return tensor
    reduced = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    tensor = tensor.redistribute(placements=reduced)
    return tensor.redistribute(placements=reduced)  # for the gradient, as in flattenable


@functools.wraps(torch_embedding_bag)
def embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    input = flattenable(input)
    if per_sample_weights is not None:
        per_sample_weights = flattenable(per_sample_weights)
        if isinstance(per_sample_weights, DTensor) and _may_be_flattened(input, per_sample_weights, offsets):
            offsets = torch.arange(0, input.numel(), input.shape[1], dtype=input.dtype, device=input.device)
            input, per_sample_weights = input.reshape(-1), flat(per_sample_weights)
    return torch_embedding_bag(
        input,
        weight,
        offsets,
        max_norm,
        norm_type,
        scale_grad_by_freq,
        mode,
        sparse,
        per_sample_weights,
        include_last_offset,
        padding_idx,
    )


def install_embedding_bag() -> None:
    """Let ``torch.nn.functional.embedding_bag`` flatten DTensors with uneven shards from now on.

    A name that was bound to torch's function before this call still refuses them.
    """
    torch.nn.functional.embedding_bag = embedding_bag


@contextmanager
def replaced_embedding_bag() -> Iterator[None]:
    """Install our ``embedding_bag`` inside the block only."""
    kept = torch.nn.functional.embedding_bag
    install_embedding_bag()
    try:
        yield
    finally:
        torch.nn.functional.embedding_bag = kept
