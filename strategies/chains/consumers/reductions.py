"""Reductions and scans of a value."""

from __future__ import annotations

from strategies.chains.building import Building
from strategies.chains.consumers.table import consumes, needs_dims, no_ties


@consumes
def _sum(b: Building, v: str) -> str:
    if b.chance(0.3) or not b.of(v).ndim:
        return b.call("sum.default", v)
    return b.call("sum.dim_IntList", v, [b.dim(v)], b.chance(0.3))


@consumes
def _mean(b: Building, v: str) -> str:
    if b.chance(0.3) or not b.of(v).ndim:
        result = b.call("mean.default", v)
    else:
        result = b.call("mean.dim", v, [b.dim(v)], b.chance(0.3))
    b.rounds()
    return result


@consumes
def _extreme(b: Building, v: str) -> str:
    needs_dims(b, v)
    no_ties(b, v)
    dim = b.dim(v)
    name, *rest = b.way(("amax.default", [dim]), ("amin.default", [dim]), ("max.dim", dim), ("argmax.default", dim))
    result = b.call(name, v, *rest)
    return f"{result}.0" if name == "max.dim" else result


@consumes
def _prod(b: Building, v: str) -> str:
    needs_dims(b, v)
    return b.call("prod.dim_int", v, b.dim(v))


@consumes
def _norm(b: Building, v: str) -> str:
    order = b.pick((2, 1, 3, float("inf")))
    if order == float("inf"):
        no_ties(b, b.call("abs.default", v))
    rest = ([b.dim(v)],) if b.of(v).ndim and b.chance(0.5) else ()
    result = b.call("linalg_vector_norm.default", v, order, *rest)
    b.rounds()
    return result


@consumes
def _variance(b: Building, v: str) -> str:
    needs_dims(b, v)
    result = b.call(b.pick(("var.correction", "std.correction")), v, [b.dim(v)], correction=b.pick((0, 1)))
    b.rounds()
    return result


@consumes
def _softmax(b: Building, v: str) -> str:
    needs_dims(b, v)
    path = b.pick(("torch.softmax", "torch.log_softmax", "torch.logsumexp"))
    result = b.call(path, v, b.dim(v))
    b.rounds()
    return result


@consumes
def _cumsum(b: Building, v: str) -> str:
    needs_dims(b, v)
    return b.call("cumsum.default", v, b.dim(v))


@consumes
def _any(b: Building, v: str) -> str:
    b.decides(v)
    kind = b.pick(("any", "all"))
    if b.of(v).ndim and b.chance(0.6):
        return b.call(f"{kind}.dim", v, b.dim(v))
    return b.call(f"{kind}.default", v)


@consumes
def _count(b: Building, v: str) -> str:
    b.decides(v)
    return b.call("torch.count_nonzero", v, *((b.dim(v),) if b.of(v).ndim and b.chance(0.6) else ()))
