"""Calls of ops that no OpInfo dispatches to and that run on any device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from strategies.opinfo.handmade.sample import Draw, Way

__all__ = ["WAYS"]

_SHAPES = ((5, 7), (2, 1), (6, 4), (3, 8), (9, 2))


def _matrix(draw: Draw) -> torch.Tensor:
    return draw.values(*_SHAPES[draw.size])


# --------------------------------------------------------------------------------------------------------------- views
def _viewed(given: torch.dtype, wanted: torch.dtype) -> Callable[[Draw], tuple[object, ...]]:
    def make(draw: Draw) -> tuple[object, ...]:
        rows, columns = _SHAPES[draw.size]
        values = draw.values(rows, columns * 2).to(given)
        return values, wanted

    return make


_VIEWS = (
    (torch.float64, torch.int64),
    (torch.float64, torch.float32),
    (torch.int32, torch.int64),
    (torch.int32, torch.float32),
)


# ------------------------------------------------------------------------------------------------------------- dropout
def _dropout(probability: float, train: bool) -> Callable[[Draw], tuple[object, ...]]:
    return lambda draw: (_matrix(draw), probability, train)


def _dropout_buffers(draw: Draw) -> Mapping[str, object]:
    shape = _SHAPES[draw.size]
    return {
        "out0": torch.full(shape, float("nan"), dtype=draw.dtype),
        "out1": torch.ones(shape, dtype=torch.bool),
    }


def _converted(dtype: torch.dtype) -> Callable[[Draw], tuple[object, ...]]:
    return lambda draw: (_matrix(draw), dtype)


def _border_integers(draw: Draw) -> tuple[object, ...]:
    """Return integers of which some are just too large, or just too small, for a byte with a sign."""
    values = draw.integers(126, 131, *_SHAPES[draw.size])
    return (-1 - values if draw.number % 2 else values,)


def _diagonals(draw: Draw) -> tuple[object, ...]:
    return (torch.diag_embed(draw.values(_SHAPES[draw.size][0], 3)),)


def _tolerances(draw: Draw) -> Mapping[str, object]:
    """Return a tolerance for each matrix, none of which is near to one of its values."""
    return {"atol": 0.5 + 2 * draw.integers(0, 2, _SHAPES[draw.size][0]).to(draw.dtype)}


def _rrelu(draw: Draw) -> tuple[object, ...]:
    value = _matrix(draw)
    return value, torch.zeros_like(value), 0.25, 0.5, False


WAYS = (
    *(Way("aten.view.dtype", f"{a} as {b}", _viewed(a, b), exact=True) for a, b in _VIEWS),
    *(
        Way("aten.native_dropout.default", f"p={p}, train={train}", _dropout(p, train), exact=True)
        for p, train in ((0.0, True), (1.0, True), (0.5, False))
    ),
    Way("aten.native_dropout.out", "p=1.0", _dropout(1.0, True), _dropout_buffers, exact=True),
    Way("aten.rrelu_with_noise_functional.default", "not training", _rrelu, exact=True),
    Way(
        "aten._to_copy.default", "integers with fewer bits", _border_integers, lambda draw: {"dtype": torch.int8},
        exact=True, row="to",
    ),
    Way(
        "aten.linalg_pinv.atol_rtol_tensor", "a tolerance for each matrix", _diagonals, _tolerances, row="linalg.pinv",
    ),
    Way("prims.view_of.default", "a matrix", lambda draw: (_matrix(draw),), exact=True),
    Way(
        "prims.conj_physical.default", "complex numbers",
        lambda draw: (torch.complex(_matrix(draw), _matrix(draw)),), exact=True,
    ),
    *(
        Way("prims.convert_element_type.default", f"to {to}", _converted(to), exact=True)
        for to in (torch.float32, torch.int64, torch.bool)
    ),
)  # fmt: skip
