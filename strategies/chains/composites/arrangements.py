"""Functions that move, select and compare elements, and linear algebra."""

from __future__ import annotations

import torch

from strategies.chains.building import Building, UnfitError
from strategies.chains.composites.table import composite


@composite
def _rearranged(b: Building) -> None:
    """Functions that only move elements."""
    value = b.floats(2, *b.size())
    name, *rest = b.way(
        ("torch.rot90", 1, [0, 2]),
        ("torch.roll", 1, b.pick((0, -1))),
        ("torch.roll", 2),
        ("torch.tile", (2, 1, 2)),
        ("torch.repeat_interleave", 2, b.pick((0, 1, -1))),
        ("torch.tensor_split", 2, b.pick((0, 1, -1))),
        ("torch.hsplit", [1]),
        ("torch.diag_embed",),
        ("torch.swapaxes", 0, -1),
        ("torch.take_along_dim", b.ids(2, *b.size(), below=2), 0),
        ("torch.take", b.ids(3, below=2 * b.rows * b.columns)),
        ("torch.Tensor.unfold", b.pick((1, -1)), 2, 1),
        ("torch.atleast_3d",),
        ("torch.ravel",),
        ("torch.broadcast_to", (3, 2, *b.size())),
        ("torch.fliplr",),
    )
    b.call(name, value, *rest)


@composite
def _split_where(b: Building) -> None:
    """A tensor split where a tensor of indices says."""
    size = b.size()
    value = b.floats(*size)
    dim = b.pick((0, 1, -1))
    b.call("torch.tensor_split", value, b.given(torch.tensor(b.pick(([1], [1, size[dim]])))), dim)


@composite
def _counted_by_tensors(b: Building) -> None:
    """Where to begin, how many parts, classes or repetitions: a tensor of integers says it, which may be pending."""
    rows, columns = b.size()
    kind = b.pick(("narrow", "narrow", "tensor_split", "tensor_split", "repeat_interleave", "one_hot", "masked_select"))
    if kind in ("narrow", "tensor_split"):
        value, number = b.floats(rows, columns), b.given(torch.tensor(b.pick((1, rows - 1))))
        b.call(f"torch.{kind}", value, *([0, number, 1] if kind == "narrow" else [number, 0]))
    elif kind == "repeat_interleave":
        times = b.given(b.tensors.pop(b.ids(rows, below=2)) + 1)
        b.call("torch.repeat_interleave", b.floats(rows, columns), times, 0)
    elif kind == "one_hot":
        b.call("torch.nn.functional.one_hot", b.ids(rows, below=3))
    else:
        b.call("torch.masked_select", b.floats(rows, columns), b.bools(rows, columns))


@composite
def _joined(b: Building) -> None:
    rows, columns = b.size()
    parts = [b.floats(rows, columns), b.floats(rows, columns)]
    path = b.pick(
        (
            "hstack",
            "vstack",
            "dstack",
            "column_stack",
            "cat",
            "stack",
            "cartesian_prod",
            "meshgrid",
            "broadcast_tensors",
        )
    )
    if path in ("cartesian_prod", "meshgrid"):
        b.call(f"torch.{path}", b.floats(rows), b.floats(columns), **({"indexing": "ij"} if path == "meshgrid" else {}))
    elif path == "broadcast_tensors":
        b.call(f"torch.{path}", parts[0], b.floats(rows, 1))
    else:
        b.call(f"torch.{path}", parts)


@composite
def _asked(b: Building) -> None:
    """Functions whose answer is a bool."""
    left = b.floats(*b.size())
    right = b.call("torch.clone", left) if b.chance(0.5) else b.floats(*b.size())
    path = b.pick(("equal", "allclose", "isclose", "eq", "isin"))
    answer = b.call(f"torch.{path}", left, right)
    if isinstance(b.values[answer], bool):
        b.call("torch.add", b.floats(b.rows), 1, alpha=2) if b.values[answer] else None
        b.call("torch.mul", b.floats(b.rows), answer)
        if not b.values[answer]:
            raise UnfitError("shows nothing")


@composite
def _filled(b: Building) -> None:
    """Masked and indexed functions."""
    rows, columns = b.size()
    value = b.floats(rows, columns)
    kind = b.pick(
        (
            "masked_scatter",
            "scatter_reduce",
            "index_reduce",
            "index_copy",
            "select_scatter",
            "slice_scatter",
            "diagonal_scatter",
            "where",
            "nan_to_num",
            "clamp",
        )
    )
    if kind == "scatter_reduce":
        reduce = b.pick(("sum", "prod", "mean", "amax", "amin"))
        index = b.ids(rows, columns, below=rows)
        b.call("torch.scatter_reduce", value, 0, index, b.floats(rows, columns), reduce, include_self=b.chance(0.5))
    elif kind == "index_copy":
        b.call("torch.index_copy", value, 0, b.given(torch.tensor([rows - 1, 0])), b.floats(2, columns))
    elif kind == "index_reduce":
        b.call("torch.index_reduce", value, 0, b.ids(2, below=rows), b.floats(2, columns), b.pick(("prod", "amax")))
    elif kind == "masked_scatter":
        b.call("torch.masked_scatter", value, b.bools(rows, columns), b.floats(rows, columns))
    elif kind == "select_scatter":
        b.call("torch.select_scatter", value, b.floats(columns), b.pick((0, -2)), b.pick((0, -1)))
    elif kind == "slice_scatter":
        b.call("torch.slice_scatter", value, b.floats(rows, 1), b.pick((1, -1)), 0, 1)
    elif kind == "diagonal_scatter":
        b.call("torch.diagonal_scatter", value, b.floats(min(rows, columns)))
    elif kind == "where":
        b.call("torch.where", b.bools(rows, columns), value, b.pick((0.0, 2)))
    elif kind == "nan_to_num":
        b.call("torch.nan_to_num", value, 1.0)
    else:
        b.call("torch.clamp", value, b.floats(columns), None)


@composite
def _solved(b: Building) -> None:
    """Functions of linear algebra on well-conditioned matrices."""
    size = b.rows
    generator = torch.Generator().manual_seed(b.rng.getrandbits(16))
    matrix = torch.eye(size, dtype=b.dtype) * (size + 3) + torch.rand(2, size, size, generator=generator).to(b.dtype)
    value = b.given(matrix.requires_grad_())
    name = b.pick(("det", "slogdet", "inv", "solve", "matrix_power", "cholesky", "pinv", "lstsq", "qr"))
    if name == "solve":
        b.call("torch.linalg.solve", value, b.floats(2, size, 2))
    elif name == "matrix_power":
        b.call("torch.linalg.matrix_power", value, b.pick((2, 3)))
    elif name == "cholesky":
        b.call("torch.linalg.cholesky", b.call("torch.matmul", value, b.call("torch.transpose", value, -1, -2)))
    elif name == "lstsq":
        b.call("torch.linalg.solve_triangular", value, b.floats(2, size, 2), upper=b.chance(0.5))
    else:
        b.call(f"torch.linalg.{name}", value)
