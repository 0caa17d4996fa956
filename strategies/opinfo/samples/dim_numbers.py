"""Calls with another number of dims: OpInfo often has a single one, and a rule may hold for that one alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from strategies.opinfo.calls.call import Call, attempt, parameters
from strategies.opinfo.samples.argument_spellings import DIMS, Variation, with_value

__all__ = ["batch_dims", "batch_dims_of_gradients", "dim_numbers", "dims_among_many"]

_WANTED = (2, 1, 4, 3)
"""The numbers of dims, the one that users have most first."""
_MOST_ELEMENTS = 1 << 14
_SIZES = {"size": 2, "sizes": 2, "shape": 2, "repeats": 1, "output_size": 2}
"""Lists that may have an entry for each dim, and the entry for a new dim."""


def dim_numbers(call: Call) -> Iterator[Variation]:
    """Yield the calls whose tensors have more dims, or fewer; an op that torch refuses for it is not yielded.

    All tensors that have the most dims change together, and then each tensor alone. Dims that the arguments name move
    along. Pointwise ops are left out: they broadcast, which is a class of its own.
    """
    most = max((tensor.ndim for tensor in call.tensors), default=0)
    if not most or torch.Tag.pointwise in call.op.tags:
        return
    for wanted in _WANTED:
        if wanted != most:
            yield Variation(f"{wanted} dims", partial(_with_dims, None, wanted))
    if len(call.tensors) > 1:
        for number, tensor in enumerate(call.tensors):
            for wanted in (tensor.ndim + 1, tensor.ndim - 1):
                if wanted > 0:
                    yield Variation(f"{wanted} dims of tensor {number}", partial(_with_dims, number, wanted))


_AMONG_MANY = ((5, 4), (4, 1), (5, 3), (4, 2), (5, 1))
"""Numbers of tensor dims, and a dim that an argument names among them."""


def dims_among_many(call: Call) -> Iterator[Variation]:
    """Yield the calls whose tensors have 4 or 5 dims and that name a dim in the middle, or the last one by its number.

    A rule may treat the first dims one by one, and the rest as one.
    """
    if not call.tensors or torch.Tag.pointwise in call.op.tags or any(one.out for one in parameters(call.op)):
        return
    named = [one for one in parameters(call.op) if one.name in DIMS and "int" in one.type]
    for ndim, dim in _AMONG_MANY:
        for one in named:
            change = partial(_named_among, ndim, one.name, [dim] if "List" in one.type else dim)
            yield Variation(f"{ndim} dims, {one.name} is {dim}", change)


def _named_among(ndim: int, name: str, dim: object, call: Call) -> Call | None:
    made = _with_dims(None, ndim, call)
    return None if made is None else with_value(made, name, dim)


def batch_dims(call: Call, at_least: int) -> Iterator[Variation]:
    """Yield the calls whose first tensor has another number of leading dims, and ``at_least`` so many dims."""
    ndim = call.tensors[0].ndim
    for wanted in (ndim - 1, ndim + 1, ndim - 2):
        if wanted >= max(at_least, 1):
            yield Variation(f"{wanted} dims of tensor 0", partial(_with_dims, 0, wanted))


def batch_dims_of_gradients(call: Call, at_least: int) -> Iterator[Variation]:
    """Yield the call with more leading dims of all tensors that have the most dims, which are more than ``at_least``.

    In the backward of a normalisation these are the gradient, the input and its statistics, and no weights.
    """
    most = max(tensor.ndim for tensor in call.tensors)
    for wanted in (most + 1, most + 2) if most > at_least else ():
        yield Variation(f"{wanted} dims", partial(_with_dims, None, wanted))


def _with_dims(number: int | None, wanted: int, call: Call) -> Call | None:
    """Return the call with ``wanted`` dims of the tensor at a place, or of all that have the most (None)."""
    made: Call | None = call
    while made is not None and made.tensors and (ndim := _ndim(number, made)) != wanted:
        if ndim > wanted:
            fewer = (_fewer(number, dim, made) for dim in range(ndim))
            made = next((one for one in fewer if one is not None and attempt(one) is not None), None)
        else:
            made = _more(number, made)
            if made is not None and attempt(made) is None:
                return None
    return made


def _ndim(number: int | None, call: Call) -> int:
    return max(tensor.ndim for tensor in call.tensors) if number is None else call.tensors[number].ndim


def _fewer(number: int | None, dim: int, call: Call) -> Call | None:
    """Return the call with the first slice along ``dim`` of the tensors; None if an argument names that dim."""
    ndim = _ndim(number, call)

    def moved(at: int) -> int | None:
        place = at if at >= 0 else at + ndim
        return None if place == dim else at - (at > dim) if at >= 0 else at + (place < dim)

    changed = _of_tensors(number, lambda tensor: tensor.select(dim, 0).clone() if tensor.shape[dim] else None, call)
    return (
        None if changed is None else _arguments(ndim, moved, lambda sizes: [*sizes[:dim], *sizes[dim + 1 :]], changed)
    )


def _more(number: int | None, call: Call) -> Call | None:
    """Return the call with two copies of the tensors along a new first dim, the second one in another order."""
    ndim = _ndim(number, call)

    def twice(tensor: torch.Tensor) -> torch.Tensor | None:
        if 2 * tensor.numel() > _MOST_ELEMENTS:
            return None
        other = tensor.flatten().roll(1).reshape(tensor.shape) if tensor.is_floating_point() else tensor
        return torch.stack([tensor, other])

    changed = _of_tensors(number, twice, call)
    return None if changed is None else _arguments(ndim, lambda at: at + (at >= 0), None, changed)


def _of_tensors(number: int | None, change: Callable[[torch.Tensor], torch.Tensor | None], call: Call) -> Call | None:
    ndim = _ndim(number, call)
    most = [place for place, tensor in enumerate(call.tensors) if tensor.ndim == ndim]
    return call.with_tensors(most if number is None else (number,), change)


def _arguments(
    ndim: int, moved: Callable[[int], int | None], fewer: Callable[[list[int]], list[int]] | None, call: Call
) -> Call | None:
    """Return the call with its dims and sizes moved.

    Parameters
    ----------
    moved
        Returns the new number of a dim; None if that dim is gone.
    fewer
        Returns sizes without that of the dim that is gone; None if there is a new first dim.
    """
    made: Call | None = call
    for parameter in parameters(call.op):
        given = call.values.get(parameter.name, parameter.default)
        if made is None or parameter.out or "int" not in parameter.type.lower():
            continue
        new: object = given
        if parameter.name in DIMS and type(given) is int:
            new = moved(given)
            if new is None:
                return None
        elif parameter.name in DIMS and isinstance(given, list | tuple) and all(type(one) is int for one in given):
            every = sorted(one % ndim for one in given) == list(range(ndim))
            new = [one for one in map(moved, given) if one is not None]
            new = [0, *new] if every and fewer is None else new
        elif parameter.name in _SIZES and isinstance(given, list | tuple) and len(given) == ndim:
            new = [_SIZES[parameter.name], *given] if fewer is None else fewer([*given])
        if new is not given and new != given:
            made = with_value(made, parameter.name, new)
    return made
