"""The order of elements in memory, after calls in another memory format and after redistributions."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Replicate, Shard

from strategies.chains import memory_orders
from strategies.chains.building import Building
from strategies.chains.composites.table import composite

_PROGRAMS = f"{memory_orders.__name__}."


@composite
def _in_formats(b: Building) -> None:
    """The same call in two memory formats, one after the other, and a view of each result."""
    b.tensors[b.floats(*b.size())].requires_grad_(False)
    other = torch.float32 if b.dtype == torch.float64 else torch.float64
    path, *given = b.way(
        ("torch.clone",), ("torch.Tensor.to", other), ("torch.Tensor.contiguous",), ("torch.zeros_like",),
        ("torch.ones_like",), ("torch.empty_like",), ("torch.full_like", 3.0), ("torch.rand_like",),
        ("torch.randn_like",), ("torch.randint_like", 7),
    )  # fmt: skip
    formats = [b.pick((None, torch.contiguous_format)), torch.channels_last]
    b.rng.shuffle(formats)
    placements = [b.pick((Replicate(), Shard(0))) for _ in range(b.mesh.ndim)]
    b.program(f"{_PROGRAMS}in_formats", path, given, placements, formats)


@composite
def _laid_out(b: Building) -> None:
    """A view of a tensor that was moved to other placements while its dims were permuted."""
    b.tensors[b.floats(*b.size())].requires_grad_(False)
    order = list(b.pick(((0, 2, 1), (1, 0, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1))))
    placements = [b.pick((Replicate(), Shard(order.index(0)))) for _ in range(b.mesh.ndim)]
    b.program(f"{_PROGRAMS}laid_out", b.pick(("redistribute", "distribute_tensor")), order, placements)
