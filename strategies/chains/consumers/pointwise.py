"""Pointwise ops, comparisons and casts of a value."""

from __future__ import annotations

import torch

from strategies.chains.building import Building, UnfitError
from strategies.chains.consumers.table import consumes, sizes_of


@consumes
def _linear_pointwise(b: Building, v: str) -> str:
    name, *rest = b.way(
        ("neg.default",),
        ("mul.Scalar", -2),
        ("div.Scalar", 2),
        ("add.Scalar", 3),
        ("sub.Scalar", 1),
        ("rsub.Scalar", 4),
    )
    return b.call(name, v, *rest)


@consumes
def _nonlinear(b: Building, v: str) -> str:
    name = b.pick(("abs.default", "relu.default", "sign.default", "clamp.default", "square.default", "sigmoid.default"))
    if name in ("relu.default", "sign.default", "clamp.default", "abs.default"):
        b.decides(v)
    result = b.call(name, v, *([-1, 2] if name == "clamp.default" else []))
    if name == "sigmoid.default":
        b.rounds()
    return result


@consumes
def _with_another(b: Building, v: str) -> str:
    shape = sizes_of(b, v)
    other = b.like(v, *b.pick((shape, shape, shape[-1:], [2, *shape], [1] * len(shape))))
    path = b.pick(("add.Tensor", "sub.Tensor", "mul.Tensor", "maximum.default"))
    if path == "maximum.default":
        b.decides(v)
        if b.of(v).is_floating_point():
            raise UnfitError("ties share a gradient")
    return b.call(path, *b.pick(((v, other), (other, v))))


@consumes
def _with_itself(b: Building, v: str) -> str:
    """Use the value twice; a product keeps it for the backward pass."""
    path = b.pick(("add.Tensor", "mul.Tensor", "sub.Tensor"))
    if path == "sub.Tensor":
        return b.call(path, b.call("mul.Scalar", v, 3), v)
    return b.call(path, v, v)


@consumes
def _added_with_alpha(b: Building, v: str) -> str:
    other = b.like(v)
    return b.call(b.pick(("add.Tensor", "sub.Tensor")), *b.pick(((v, other), (other, v))), alpha=b.pick((2, -1, 0)))


@consumes
def _divided(b: Building, v: str) -> str:
    """Divide by the value, or the value by another, as in a normalisation."""
    if b.of(v).dtype == torch.bool or float(b.of(v).abs().min()) < 0.5:
        raise UnfitError("a small divisor")
    other = b.like(v)
    result = b.call("div.Tensor", *b.pick(((v, other), (other, v))))
    b.rounds()
    return result


@consumes
def _compared(b: Building, v: str) -> str:
    b.decides(v)
    if b.chance(0.5):
        return b.call(b.pick(("gt.Scalar", "eq.Scalar", "ne.Scalar", "le.Scalar")), v, b.pick((0, 1, 2)))
    if b.chance(0.4):
        return b.call(b.pick(("isnan.default", "isfinite.default", "isinf.default")), v)
    return b.call(b.pick(("eq.Tensor", "gt.Tensor", "ne.Tensor", "lt.Tensor")), v, b.like(v))


@consumes
def _logical(b: Building, v: str) -> str:
    b.decides(v)
    name = b.pick(
        ("logical_not", "logical_and", "logical_or", "logical_xor", "bitwise_not", "bitwise_or", "bitwise_and")
    )
    if name.endswith("not"):
        return b.call(f"{name}.default", v)
    suffix = "default" if name.startswith("logical") else "Tensor"
    return b.call(f"{name}.{suffix}", v, b.like(v))


@consumes
def _cast(b: Building, v: str) -> str:
    dtype = b.pick((torch.float64, torch.float32, torch.int64, torch.bool, torch.uint8, torch.float16))
    if b.of(v).is_floating_point() and not dtype.is_floating_point:
        b.decides(v)
        if not b.exact or (dtype == torch.uint8 and float(b.of(v).min()) < 0):
            raise UnfitError("rounding decides, or the cast has no defined result")
    return b.call(b.pick(("_to_copy.default", "torch.Tensor.to")), v, dtype=dtype)


@consumes
def _cast_and_reduced(b: Building, v: str) -> str:
    """Make numbers of bools and count them, or the other way round."""
    b.decides(v)
    to = b.pick((torch.float64, torch.int64)) if b.of(v).dtype == torch.bool else torch.bool
    cast = b.call("_to_copy.default", v, dtype=to)
    return b.call(b.pick(("sum.default", "cumsum.default", "any.default")), cast, *())


@consumes
def _promoted(b: Building, v: str) -> str:
    """Combine with a tensor of another dtype."""
    shape = sizes_of(b, v)
    kind = b.pick(("bool", "float", "integer"))
    other = b.bools(*shape) if kind == "bool" else b.floats(*shape) if kind == "float" else b.ids(*shape, below=4)
    return b.call(b.pick(("add.Tensor", "mul.Tensor")), *b.pick(((v, other), (other, v))))


@consumes
def _item(b: Building, v: str) -> str:
    """Read the value as a number of Python, and multiply a tensor by it."""
    if b.of(v).numel() != 1:
        b.decides(v)
        v = b.call("any.default", v) if b.of(v).dtype == torch.bool else b.call("sum.default", v)
    number = b.call("torch.Tensor.item", v)
    return b.call("torch.mul", b.floats(b.rows), number)
