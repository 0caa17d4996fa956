"""Tensors for optional arguments of an op for which no example has one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from strategies.opinfo.calls.call import Call, Parameter, attempt, parameters
from strategies.opinfo.calls.running import accepts
from strategies.opinfo.samples.argument_spellings import Variation, with_value
from strategies.own_ops.from_schema import ask, kinds_of_tensor, rules_that_hold, tensor_of_kind
from verifier.torch_internals.amending.propagation import rule_function

__all__ = ["optional_tensors"]

_RESULT, _NUMBER = -1, -2
_MOST_TRIES = 40


@dataclass(frozen=True)
class _Shape:
    """The shape of a tensor of a call or of its first result, or one extent of it: that of a tensor with one dim.

    A number is a tensor without dims.
    """

    of: int
    dim: int | None

    def at(self, call: Call) -> tuple[int, ...] | None:
        if self.of == _NUMBER:
            return ()
        if self.of == _RESULT:
            results = attempt(call)
            shape = tuple(results[0].shape) if results else None
        else:
            shape = tuple(call.tensors[self.of].shape) if self.of < len(call.tensors) else None
        if shape is None or self.dim is None:
            return shape
        return (shape[self.dim],) if self.dim < len(shape) else None


def optional_tensors(call: Call, examples: Sequence[Call]) -> Iterator[Variation]:
    """Yield ``call`` with a tensor for each optional argument for which none of the ``examples`` has one.

    An op may take tensors of several shapes, by broadcasting, of which its author means one. That is the one for which
    most of the rules hold that the op's strategy lists on two ranks, then the one of the fewest dims, if it has any. At
    least half of the rules have to hold, and the result has to depend on the tensor.
    """
    if rule_function(call.op) is None or (results := attempt(call)) is None:
        return
    for parameter in parameters(call.op):
        given = (one.values.get(parameter.name) for one in (call, *examples))
        if parameter.type != "Optional[Tensor]" or parameter.written or any(one is not None for one in given):
            continue
        found: list[tuple[int, bool, int, Variation]] = []
        for variation in _ways(call, parameter):
            changed = variation.apply(call)
            if changed is None or not accepts(changed) or _same(attempt(changed), results):
                continue
            if (one := ask(changed)).fits and one.rules:
                right, wrong = rules_that_hold(changed)
                if right and len(right) >= len(wrong):
                    found.append((-len(right), 0 in one.ndims, sum(one.ndims), variation))
        if found:
            yield min(found, key=lambda one: one[:3])[3]


def _ways(call: Call, parameter: Parameter) -> list[Variation]:
    """Return the call with each kind and shape of tensor for a parameter."""
    ndims = [(number, tensor.ndim) for number, tensor in enumerate(call.tensors)]
    results = attempt(call)
    ndims += [(_RESULT, results[0].ndim)] if results else []
    shapes = [_Shape(of, dim) for of, ndim in ndims for dim in range(ndim)]
    shapes += [_Shape(of, None) for of in (*(of for of, _ in ndims), _NUMBER)]
    different = {(shape.at(call)): shape for shape in reversed(shapes)}
    return [
        Variation(f"{parameter.name} is a tensor", partial(_with_tensor, parameter.name, kind, shape))
        for kind in kinds_of_tensor(parameter)
        for shape in reversed(different.values())
    ][:_MOST_TRIES]


def _with_tensor(name: str, kind: str, shape: _Shape, call: Call) -> Call | None:
    extents = shape.at(call)
    if extents is None or call.values.get(name) is not None:
        return None
    dtype = next((tensor.dtype for tensor in call.tensors if tensor.is_floating_point()), torch.float64)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        made = tensor_of_kind(kind, extents, dtype)
        if kind == "float":  # a factor of 1, or a summand of 0, would not show
            made = made.where((made != 0) & (made != 1), 5)
        return with_value(call, name, made)


def _same(some: list[torch.Tensor] | None, others: list[torch.Tensor]) -> bool:
    return some is not None and len(some) == len(others) and all(map(torch.equal, some, others))
