"""Shape changes, splits and joins of a value."""

from __future__ import annotations

from math import prod

import torch

from strategies.chains.building import Building
from strategies.chains.consumers.table import consumes, needs_dims, sizes_of


@consumes
def _view(b: Building, v: str) -> str:
    return b.call(b.pick(("view.default", "reshape.default", "_unsafe_view.default")), v, _other_shape(b, v))


def _other_shape(b: Building, v: str) -> list[int]:
    """Return sizes of the same number of elements: dims joined, split, turned, or with size-1 dims."""
    shape = sizes_of(b, v)
    total = prod(shape)
    found = [[-1], [1, *shape], [*shape, 1], [1, total], [total, 1]]
    for dim, size in enumerate(shape):
        found += [[*shape[:dim], part, size // part, *shape[dim + 1 :]] for part in (2, 3) if not size % part]
        if dim:
            found += [[*shape[: dim - 1], shape[dim - 1] * size, *shape[dim + 1 :]]]
    if len(shape) > 1:
        found += [shape[::-1], [shape[-1], -1]]
    return b.pick([one for one in found if one != shape])


@consumes
def _flatten(b: Building, v: str) -> str:
    return b.call("torch.flatten", v, *b.pick(((), (0, 1), (-2, -1)) if b.of(v).ndim > 1 else ((),)))


@consumes
def _unflatten(b: Building, v: str) -> str:
    needs_dims(b, v)
    dim = b.dim(v)
    size = sizes_of(b, v)[dim]
    return b.call("torch.unflatten", v, dim, b.pick([[1, size], [size, 1], *([[2, size // 2]] * (size % 2 == 0))]))


@consumes
def _transpose(b: Building, v: str) -> str:
    needs_dims(b, v, 2)
    return b.call("transpose.int", v, *b.pick(((0, 1), (-1, 0), (-2, -1))))


@consumes
def _permute(b: Building, v: str) -> str:
    needs_dims(b, v, 2)
    dims = list(range(b.of(v).ndim))
    return b.call("permute.default", v, b.pick((dims[::-1], [*dims[1:], 0], [-1, *dims[:-1]])))


@consumes
def _t(b: Building, v: str) -> str:
    return b.call("t.default", v)


@consumes
def _movedim(b: Building, v: str) -> str:
    needs_dims(b, v, 2)
    return b.call("torch.movedim", v, *b.pick(((0, -1), (-1, 0))))


@consumes
def _unsqueeze(b: Building, v: str) -> str:
    return b.call("unsqueeze.default", v, b.pick(range(-b.of(v).ndim - 1, b.of(v).ndim + 1)))


@consumes
def _squeeze(b: Building, v: str) -> str:
    wide = b.call("unsqueeze.default", v, b.pick(range(b.of(v).ndim + 1)))
    ones = [dim for dim, size in enumerate(sizes_of(b, wide)) if size == 1]
    name, *rest = b.way(("squeeze.default",), ("squeeze.dim", b.pick(ones)), ("squeeze.dims", ones))
    return b.call(name, wide, *rest)


@consumes
def _expand(b: Building, v: str) -> str:
    shape = sizes_of(b, v)
    if b.chance(0.5):
        return b.call("expand.default", v, [b.pick((2, b.mesh.world_size, *shape)), *shape])
    place = b.pick(range(len(shape) + 1))
    wide = b.call("unsqueeze.default", v, place)
    return b.call("expand.default", wide, [*shape[:place], b.pick((2, 3, b.mesh.world_size)), *shape[place:]])


@consumes
def _repeat(b: Building, v: str) -> str:
    name, *rest = b.way(
        ("repeat.default", [2, *[1] * b.of(v).ndim]),
        ("torch.tile", [2] * max(1, b.of(v).ndim)),
        ("torch.repeat_interleave", 2, *([0] if b.of(v).ndim else [])),
    )
    return b.call(name, v, *rest)


@consumes
def _flip(b: Building, v: str) -> str:
    needs_dims(b, v)
    if b.chance(0.5):
        return b.call("flip.default", v, [b.dim(v)])
    return b.call("roll.default", v, [1], [b.dim(v) % b.of(v).ndim])


@consumes
def _split(b: Building, v: str) -> str:
    needs_dims(b, v)
    dim = b.dim(v)
    size = sizes_of(b, v)[dim]
    name, *rest = b.way(
        ("split.Tensor", 2),
        ("split_with_sizes.default", [1, size - 1]),
        ("chunk.default", 2),
        ("tensor_split.sections", 2),
    )
    parts = b.call(name, v, *rest, dim)
    return _used(b, f"{parts}.{b.pick((0, len(b.values[parts]) - 1))}")


def _used(b: Building, part: str) -> str:
    """Use one of several results on, sometimes."""
    return b.call("mul.Scalar", part, 3) if b.of(part).dtype != torch.bool else b.call("logical_not.default", part)


@consumes
def _unbind(b: Building, v: str) -> str:
    needs_dims(b, v)
    parts = b.call("unbind.int", v, b.dim(v))
    return _used(b, f"{parts}.{b.pick((0, len(b.values[parts]) - 1))}")


@consumes
def _cat(b: Building, v: str) -> str:
    needs_dims(b, v)
    other = b.like(v)
    return b.call("cat.default", b.pick(([v, other], [other, v], [v, v], [v, other, v])), b.dim(v))


@consumes
def _stack(b: Building, v: str) -> str:
    other = b.like(v)
    return b.call("stack.default", b.pick(([v, other], [other, v], [v, v])), b.pick((0, -1)))
