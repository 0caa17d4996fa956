"""Calls at sizes that OpInfo does not have: if OpInfo has only one size, and if two extents are equal."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from strategies.opinfo.calls.call import Call, attempt
from strategies.opinfo.calls.op_facts import TRUSTING
from strategies.opinfo.calls.op_names import base_of

__all__ = ["resized"]

_SHRINKING = 1  # the size whose extents are smaller than the number of ranks


def resized(call: Call, size: int) -> Call | None:
    """Return ``call`` with other extents, by each dim's distance from the last dim; None if torch refuses that call.

    Extents 0 and 1 stay, so that broadcasting stays. Values are those of ``call``, repeated.

    Only calls of pointwise ops, and calls whose tensors all have one shape, are resized. Not every kernel checks the
    sizes of its arguments (such as statistics per channel), and some would access memory out of bounds. Such kernels
    also take a list of sizes that does not fit. Tensors of integers may hold indices, so with them extents only grow.
    """
    tensors = call.tensors
    lists_sizes = any("size" in name and isinstance(value, list | tuple) for name, value in call.values.items())
    if lists_sizes and base_of(str(call.op)).startswith(TRUSTING):
        return None
    shrinks = size == _SHRINKING
    holds_integers = any(not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool) for t in tensors)
    pointwise = torch.Tag.pointwise in call.op.tags
    if not pointwise and (not _one_shape(tensors) or (shrinks and holds_integers)):
        return None
    leaves: list[object] = []
    for leaf in call.leaves:
        if isinstance(leaf, torch.Tensor):
            shape = [_extent(n, leaf.ndim - 1 - dim, size, shrinks) for dim, n in enumerate(leaf.shape)]
            leaves.append(_repeated(leaf, shape))
        else:
            leaves.append(leaf)
    other = call.with_leaves(leaves)
    return other if attempt(other) is not None else None


def _one_shape(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all tensors have the same shape, apart from extents of 1 and 0-d tensors."""
    shapes = [tensor.shape for tensor in tensors if tensor.ndim]
    return len({len(shape) for shape in shapes}) <= 1 and all(
        len(set(extents) - {1}) <= 1 for extents in zip(*shapes, strict=False)
    )


def _extent(extent: int, from_last: int, size: int, shrinks: bool) -> int:
    if extent < 2:
        return extent
    if shrinks:
        return 1 if extent == 2 else max(2, extent // 2 - from_last)
    return extent + from_last + size - 2


def _repeated(tensor: torch.Tensor, shape: list[int]) -> torch.Tensor:
    count = math.prod(shape)
    if not tensor.numel():
        return tensor.new_empty(shape)
    return tensor.reshape(-1)[torch.arange(count) % tensor.numel()].view(shape)
