"""Products with matrices, norms of layers, and losses."""

from __future__ import annotations

from strategies.chains.building import Building, UnfitError
from strategies.chains.consumers.table import consumes, matrix, needs_dims, sizes_of


@consumes
def _linear(b: Building, v: str) -> str:
    needs_dims(b, v)
    inner, outer = sizes_of(b, v)[-1], b.pick((2, b.mesh.world_size, sizes_of(b, v)[-1]))
    weight = b.like(v, outer, inner)
    bias = [b.like(v, outer)] if b.chance(0.5) else []
    return b.call("torch.nn.functional.linear", v, weight, *bias)


@consumes
def _matmul(b: Building, v: str) -> str:
    rows, columns = matrix(b, v)
    if b.chance(0.5):
        return b.call(b.pick(("mm.default", "matmul.default")), v, b.like(v, columns, 3))
    return b.call(b.pick(("mm.default", "matmul.default")), b.like(v, 3, rows), v)


@consumes
def _addmm(b: Building, v: str) -> str:
    """Add the value to a product of matrices."""
    rows, columns = matrix(b, v)
    inner = b.pick((2, rows))
    scales = b.pick(({}, {"beta": 2}, {"beta": 0}, {"alpha": 2}))
    return b.call("addmm.default", v, b.like(v, rows, inner), b.like(v, inner, columns), **scales)


@consumes
def _einsum(b: Building, v: str) -> str:
    rows, columns = matrix(b, v)
    other = b.like(v, rows, columns)
    return b.call("torch.einsum", b.pick(("ij,ij->i", "ij,kj->ik", "ij,ik->jk")), v, other)


@consumes
def _layer_norm(b: Building, v: str) -> str:
    needs_dims(b, v)
    size = sizes_of(b, v)[-1]
    if size < 2 or float(b.of(v).std(-1).min() if b.of(v).is_floating_point() else 0) < 0.3:
        raise UnfitError("no variance")
    path = b.pick(("torch.nn.functional.layer_norm", "torch.nn.functional.rms_norm"))
    weight = [b.floats(size)] if b.chance(0.6) else []
    result = b.call(path, v, [size], *weight)
    b.rounds()
    return result


@consumes
def _loss(b: Building, v: str) -> str:
    """Compute a loss of scores. DTensor decomposes most other losses, and its ranks may then wait for each other."""
    rows, columns = matrix(b, v)
    if b.of(v).dtype != b.dtype:
        raise UnfitError("no scores")
    target = b.ids(rows, below=columns)
    result = b.call("torch.nn.functional.cross_entropy", v, target, reduction=b.pick(("mean", "sum", "none")))
    b.rounds()
    return result
