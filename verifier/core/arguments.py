"""The tensor arguments of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from verifier.core.case import OpCase, Trial
from verifier.core.ops import argument_names
from verifier.core.placement_text import format_placements
from verifier.torch_internals.names import pytree
from verifier.torch_internals.placements import Combination, Placements

__all__ = [
    "combination_rows",
    "combination_text",
    "tensor_arguments",
    "unsupported_reason",
]


def unsupported_reason(tensor: torch.Tensor) -> str | None:
    """Return why ``tensor`` cannot be made a DTensor, or None if it can.

    >>> unsupported_reason(torch.eye(2).to_sparse())
    'sparse tensor (torch.sparse_coo): DTensor has no sparse layout'
    """
    if isinstance(tensor, DTensor):
        return "already a DTensor"
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return f"tensor subclass {type(tensor).__name__}: what it promises is unknown"
    if tensor.is_nested:
        return "nested tensor: has no single shape to shard"
    if tensor.layout is not torch.strided:
        return f"sparse tensor ({tensor.layout}): DTensor has no sparse layout"
    if tensor.is_quantized:
        return "quantised tensor: DTensor keeps no scale and zero point"
    if tensor.device.type == "meta":
        return "meta tensor: has no values to compare"
    if tensor.is_neg() or tensor.is_conj():
        return "lazy negative or conjugate view: resolve it first"
    return None


def tensor_arguments(args: Sequence[object], kwargs: Mapping[str, object]) -> list[torch.Tensor]:
    """Return the tensors in ``(args, kwargs)`` that can be distributed, in the order of a pytree walk."""
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and unsupported_reason(leaf) is None]


def combination_rows(case: OpCase, combination: Combination) -> tuple[tuple[str, str], ...]:
    """Return ``(argument name, placements as text)`` for each tensor argument."""
    names = argument_names(case)
    return tuple((name, format_placements(placements)) for name, placements in zip(names, combination, strict=True))


def combination_text(trial: Trial) -> str:
    """Return the placements of the tensor arguments, and after each whether a dim has fewer indices than shards.

    DTensor refuses such shards in many rules.

    >>> from torch.distributed.tensor import Replicate, Shard
    >>> from verifier.core.case import MeshSpec
    >>> case = OpCase("aten.mul.Tensor", "torch.mul", (torch.ones(3), torch.ones(8)))
    >>> combination_text(Trial(case, MeshSpec((4,)), ((Shard(0),), (Shard(0),))))
    'S(0) small; S(0)'
    """
    tensors = tensor_arguments(trial.case.args, trial.case.kwargs)
    return "; ".join(
        format_placements(placements) + " small" * _is_small(tensor, placements, trial.mesh.shape)
        for tensor, placements in zip(tensors, trial.combination, strict=False)
    )


def _is_small(tensor: torch.Tensor, placements: Placements, mesh_shape: Sequence[int]) -> bool:
    shards = [1] * tensor.ndim
    for placement, extent in zip(placements, mesh_shape, strict=True):
        if placement.is_shard():
            dim: int = placement.dim  # type: ignore[attr-defined]
            shards[dim] *= extent
    return any(size < count for size, count in zip(tensor.shape, shards, strict=True))
