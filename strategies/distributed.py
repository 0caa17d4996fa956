"""Arguments of a call as DTensors, where a function of ours takes the place of DTensor's dispatcher."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate

from verifier.torch_internals.dtensors import implicit_replication_allowed

__all__ = ["as_dtensors"]


def as_dtensors(op: object, **arguments: torch.Tensor) -> list[DTensor]:
    """Return each argument as a DTensor: a plain one replicated, inside ``implicit_replication()``.

    One of them at least has to be a DTensor.

    Raises
    ------
    RuntimeError
        If one is a plain tensor elsewhere, as in any call of an op with both.
    """
    mesh = next(argument.device_mesh for argument in arguments.values() if isinstance(argument, DTensor))
    result = []
    for name, argument in arguments.items():
        if isinstance(argument, DTensor):
            result.append(argument)
        elif implicit_replication_allowed():
            result.append(DTensor.from_local(argument, mesh, [Replicate()] * mesh.ndim, run_check=False))
        else:
            raise RuntimeError(f"{op}: got mixed torch.Tensor and DTensor, {name} is no DTensor; distribute it first")
    return result
