"""Arguments as DTensors, for functions of ours that replace DTensor's dispatcher."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate

from verifier.torch_internals.dtensors import implicit_replication_allowed

__all__ = ["as_dtensors"]


def as_dtensors(op: object, **arguments: torch.Tensor) -> list[DTensor]:
    """Return each argument as a DTensor; at least one has to be a DTensor.

    Inside ``implicit_replication()`` a plain tensor becomes a replicated DTensor.

    Raises
    ------
    RuntimeError
        If an argument is a plain tensor outside ``implicit_replication()``, as DTensor raises for any op.
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
