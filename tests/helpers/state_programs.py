"""Calls whose results differ if an earlier trial has left state behind."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate


def draws_on_the_first_rank(x: torch.Tensor) -> torch.Tensor:
    """Return twice ``x``; on a DTensor, only the first rank then draws a random number."""
    if isinstance(x, DTensor) and dist.get_rank() == 0:
        torch.rand(())
    return 2 * x


def adds_how_far_draws_are_apart(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` if the next random number is the same on every rank."""
    if not isinstance(x, DTensor):
        return x + 0.0
    drawn = torch.rand((), dtype=x.dtype)
    most, least = (DTensor.from_local(drawn, x.device_mesh, [Partial(kind)]).full_tensor() for kind in ("max", "min"))
    return x + DTensor.from_local(most - least, x.device_mesh, [Replicate()])
