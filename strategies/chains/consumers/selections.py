"""Selections from a value."""

from __future__ import annotations

import torch

from strategies.chains.building import Building, UnfitError
from strategies.chains.consumers.table import consumes, needs_dims, sizes_of


@consumes
def _select(b: Building, v: str) -> str:
    needs_dims(b, v)
    dim = b.dim(v)
    size = sizes_of(b, v)[dim]
    return b.call("select.int", v, dim, b.pick((0, size - 1, -1)))


@consumes
def _slice(b: Building, v: str) -> str:
    needs_dims(b, v)
    dim = b.dim(v)
    size = sizes_of(b, v)[dim]
    return b.call("slice.Tensor", v, dim, *b.pick(((1, size), (0, size - 1), (0, size, 2), (-1, None))))


@consumes
def _narrow(b: Building, v: str) -> str:
    needs_dims(b, v)
    dim = b.dim(v)
    return b.call("torch.narrow", v, dim, b.pick((0, 1)), 1)


@consumes
def _index_select(b: Building, v: str) -> str:
    needs_dims(b, v)
    dim = b.dim(v)
    return b.call("index_select.default", v, dim, b.ids(b.pick((1, 3, b.rows)), below=sizes_of(b, v)[dim]))


@consumes
def _gather(b: Building, v: str) -> str:
    needs_dims(b, v)
    dim = b.dim(v)
    shape = sizes_of(b, v)
    if b.chance(0.3):
        shape[dim] = 1
    path = b.pick(("gather.default", "torch.take_along_dim"))
    index = b.ids(*shape, below=sizes_of(b, v)[dim])
    return b.call(path, v, dim, index) if path == "gather.default" else b.call(path, v, index, dim)


@consumes
def _indexed(b: Building, v: str) -> str:
    """Index as ``v[ids]``, ``v[:, ids]``, ``v[0, ids]``, ``v[None]``, ``v[..., 1:]``."""
    needs_dims(b, v)
    shape = sizes_of(b, v)
    first = b.ids(b.pick((1, 3)), below=shape[0])
    indices: list[object] = [first, (first,), (None,), (["slice", 0, 1],)]
    if len(shape) > 1:
        second = b.ids(*b.of(first).shape, below=shape[1])
        indices += [(["slice", None], second), (0, second), (first, second), (None, first), (first, ["slice", 1, None])]
    return b.call("torch.Tensor.__getitem__", v, b.pick(indices))


@consumes
def _masked(b: Building, v: str) -> str:
    mask = b.bools(*b.pick((sizes_of(b, v), sizes_of(b, v)[-1:])))
    if b.of(v).dtype == torch.bool or b.chance(0.5):
        return b.call("where.self", mask, v, b.like(v))
    return b.call("masked_fill.Scalar", v, mask, b.pick((0, 5)))


@consumes
def _chosen_by_itself(b: Building, v: str) -> str:
    """Index with the value as the mask or the index."""
    if b.of(v).dtype == torch.bool:
        name = b.pick(("where.self", "masked_fill.Scalar"))
        if name == "where.self":
            return b.call(name, v, b.floats(*sizes_of(b, v)), b.floats(*sizes_of(b, v)))
        return b.call(name, b.floats(*sizes_of(b, v)), v, 9)
    if b.of(v).dtype == torch.int64:
        highest = int(b.of(v).max()) if b.of(v).numel() else 0
        if not 0 <= highest < 64 or int(b.of(v).min()) < 0:
            raise UnfitError("no index")
        return b.call("embedding.default", b.floats(highest + 1, 3), v)
    b.decides(v)
    return b.call("where.self", b.call("gt.Scalar", v, 0), v, b.like(v))


@consumes
def _diagonal(b: Building, v: str) -> str:
    needs_dims(b, v, 2)
    name, *rest = b.way(("diagonal.default", 0), ("tril.default", 0), ("triu.default", 1), ("torch.trace",))
    return b.call(name, v, *rest)
