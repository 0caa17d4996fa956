"""Tensors of another dtype, with values that tell something in it."""

from __future__ import annotations

import torch

__all__ = ["as_complex", "converted"]


def converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a tensor of another dtype with different values: small integers but 0, or bools of both kinds."""
    if not tensor.is_floating_point():
        return None
    if dtype == torch.bool:
        return tensor > tensor.nan_to_num().mean()
    if dtype.is_floating_point:
        return tensor.to(dtype)
    whole = (3 * tensor.nan_to_num(0.0, 3.0, -3.0)).round().clamp(-4, 4)
    whole = (whole if dtype.is_signed else whole.abs()).to(dtype)
    return torch.where(whole == 0, torch.ones_like(whole), whole)  # a division by 0 is a special value


def as_complex(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor with the elements as real parts, and other ones as imaginary parts."""
    if not tensor.is_floating_point() or tensor.dtype not in (torch.float32, torch.float64):
        return None
    return torch.complex(tensor, tensor.flatten().roll(1).reshape(tensor.shape) + 1)
