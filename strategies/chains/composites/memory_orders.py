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
    way = b.pick(("redistribute", "distribute_tensor", "from_local"))
    b.program(f"{_PROGRAMS}laid_out", way, order, placements)


@composite
def _computed_in_order(b: Building) -> None:
    """A view of what a function makes of permuted tensors, some of which it has to move first."""
    for name in (b.floats(*b.size()), b.floats(*b.size())):
        b.tensors[name].requires_grad_(False)
    order = list(b.pick(((0, 2, 1), (1, 0, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1))))
    path, *given = b.way(
        ("torch.relu",), ("torch.square",), ("torch.clone",), ("torch.flip", [0, 1]), ("torch.roll", 1, 0),
        ("torch.sign",), ("torch.abs",), ("torch.mul",), ("torch.mul",), ("torch.add",), ("torch.maximum",),
        ("torch.sub",), ("torch.atleast_3d",), ("torch.Tensor.__rpow__", 2), ("torch.nn.functional.logsigmoid",),
        ("torch.nn.functional.batch_norm", None, None, None, None, True),
    )  # fmt: skip
    beside = ""
    if path in ("torch.mul", "torch.add", "torch.sub", "torch.maximum"):
        beside = b.pick(("y", "y first", "expanded", "expanded first", "moved", "moved first"))
    b.program(f"{_PROGRAMS}computed", path, given, order, beside)


@composite
def _differentiated_in_order(b: Building) -> None:
    """A gradient through a view whose dims are exchanged, as the heads of attention are."""
    rows, columns = b.size()
    b.tensors[b.floats(rows, columns)].requires_grad_(False)
    sizes = b.pick(([rows, 2, columns], [rows, columns, 2]))
    path = b.pick(("torch.sum", "torch.sum", "torch.mean", "torch.linalg.vector_norm"))
    b.program(f"{_PROGRAMS}differentiated", path, sizes, sorted(b.rng.sample(range(3), 2)))


@composite
def _moved_between(b: Building) -> None:
    """A move to other placements between two exchanges of dims, and its gradient, as in sequence-parallel attention."""
    rows, columns = b.size()
    b.tensors[b.floats(rows, columns)].requires_grad_(False)
    sizes = b.pick(([rows, 2, columns], [rows, columns, 2]))
    placements = [b.pick((Replicate(), Shard(0), Shard(1), Shard(2))) for _ in range(b.mesh.ndim)]
    b.program(f"{_PROGRAMS}moved_between", sizes, sorted(b.rng.sample(range(3), 2)), placements)


@composite
def _exchanged(b: Building) -> None:
    """A function between two exchanges of dims, and its gradient, as a norm over channels that come first."""
    rows, columns = b.size()
    b.tensors[b.floats(rows, columns)].requires_grad_(False)
    sizes = b.pick(([rows, 2, columns], [rows, columns, 2]))
    dims = sorted(b.rng.sample(range(3), 2))
    last = sizes[dims[0]] if dims[1] == 2 else sizes[2]
    functions = "torch.nn.functional"
    path, *given = b.way(
        ("torch.log_softmax", 1), ("torch.log_softmax", 2), ("torch.softmax", 1), (f"{functions}.layer_norm", [last]),
        (f"{functions}.elu",), (f"{functions}.gelu",), (f"{functions}.silu",), ("torch.relu",), ("torch.tanh",),
        ("torch.Tensor.__rpow__", 2), (f"{functions}.batch_norm", None, None, None, None, True), ("torch.cumsum", 1),
    )  # fmt: skip
    b.program(f"{_PROGRAMS}exchanged", path, given, sizes, dims)
