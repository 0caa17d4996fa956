"""Writes in place to a value, to a copy of it, and through views."""

from __future__ import annotations

import torch

from strategies.chains.building import Building, UnfitError
from strategies.chains.consumers.table import consumes, needs_dims, sizes_of


@consumes
def _written(b: Building, v: str) -> str:
    """Write to a copy as a whole, and return the copy."""
    base = b.call("clone.default", v)
    _write(b, base, base)
    return base


def _write(b: Building, into: str, base: str) -> None:
    """Write to a tensor in one of the ways in place."""
    kind = b.pick(("add_", "mul_", "copy_", "fill_", "zero_", "scalar", "neg_", "masked", "pow_", "broadcast"))
    if b.of(base).dtype == torch.bool and kind not in ("copy_", "fill_", "zero_"):
        kind = "fill_"
    if kind in ("add_", "mul_"):
        b.call(f"{kind}.Tensor", into, b.like(into))
    elif kind == "broadcast":
        b.call("copy_.default", into, b.like(into, *sizes_of(b, into)[1:], *([1] * (b.of(into).ndim < 2))))
    elif kind == "copy_":
        b.call("copy_.default", into, b.like(into))
    elif kind == "masked":
        b.call("masked_fill_.Scalar", into, b.bools(*sizes_of(b, into)), 7)
    elif kind == "scalar":
        b.call(b.pick(("add_.Scalar", "mul_.Scalar")), into, 3)
    elif kind == "pow_":
        b.call("pow_.Scalar", into, 2)
    else:
        b.call(
            {"fill_": "fill_.Scalar", "zero_": "zero_.default", "neg_": "neg_.default"}[kind],
            into,
            *([6] * (kind == "fill_")),
        )


@consumes
def _written_through_view(b: Building, v: str) -> str:
    """Write to a view of a copy, and read the copy."""
    needs_dims(b, v)
    base = b.call("clone.default", v)
    dim = b.dim(base)
    size = sizes_of(b, base)[dim]
    ways: list[tuple[object, ...]] = [
        ("select.int", dim, b.pick((0, size - 1, -1))),
        ("slice.Tensor", dim, 0, max(1, size - 1)),
        ("slice.Tensor", dim, 0, size, 2),
        ("torch.narrow", dim, size - 1, 1),
        ("unsqueeze.default", 0),
        ("view.default", [-1]),
        ("detach.default",),
        ("alias.default",),
    ]
    if b.of(base).ndim > 1:
        ways += [("transpose.int", 0, 1), ("diagonal.default",), ("t.default",), ("permute.default", [1, 0])]
    name, *rest = b.pick(
        [way for way in ways if b.of(base).ndim == 2 or way[0] not in ("t.default", "permute.default")]
    )
    view = b.call(str(name), base, *rest)
    _write(b, view, base)
    return b.call("mul.Scalar", base, 2) if b.of(base).dtype != torch.bool else b.call("logical_not.default", base)


@consumes
def _written_through_part(b: Building, v: str) -> str:
    """Write to one of the parts of a copy, and read the copy."""
    needs_dims(b, v)
    base = b.call("clone.default", v)
    name, *rest = b.way(("unbind.int",), ("split.Tensor", 2), ("chunk.default", 2))
    parts = b.call(name, base, *rest, b.dim(base))
    _no_gradient(b, base)
    part = f"{parts}.{b.pick((0, len(b.values[parts]) - 1))}"
    _write(b, part, base)
    return base


def _no_gradient(b: Building, base: str) -> None:
    """Detach everything: autograd refuses to write to one of several views."""
    for tensor in b.tensors.values():
        tensor.requires_grad_(False)


@consumes
def _assigned(b: Building, v: str) -> str:
    """Assign to an index of a copy: ``base[...] = number``, or another tensor."""
    needs_dims(b, v)
    base = b.call("clone.default", v)
    shape = sizes_of(b, base)
    indices: list[object] = [0, -1, (["slice", 0, 1],), (["slice", None, None, 2],), b.ids(2, below=shape[0])]
    if len(shape) > 1:
        column = shape[1] - 1
        indices += [(["slice", None], 0), (0, column), (["slice", 1, None], ["slice", None, -1])]
    index = b.pick(indices)
    part = b.of(b.call("torch.Tensor.__getitem__", base, index))
    b.steps.pop()
    if b.chance(0.5):
        b.call("torch.Tensor.__setitem__", base, index, True if part.dtype == torch.bool else 9)
    elif not isinstance(index, str):
        b.call("torch.Tensor.__setitem__", base, index, b.like(base, *part.shape))
    else:
        raise UnfitError("repeated indices")
    return b.call("mul.Scalar", base, 2) if part.dtype != torch.bool else b.call("logical_not.default", base)


@consumes
def _indexed_write(b: Building, v: str) -> str:
    """Write at indices: index_add_, index_fill_, scatter_, index_copy_ and their functional forms."""
    needs_dims(b, v)
    base = b.call("clone.default", v)
    dim = b.dim(base)
    shape = sizes_of(b, base)
    name = b.pick(("index_add", "index_fill", "scatter", "scatter_add"))
    suffix = b.pick(("", "_"))
    if name == "index_fill":
        return b.call(f"index_fill{suffix}.int_Scalar", base, dim, b.ids(1, below=shape[dim]), 4)
    if name == "index_add":
        shape[dim] = 2
        return b.call(
            f"index_add{suffix}.default", base, dim, b.ids(2, below=sizes_of(b, base)[dim]), b.like(base, *shape)
        )
    index = b.ids(*shape, below=shape[dim])
    if name == "scatter":
        return b.call(f"scatter{suffix}.value", base, dim, index, 5)
    return b.call(f"scatter_add{suffix}.default", base, dim, index, b.like(base))


@consumes
def _result_written(b: Building, v: str) -> str:
    """Write to the result itself, which nothing has kept."""
    name, *rest = b.way(("add_.Scalar", 3), ("mul_.Scalar", 2), ("neg_.default",), ("zero_.default",), ("add_.Tensor",))
    if b.of(v).dtype == torch.bool:
        name, *rest = "logical_not_.default", *()
    b.call(name, v, *(rest or ([b.like(v)] if name == "add_.Tensor" else [])))
    return v
