"""Calls of ``torch.nn.functional.embedding_bag`` for which aten by itself is no reference; they need torch alone."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

__all__ = ["scaled"]


def scaled(
    weight: torch.Tensor,
    input: torch.Tensor,
    offsets: torch.Tensor | None = None,
    padding_idx: int | None = None,
    mode: str = "sum",
) -> torch.Tensor:
    """Return pooled bags with ``scale_grad_by_freq=True``, of plain tensors with a gradient that is scaled by counts.

    On a CPU aten's own gradient divides a row by how often another row occurs (pytorch issue #190063, torch 2.13.0), so
    here the table itself is given a gradient of 1 / count in front of the lookup, which leaves its values as they are.
    """
    bag = torch.nn.functional.embedding_bag
    if isinstance(weight, DTensor):
        return bag(input, weight, offsets, mode=mode, padding_idx=padding_idx, scale_grad_by_freq=True)
    counts = torch.bincount(input.flatten(), minlength=weight.shape[0]).clamp(min=1).unsqueeze(-1)
    table = weight.detach() + (weight - weight.detach()) / counts
    return bag(input, table, offsets, mode=mode, padding_idx=padding_idx)
