"""Calls of lookups of rows and their gradients: norms of rows, pooled bags, and what their backwards are given.

A backward of bags is given what the forward saved, so it is saved here by the forward itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from strategies.opinfo.handmade.sample import Draw, Way

__all__ = ["WAYS"]

aten = torch.ops.aten

_SUM, _MEAN, _MAX = 0, 1, 2
_MODES = {_SUM: "sum", _MEAN: "mean", _MAX: "max"}
_NONE = -1


@dataclass(frozen=True)
class _Size:
    rows: int
    columns: int
    bags: int
    positions: int


# Rows, columns, bags and positions differ. Ranks cut the first two unevenly, and the third evenly.
_SIZES = (_Size(7, 5, 4, 9), _Size(17, 6, 3, 16), _Size(8, 4, 12, 24), _Size(4, 3, 2, 7), _Size(5, 4, 3, 13))

Arguments = tuple[object, ...]


def _ids(draw: Draw, *shape: int) -> torch.Tensor:
    """Return ids of rows, of which the first is looked up twice and the last row once at least."""
    rows = _SIZES[draw.size].rows
    ids = draw.integers(0, rows, *shape)
    flat = ids.view(-1)
    if flat.numel() > 3:
        flat[1], flat[-1] = flat[0], rows - 1
    elif flat.numel() == 2:
        flat[1] = flat[0]
    return ids


def _offsets(draw: Draw, *, last: bool = False, even: bool = False) -> torch.Tensor:
    """Return where bags start; unless they are ``even``, one bag is empty and another has one position."""
    size = _SIZES[draw.size]
    if even:
        edges = torch.arange(0, size.positions + 1, size.positions // size.bags)[: size.bags + 1]
        edges[-1] = size.positions
    else:
        inner = draw.integers(1, size.positions, size.bags - 1).sort().values
        if inner.numel() > 1:
            inner[1] = inner[0]
        edges = torch.cat([torch.tensor([0]), inner, torch.tensor([size.positions])])
    return edges if last else edges[:-1]


def _weight(draw: Draw) -> torch.Tensor:
    size = _SIZES[draw.size]
    return draw.values(size.rows, size.columns)


def _samples(draw: Draw, given: bool) -> torch.Tensor | None:
    return draw.values(_SIZES[draw.size].positions) if given else None


# ------------------------------------------------------------------------------------------------------- norms of rows
def _renorm(order: float, *, two: bool = False) -> Callable[[Draw], Arguments]:
    def make(draw: Draw) -> Arguments:
        size = _SIZES[draw.size]
        ids = _ids(draw, 2, size.bags) if two else _ids(draw, size.positions)
        # the smallest norm of rows stays and the largest is scaled; no norm is the limit itself
        return _weight(draw), ids, 1.3 if order == math.inf else 2.7, order

    return make


def _renorm_output(draw: Draw) -> Mapping[str, object]:
    size = _SIZES[draw.size]
    return {"out": torch.full((size.rows, size.columns), math.nan, dtype=draw.dtype)}


def _renorms() -> Iterator[Way]:
    for order in (2.0, 1.0, math.inf, 3.0):
        yield Way("aten.embedding_renorm_.default", f"norm {order}", _renorm(order))
        yield Way("aten.embedding_renorm.default", f"norm {order}", _renorm(order))
        yield Way("aten.embedding_renorm.out", f"norm {order}", _renorm(order), _renorm_output)
    yield Way("aten.embedding_renorm_.default", "ids of two dims", _renorm(2.0, two=True))


# ------------------------------------------------------------------------------------------------------------- lookups
def _gradient(padded: bool, scaled: bool, shape: Callable[[_Size], tuple[int, ...]]) -> Callable[[Draw], Arguments]:
    """Return a function that makes the arguments of a gradient of a lookup, without ``sparse``."""

    def make(draw: Draw) -> Arguments:
        size = _SIZES[draw.size]
        ids = _ids(draw, *shape(size))
        padding = size.rows // 2 if padded else _NONE
        if padded:
            ids.view(-1)[2] = padding
        return draw.values(*ids.shape, size.columns), ids, size.rows, padding, scaled

    return make


def _dense(make: Callable[[Draw], Arguments]) -> Callable[[Draw], Arguments]:
    return lambda draw: (*make(draw), False)


def _gradient_output(draw: Draw) -> Mapping[str, object]:
    return _renorm_output(draw)


def _lookup_gradients() -> Iterator[Way]:
    flat = lambda size: (size.positions,)  # noqa: E731
    square = lambda size: (3, size.bags)  # noqa: E731
    for label, padded, scaled, shape in (
        ("plain", False, False, flat),
        ("padding", True, False, flat),
        ("by frequency", False, True, flat),
        ("padding, by frequency", True, True, square),
        ("ids of two dims", False, False, square),
        ("two ids of one row", False, False, lambda size: (2,)),
        ("one id", False, False, lambda size: (1,)),
        ("columns of one id", False, True, lambda size: (size.positions, 1)),
    ):
        make = _gradient(padded, scaled, shape)
        yield Way("aten.embedding_backward.default", label, _dense(make), exact=not scaled)
        if label != "plain":
            row = "nn.functional.embedding"
            yield Way("aten.embedding_dense_backward.default", label, make, exact=not scaled, row=row)


# ---------------------------------------------------------------------------------------------------------------- bags
@dataclass(frozen=True)
class _Bags:
    """One way of pooling bags."""

    mode: int
    padded: bool = False
    scaled: bool = False
    samples: bool = False
    last: bool = False
    even: bool = False

    @property
    def label(self) -> str:
        words = {
            "padding": self.padded,
            "by frequency": self.scaled,
            "sample weights": self.samples,
            "last offset": self.last,
            "even bags": self.even,
        }
        return ", ".join([_MODES[self.mode], *(word for word, holds in words.items() if holds)])

    def ids(self, draw: Draw) -> tuple[torch.Tensor, int]:
        """Return ids and the id of padding, which is looked up."""
        size = _SIZES[draw.size]
        ids = _ids(draw, size.positions)
        if self.padded:
            ids[2] = size.rows // 2
        return ids, size.rows // 2 if self.padded else _NONE

    def call(self, draw: Draw) -> Arguments:
        """Return the arguments of a pooled lookup."""
        ids, padding = self.ids(draw)
        offsets = _offsets(draw, last=self.last, even=self.even)
        samples = _samples(draw, self.samples)
        return _weight(draw), ids, offsets, self.scaled, self.mode, False, samples, self.last, padding

    def saved(self, draw: Draw) -> tuple[torch.Tensor, Arguments, list[torch.Tensor]]:
        """Return a gradient of the pooled rows, the arguments of the lookup, and what it has saved."""
        call = self.call(draw)
        pooled, *saved = aten._embedding_bag.default(*call)
        return draw.values(*pooled.shape), call, saved


def _composite(bags: _Bags) -> Callable[[Draw], Arguments]:
    return lambda draw: bags.call(draw)[:-1]


def _composite_padded(bags: _Bags) -> Callable[[Draw], Arguments]:
    def make(draw: Draw) -> Arguments:
        *call, padding = bags.call(draw)
        return *call, None if padding == _NONE else padding

    return make


def _backward(bags: _Bags) -> Callable[[Draw], Arguments]:
    def make(draw: Draw) -> Arguments:
        grad, call, (bag_of, counts, winners) = bags.saved(draw)
        weight, ids, offsets, scaled, mode, _, samples, _, padding = call
        assert isinstance(weight, torch.Tensor)
        return grad, ids, offsets, bag_of, counts, winners, weight.shape[0], scaled, mode, False, samples, padding

    return make


def _dense_backward(bags: _Bags) -> Callable[[Draw], Arguments]:
    def make(draw: Draw) -> Arguments:
        grad, ids, _, *rest = _backward(bags)(draw)
        bag_of, counts, winners, rows, scaled, mode, _, samples, padding = rest
        return grad, ids, bag_of, counts, winners, rows, scaled, mode, samples, padding

    return make


def _sample_backward(bags: _Bags) -> Callable[[Draw], Arguments]:
    def make(draw: Draw) -> Arguments:
        grad, call, (bag_of, _, _) = bags.saved(draw)
        weight, ids, offsets, _, mode, _, _, _, padding = call
        return grad, weight, ids, offsets, bag_of, mode, padding

    return make


def _sample_output(draw: Draw) -> Mapping[str, object]:
    return {"out": torch.full((_SIZES[draw.size].positions,), math.nan, dtype=draw.dtype)}


_FITTING = "its arguments belong together, and its kernel does not check them: only what DTensor claims is tried"

_POOLED = (
    *(_Bags(mode) for mode in _MODES),
    *(_Bags(mode, padded=True) for mode in _MODES),
    *(_Bags(mode, last=True, padded=mode == _MEAN) for mode in _MODES),
    *(_Bags(mode, even=True) for mode in _MODES),
    _Bags(_SUM, samples=True),
    _Bags(_SUM, samples=True, padded=True),
)


def _bag_ways() -> Iterator[Way]:
    row = "nn.functional.embedding_bag"
    for bags in _POOLED:
        label, exact = bags.label, bags.mode != _MEAN
        for name in ("_embedding_bag", "_embedding_bag_forward_only"):
            yield Way(f"aten.{name}.default", label, bags.call, exact=exact, claims_only=_FITTING, row=row)
        if not bags.padded:
            yield Way("aten.embedding_bag.default", label, _composite(bags), exact=exact, claims_only=_FITTING)
        yield Way("aten.embedding_bag.padding_idx", label, _composite_padded(bags), exact=exact, claims_only=_FITTING)
        if not bags.last:  # aten's kernel needs the saved tensors of offsets without the last one
            yield Way(
                "aten._embedding_bag_dense_backward.default",
                label,
                _dense_backward(bags),
                exact=exact,
                claims_only=_FITTING,
            )
            yield Way(
                "aten._embedding_bag_dense_backward.out",
                label,
                _dense_backward(bags),
                _gradient_output,
                exact,
                claims_only=_FITTING,
            )
            yield Way(
                "aten._embedding_bag_backward.default",
                label,
                _backward(bags),
                exact=exact,
                claims_only=_FITTING,
                row=row,
            )
        if bags.mode == _SUM and not bags.last:
            op = "aten._embedding_bag_per_sample_weights_backward"
            make = _sample_backward(bags)
            yield Way(f"{op}.default", label, make, exact=True, claims_only=_FITTING, row=row)
            yield Way(f"{op}.out", label, make, _sample_output, True, claims_only=_FITTING, row=row)


WAYS = (*_renorms(), *_lookup_gradients(), *_bag_ways())
