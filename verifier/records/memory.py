"""Tensors whose elements are not all and alone in memory: those that share elements, or have gaps between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verifier.records.trials import span_of

__all__ = ["own_strides", "with_strides"]


def own_strides(tensor: torch.Tensor) -> list[int]:
    """Return the strides of a tensor of several elements that are not one after the other in memory, else nothing.

    >>> own_strides(torch.zeros(3, 1).expand(3, 2))
    [1, 0]
    >>> own_strides(torch.zeros(2, 3).t())
    []
    """
    if not tensor.numel():
        return []
    dims = [dim for dim in range(tensor.ndim) if tensor.shape[dim] > 1]
    in_order = sorted(dims, key=tensor.stride)
    expected = 1
    for dim in in_order:
        if tensor.stride(dim) != expected:
            return list(tensor.stride())
        expected *= tensor.shape[dim]
    return []


def with_strides(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return the values of ``tensor`` in memory with ``strides``; elements that share a place all have the last value.

    >>> with_strides(torch.tensor([[1, 2], [3, 4]]), (0, 1))
    tensor([[3, 4],
            [3, 4]])
    """
    if not tensor.numel():
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype)
    places = torch.zeros((), dtype=torch.int64)
    for extent, stride in zip(tensor.shape, strides, strict=True):
        places = places[..., None] + torch.arange(extent) * stride
    memory = tensor.new_zeros(span_of(tensor.shape, strides))
    for place, value in zip(places.flatten().tolist(), tensor.detach().flatten(), strict=True):
        memory[place] = value
    return memory.as_strided(tensor.shape, strides)
