"""Calls of norms over the last dims, and of weights over all dims but one, as training makes them.

OpInfo normalises matrices at most, or all dims, so that nearly no dim is left to be sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from strategies.opinfo.handmade.sample import Draw, Way

__all__ = ["WAYS"]

_SHAPES = ((5, 7), (2, 1), (6, 4), (3, 8), (9, 2))
"""The first and the last extent of the input, at each size."""

_EPS = 0.5

_UNSAFE = "its kernel does not check sizes: only what DTensor claims is tried"

_NAMES = {
    (True, True): "weight and bias", (True, False): "weight alone", (False, True): "bias alone",
    (False, False): "neither weight nor bias",
}  # fmt: skip

_MASKS = (
    ("with weight", [True, True], True),
    ("without weight", [True, False], False),
    ("only the weight's gradient", [False, True], True),
    ("only the input's gradient", [True, False], True),
)
"""Which gradients of RMSNorm are asked for, and whether there is a weight."""


def _input(draw: Draw) -> torch.Tensor:
    rows, columns = _SHAPES[draw.size]
    return draw.values(rows, 3, columns)


def _scaled(draw: Draw, shape: list[int], given: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
    return tuple(draw.values(*shape) if each else None for each in given)


def _forward(last: int, given: tuple[bool, ...]) -> Callable[[Draw], tuple[object, ...]]:
    """Return a function that makes the arguments; ``given`` says of each of weight and bias whether there is one."""

    def make(draw: Draw) -> tuple[object, ...]:
        value = _input(draw)
        shape = list(value.shape[-last:])
        return value, shape, *_scaled(draw, shape, given), _EPS

    return make


def _layer_norm_backward(last: int, given: tuple[bool, ...]) -> Callable[[Draw], tuple[object, ...]]:
    def make(draw: Draw) -> tuple[object, ...]:
        grad, value = _input(draw), _input(draw)
        dims = list(range(-last, 0))
        shape = list(value.shape[-last:])
        mean = value.mean(dims, keepdim=True)
        rstd = (value.var(dims, correction=0, keepdim=True) + _EPS).rsqrt()
        return grad, value, shape, mean, rstd, *_scaled(draw, shape, given), [True, *given]

    return make


def _rms_norm_backward(mask: list[bool], with_weight: bool, last: int) -> Callable[[Draw], tuple[object, ...]]:
    """Return a function that makes the arguments; the last dims, ``last`` of them, are normalised."""

    def make(draw: Draw) -> tuple[object, ...]:
        grad, value = _input(draw), _input(draw)
        dims = list(range(-last, 0))
        rstd = (value.square().mean(dims, keepdim=True) + _EPS).rsqrt()
        shape = list(value.shape[-last:])
        return grad, value, shape, rstd, *_scaled(draw, shape, (with_weight,)), mask

    return make


def _weight_norm(dim: int) -> Callable[[Draw], tuple[torch.Tensor, torch.Tensor, int]]:
    """Return a function that makes weights of three dims, their lengths along all dims but ``dim``, and ``dim``."""

    def make(draw: Draw) -> tuple[torch.Tensor, torch.Tensor, int]:
        value = _input(draw)
        value = torch.where(value == 0, 1, value)  # a row of zeros has no direction
        lengths = [extent if place == dim % value.ndim else 1 for place, extent in enumerate(value.shape)]
        return value, draw.values(*lengths), dim

    return make


def _weight_norm_backward(dim: int) -> Callable[[Draw], tuple[object, ...]]:
    def make(draw: Draw) -> tuple[object, ...]:
        value, length, _ = _weight_norm(dim)(draw)
        _, norms = torch.ops.aten._weight_norm_interface.default(value, length, dim)
        return draw.values(*value.shape), value, length, norms, dim

    return make


def _ways() -> Iterator[Way]:
    for dim in (0, 2):  # the kernels take the first dim and the last one
        yield Way("aten._weight_norm_interface.default", f"dim {dim}", _weight_norm(dim))
        make = _weight_norm_backward(dim)
        yield Way("aten._weight_norm_interface_backward.default", f"dim {dim}", make, claims_only=_UNSAFE)
    for last in (1, 2):
        for given, name in _NAMES.items():
            label, row = f"{name}, {last} dims", "nn.functional.layer_norm"
            yield Way("aten.native_layer_norm.default", label, _forward(last, given), row=row, usual=True)
            make = _layer_norm_backward(last, given)
            backward = "aten.native_layer_norm_backward.default"
            yield Way(backward, label, make, claims_only=_UNSAFE, row=row, usual=True)
        for weight in (True, False):
            label, row = f"{'with' if weight else 'without'} weight, {last} dims", "nn.functional.rms_norm"
            yield Way("aten._fused_rms_norm.default", label, _forward(last, (weight,)), row=row, usual=True)
        for text, mask, weight in _MASKS:
            make = _rms_norm_backward(mask, weight, last)
            yield Way("aten._fused_rms_norm_backward.default", f"{text}, {last} dims", make)


WAYS = tuple(_ways())
