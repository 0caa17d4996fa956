"""Calls of ``torch.nn.functional.embedding_bag`` for which aten alone is no reference; they import only torch."""

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
    """Return pooled bags with ``scale_grad_by_freq=True``; for plain tensors the gradient is computed here.

    On a CPU aten divides the gradient of a row by the count of another row (pytorch issue #190063, torch 2.13.0). So
    the table of a plain call passes through an identity whose gradient is divided by the counts.
    """
    bag = torch.nn.functional.embedding_bag
    if isinstance(weight, DTensor):
        return bag(input, weight, offsets, mode=mode, padding_idx=padding_idx, scale_grad_by_freq=True)
    counts = torch.bincount(input.flatten(), minlength=weight.shape[0]).clamp(min=1).unsqueeze(-1)
    table = weight.detach() + (weight - weight.detach()) / counts
    return bag(input, table, offsets, mode=mode, padding_idx=padding_idx)
