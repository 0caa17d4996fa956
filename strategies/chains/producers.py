"""Ops whose results wait for a reduction, or are masked, if their arguments are placed so.

Each makes a matrix, or a tensor without dims.
"""

from __future__ import annotations

import torch

from strategies.chains.building import Building, Part

__all__ = ["PRODUCERS"]


def _given(b: Building) -> str:
    """Return an argument, which the combination places."""
    kind = b.pick(("float", "float", "integer", "bool"))
    shape = b.pick((b.size(), b.size(), (2, *b.size()), (b.columns,), ()))
    if kind == "bool":
        return b.bools(*shape)
    return b.ids(*shape, below=5) if kind == "integer" else b.floats(*shape)


def _stacked(b: Building) -> str:
    """Add a tensor that is to be reduced over its first dim."""
    return b.floats(b.pending, *b.size())


def _reduced(b: Building, over_dim: str, over_all: str = "", *rest: object) -> str:
    """Reduce a tensor over a dim, or over all dims."""
    if over_all and b.chance(0.3):
        return b.call(over_all, b.floats(b.columns))
    if b.chance(0.2):
        return b.call(over_dim, b.floats(b.rows, b.pending), *rest, [-1], True)
    return b.call(over_dim, _stacked(b), *rest, [0])


def _sum(b: Building) -> str:
    return _reduced(b, "sum.dim_IntList", "sum.default")


def _mean(b: Building) -> str:
    b.rounds()
    return _reduced(b, "mean.dim", "mean.default")


def _max(b: Building) -> str:
    return _reduced(b, "amax.default")


def _min(b: Building) -> str:
    return _reduced(b, "amin.default")


def _product(b: Building) -> str:
    if b.chance(0.3):
        return b.call("prod.default", b.floats(3))
    return b.call("prod.dim_int", b.floats(min(b.pending, 4), *b.size()), 0)


def _norm(b: Building) -> str:
    b.rounds()
    order = b.pick((2, 2, 1, 3, float("inf"), float("-inf")))
    if b.chance(0.3):
        return b.call("linalg_vector_norm.default", b.floats(b.columns), order)
    return _reduced(b, "linalg_vector_norm.default", "", order)


def _lookup(b: Building) -> str:
    """Look up rows of a table, which are masked if the rows are sharded."""
    vocabulary = b.pick((3, 5, b.mesh.world_size, b.rows))
    weight = b.floats(vocabulary, b.columns)
    ids = b.ids(b.rows, below=vocabulary)
    padding = b.pick((-1, -1, 1))
    return b.call("embedding.default", weight, ids, padding)


def _two_lookups(b: Building) -> str:
    """Look up rows of two tables, so that two masks are alive."""
    first = _lookup(b)
    second = _lookup(b)
    return b.call("add.Tensor", first, second) if b.chance(0.5) else first


def _gather(b: Building) -> str:
    source = b.floats(b.pick((3, b.mesh.world_size + 1)), b.columns)
    index = b.ids(b.pick((1, b.rows)), b.columns, below=b.of(source).shape[0])
    return b.call("gather.default", source, 0, index)


def _index_select(b: Building) -> str:
    source = b.floats(b.pick((3, b.mesh.world_size + 1)), b.columns)
    return b.call("index_select.default", source, 0, b.ids(b.rows, below=b.of(source).shape[0]))


def _scatter_add(b: Building) -> str:
    target, source = b.floats(*b.size()), b.floats(b.pending, b.columns)
    index = b.ids(b.pending, b.columns, below=b.rows)
    return b.call("scatter_add.default", target, 0, index, source)


def _index_add(b: Building) -> str:
    target, source = b.floats(*b.size()), b.floats(b.pending, b.columns)
    return b.call("index_add.default", target, 0, b.ids(b.pending, below=b.rows), source)


def _index_put(b: Building) -> str:
    target, source = b.floats(*b.size()), b.floats(b.pending, b.columns)
    return b.call("index_put.default", target, [b.ids(b.pending, below=b.rows)], source, True)


def _product_of_matrices(b: Building) -> str:
    inner = b.pick((b.pending, b.rows))
    left, right = b.floats(b.rows, inner), b.floats(inner, b.columns)
    return b.call(b.pick(("mm.default", "matmul.default")), left, right)


def _linear(b: Building) -> str:
    inner = b.pick((b.pending, b.rows))
    weight = b.floats(b.columns, inner)
    bias = [b.floats(b.columns)] if b.chance(0.5) else []
    return b.call("torch.nn.functional.linear", b.floats(b.rows, inner), weight, *bias)


def _any(b: Building) -> str:
    """Ask whether any element is True, so that both answers occur and a single rank may decide."""
    kind = b.pick(("any", "all"))
    return _asked(b, kind, b.bools(b.pending, *b.size(), true=0.25 if kind == "any" else 0.75))


def _any_of_numbers(b: Building) -> str:
    """Ask the same of numbers, most of which are 0."""
    kind = b.pick(("any", "all"))
    numbers = b.ids(b.pending, *b.size(), below=2) if b.chance(0.5) else b.floats(b.pending, *b.size())
    return _asked(b, kind, numbers)


def _asked(b: Building, kind: str, tensor: str) -> str:
    if b.chance(0.3):
        return b.call(f"{kind}.default", tensor)
    return b.call(f"{kind}.dim", tensor, 0)


def _count(b: Building) -> str:
    found = b.bools(b.pending, *b.size())
    if b.chance(0.3):
        return b.call("torch.count_nonzero", found, *b.pick(((), (0,))))
    return b.call("sum.dim_IntList", found, [0]) if b.chance(0.7) else b.call("sum.default", found)


def _compared(b: Building) -> str:
    """Compare with what is close or equal."""
    left, right = b.floats(*b.size()), b.floats(*b.size())
    return b.call(b.pick(("eq.Tensor", "gt.Tensor", "le.Tensor", "ne.Tensor")), left, right)


def _pending_sum_of_two(b: Building) -> str:
    left = b.call("sum.dim_IntList", _stacked(b), [0])
    right = b.call(b.pick(("sum.dim_IntList", "amax.default")), _stacked(b), [0])
    return b.call(b.pick(("add.Tensor", "sub.Tensor", "mul.Tensor")), left, right)


def _scaled_sum(b: Building) -> str:
    total = _sum(b)
    name, *rest = b.way(("mul.Scalar", 2), ("div.Scalar", 2), ("neg.default",), ("_to_copy.default",))
    if name == "_to_copy.default":
        return b.call(name, total, dtype=b.pick((torch.float32, torch.int64, torch.bool)))
    return b.call(name, total, *rest)


PRODUCERS: dict[str, Part] = {
    "given": _given,
    "sum": _sum,
    "mean": _mean,
    "max": _max,
    "min": _min,
    "product": _product,
    "norm": _norm,
    "lookup": _lookup,
    "two_lookups": _two_lookups,
    "gather": _gather,
    "index_select": _index_select,
    "scatter_add": _scatter_add,
    "index_add": _index_add,
    "index_put": _index_put,
    "matmul": _product_of_matrices,
    "linear": _linear,
    "any": _any,
    "any_of_numbers": _any_of_numbers,
    "count": _count,
    "compared": _compared,
    "two_sums": _pending_sum_of_two,
    "scaled_sum": _scaled_sum,
}
"""The functions that begin a chain, by name."""
