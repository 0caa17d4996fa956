"""Tensors whose memory is exchanged or shared: outputs, and buffers that are sharded in place."""

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
def _written_to_views(b: Building) -> None:
    """What is written to a view that is given as ``out``, or to the base of one that is read afterwards.

    A product of batches of matrices takes views of its ``out`` by itself. What DTensor has decided for another ``out``
    is remembered.
    """
    rows, columns = b.size()
    of, path, *given = b.way(
        ("all", "torch.exp"), ("all", "torch.add", 2), ("all", "torch.clamp", 0), ("all", "torch.div", 2),
        ("rows", "torch.prod", 0, True), ("rows", "torch.mean", [0], True), ("rows", "torch.amax", [0], True),
        ("columns", "torch.var", [1], True, True), ("columns", "torch.amin", [1], True),
        ("two", "torch.sub"), ("two", "torch.mul"), ("two", "torch.maximum"),
        ("matrices", "torch.mm"), ("matrices", "torch.matmul"), ("batches", "torch.bmm"), ("batches", "torch.matmul"),
        ("vectors", "torch.matmul"), ("vectors", "torch.mv"),
    )  # fmt: skip
    inner = b.pick((2, 3))
    known: dict[str, list[tuple[int, ...]]] = {
        "two": [(rows, columns)] * 2,
        "matrices": [(rows, inner), (inner, columns)],
        "batches": [(2, rows, inner), (2, inner, columns)],
        "vectors": [(rows, inner), (inner,)],
    }
    for shape in known.get(of, [(rows, columns)]):
        b.floats(*shape)
    found = {"rows": [1, columns], "columns": [rows, 1], "batches": [2, rows, columns], "vectors": [rows]}
    result = found.get(of, [rows, columns])
    whole = b.chance(0.3)
    base, view = (result, _view(b, result)) if whole else _view_like(b, result)
    b.floats(*base)
    b.rounds()
    for tensor in b.tensors.values():
        tensor.requires_grad_(False)
    earlier = [b.pick((Replicate(), Shard(0))) for _ in range(b.mesh.ndim)] if b.chance(0.5) else []
    b.program(f"{_PROGRAMS}written_to_views", path, given, view, whole, earlier)


def _view(b: Building, shape: list[int]) -> list[object]:
    """Return the path of a function that makes a view of a tensor of ``shape``, and its arguments."""
    dim, other = b.pick(range(len(shape))), b.pick(range(len(shape)))
    ways = ("detach",), ("transpose", dim, other), ("select", dim, 0), ("narrow", dim, 0, 1), ("unsqueeze", dim)
    name, *given = b.way(*ways)
    return [f"torch.Tensor.{name}", *given]


def _view_like(b: Building, shape: list[int]) -> tuple[list[int], list[object]]:
    """Return the shape of a base, the path of a function that makes a view of ``shape`` of it, and its arguments."""
    dim, other, at = b.pick(range(len(shape))), b.pick(range(len(shape))), b.pick(range(len(shape) + 1))
    turned, longer, start = list(shape), list(shape), b.pick((0, 1))
    turned[dim], turned[other] = shape[other], shape[dim]
    longer[dim] += 1
    bases: dict[str, tuple[list[int], list[object]]] = {
        "detach": (shape, []),
        "transpose": (turned, [dim, other]),
        "narrow": (longer, [dim, start, shape[dim]]),
        "select": ([*shape[:at], 2, *shape[at:]], [at, start]),
        "squeeze": ([*shape[:at], 1, *shape[at:]], [at]),
    }
    if shape[dim] == 1:
        bases["unsqueeze"] = [*shape[:dim], *shape[dim + 1 :]], [dim]
    name = b.pick(list(bases))
    base, given = bases[name]
    return base, [f"torch.Tensor.{name}", *given]


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
