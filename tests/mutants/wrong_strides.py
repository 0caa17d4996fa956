"""A rule for ``aten.t`` whose values are right, and whose result says that it is contiguous. Ranks import this file."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from verifier.torch_internals.registries import install_handler


def _turned(placement: Placement) -> Placement:
    return Shard(1 - placement.dim) if isinstance(placement, Shard) else placement


def _contiguous(op: object, matrix: DTensor) -> DTensor:
    """Return the transpose as a copy."""
    rows, columns = matrix.shape
    placements = [_turned(placement) for placement in matrix.placements] or [Replicate()]
    local = matrix.to_local().t().contiguous()
    shape = torch.Size((columns, rows))
    return DTensor.from_local(local, matrix.device_mesh, placements, run_check=False, shape=shape, stride=(rows, 1))


install_handler(torch.ops.aten.t.default, _contiguous)
