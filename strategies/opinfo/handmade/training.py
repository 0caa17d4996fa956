"""Calls of ops that run in a training step and that no OpInfo dispatches to: lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from strategies.opinfo.handmade.sample import Draw, Way

__all__ = ["WAYS"]

_SHAPES = ((5, 7), (2, 1), (6, 4), (3, 8), (9, 2))


# --------------------------------------------------------------------------------------------------------------- lists
def _matrices(draw: Draw, count: int = 2) -> list[torch.Tensor]:
    """Return the tensors of a list, of different shapes."""
    rows, columns = _SHAPES[draw.size]
    return [draw.values(rows + i, columns + 2 * i) for i in range(count)]


def _like(draw: Draw, tensors: list[torch.Tensor], *, positive: bool = False) -> list[torch.Tensor]:
    made = [draw.values(*tensor.shape) for tensor in tensors]
    return [tensor.abs() for tensor in made] if positive else made


_UNSAFE = "its kernel does not check sizes: only what DTensor claims is tried"


def _adam(amsgrad: bool) -> Callable[[Draw], tuple[object, ...]]:
    def make(draw: Draw) -> tuple[object, ...]:
        parameters = _matrices(draw)
        squares = _like(draw, parameters, positive=True)
        most = _like(draw, parameters, positive=True) if amsgrad else []
        steps = [torch.tensor(2.0 + i) for i, _ in enumerate(parameters)]
        return parameters, _like(draw, parameters), _like(draw, parameters), squares, most, steps

    return make


def _adam_options(amsgrad: bool) -> Callable[[Draw], Mapping[str, object]]:
    options = {"beta1": 0.75, "beta2": 0.5, "weight_decay": 0.25, "eps": 1e-3, "amsgrad": amsgrad, "maximize": False}
    return lambda draw: {"lr": 0.5, **options}


def _sgd(momentum: float) -> Callable[[Draw], tuple[object, ...]]:
    def make(draw: Draw) -> tuple[object, ...]:
        parameters = _matrices(draw)
        return parameters, _like(draw, parameters), _like(draw, parameters) if momentum else []

    return make


def _sgd_options(momentum: float, first: bool) -> Callable[[Draw], Mapping[str, object]]:
    options = {"weight_decay": 0.25, "momentum": momentum, "lr": 0.5, "dampening": 0.0, "nesterov": False}
    return lambda draw: {**options, "maximize": False, "is_first_step": first}


_ADAGRAD = {"lr": 0.5, "lr_decay": 0.25, "weight_decay": 0.25, "eps": 1e-3, "maximize": False}


def _adagrad(draw: Draw) -> tuple[object, ...]:
    parameters = _matrices(draw)
    steps = [torch.tensor(2.0 + i) for i, _ in enumerate(parameters)]
    return parameters, _like(draw, parameters), _like(draw, parameters, positive=True), steps


def _optimisers() -> Iterator[Way]:
    for name in ("_fused_adam", "_fused_adamw"):
        for amsgrad in (False, True):
            label = "amsgrad" if amsgrad else "plain"
            yield Way(f"aten.{name}_.default", label, _adam(amsgrad), _adam_options(amsgrad), claims_only=_UNSAFE)
    for momentum, first in ((0.0, True), (0.5, True), (0.5, False)):
        label = f"momentum {momentum}, {'first' if first else 'later'} step"
        yield Way("aten._fused_sgd_.default", label, _sgd(momentum), _sgd_options(momentum, first), claims_only=_UNSAFE)
    yield Way("aten._fused_adagrad_.default", "plain", _adagrad, lambda draw: _ADAGRAD, claims_only=_UNSAFE)


WAYS = (
    Way("aten._foreach_pow.ScalarAndTensor", "base 2", lambda draw: (2, _matrices(draw))),
    *_optimisers(),
)
