"""Tensors whose memory is exchanged: outputs that have to grow, and buffers that are sharded in place."""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard

from strategies.chains import buffers
from strategies.chains.building import Building
from strategies.chains.composites.table import composite

_PROGRAMS = f"{buffers.__name__}."


@composite
def _resized_output(b: Building) -> None:
    """What is written to an empty tensor, or to one of too few or too many elements, which has to be resized."""
    rows, columns = b.size()
    b.tensors[b.floats(rows, columns)].requires_grad_(False)
    path, *given = b.way(
        ("torch.exp",), ("torch.add", 2), ("torch.clamp", 0), ("torch.cumsum", 0), ("torch.tril",),
        ("torch.sum", 0), ("torch.mean", 1), ("torch.amax", 0), ("torch.sum", 1),
    )  # fmt: skip
    shape = b.pick(([0], [0], [0, columns], [rows + 1, columns], [1]))
    placements = [b.pick((Replicate(), Replicate(), Shard(0))) for _ in range(b.mesh.ndim)]
    b.program(f"{_PROGRAMS}resized", path, given, list(shape), placements)


@composite
def _context_parallel(b: Building) -> None:
    """Buffers with a sequence along any dim, counted from either end, some of them views of the same tensor.

    A batch of tokens without the last one, and one without the first one, are inputs and labels of a language model.
    """
    length = 2 * b.mesh.world_size
    dim, ndim = b.way((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (1, 3), (2, 3))
    shape = [b.pick((1, 2, 3)) for _ in range(ndim)]
    kinds = b.pick((("whole",), ("whole",), ("view",), ("inputs", "labels")))
    shape[dim] = length if kinds == ("whole",) else length + 1
    b.tensors[b.floats(*shape)].requires_grad_(False)
    begins = {"view": 1, "inputs": 0, "labels": 1}
    ways = [["torch.narrow", dim, begins[kind], length] if kind in begins else ["torch.clone"] for kind in kinds]
    dims = [dim - ndim if b.chance(0.2) else dim] * len(kinds)
    b.program(f"{_PROGRAMS}in_context", ways, dims)
