"""Makes calls of overloads that no sample dispatches (in-place, ``out=``, with a scalar) from calls of a sibling."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import torch

from strategies.opinfo.calls.call import Call, Parameter, attempt, parameters
from strategies.opinfo.calls.op_facts import SAME_AS
from strategies.opinfo.calls.op_names import base_of, stem
from verifier.torch_internals.names import OpOverload
from verifier.torch_internals.ops import cache_by_rules, registered_overloads

__all__ = ["additions", "converted", "families_with_rule", "family", "is_sibling"]


@cache
def family(op: OpOverload | str) -> str:
    """Return the common stem of overloads whose calls can be made from each other.

    What copies in place of making a view takes the arguments of the view.
    """
    key = stem(base_of(str(op)))
    if isinstance(op, OpOverload) and torch.Tag.view_copy in op.tags:
        key = key.removesuffix("_copy")
    while key in SAME_AS:
        key = stem(SAME_AS[key])
    return key


@cache_by_rules
def families_with_rule() -> frozenset[str]:
    """Return the families with an overload that DTensor itself has a rule for."""
    return frozenset(family(op) for op in registered_overloads())


def is_sibling(op: OpOverload, other: OpOverload) -> bool:
    """Return whether calls of ``op`` may be made from calls of ``other``."""
    foreach = [base_of(str(each)).startswith("_foreach") for each in (op, other)]
    return op is not other and foreach[0] == foreach[1] and family(op) == family(other)


_TEXTS = {"reduce": ("add", "multiply")}
"""Texts for arguments that siblings do not have."""


def additions(op: OpOverload) -> Iterator[Mapping[str, object]]:
    """Yield arguments of ``op`` that a sibling's call may lack: none, but for a text that has no default."""
    texts = [one.name for one in parameters(op) if one.type == "str" and not one.has_default and one.name in _TEXTS]
    yield from ({name: text} for name in texts[:1] for text in _TEXTS[name])
    if not texts:
        yield {}


def converted(call: Call, op: OpOverload, more: Mapping[str, object] | None = None) -> Call | None:
    """Return a call of ``op`` with the arguments of ``call``, a call of a sibling; None if that is not possible.

    ``out`` arguments have the shapes and dtypes of the results, and NaN as values. Arguments that the sibling lacks are
    taken from ``more``.
    """
    given = call.values
    by_place = [parameter.name for parameter in parameters(call.op)]
    names = {parameter.name for parameter in parameters(op)}
    values: dict[str, object] = {}
    used: set[str] = set()
    for place, parameter in enumerate(parameters(op)):
        if parameter.out:
            continue
        name = parameter.name
        if name not in given and place < len(by_place) and by_place[place] not in names:
            name = by_place[place]  # the same argument under another name
        if name in given:
            value, fits = _as_type(given[name], parameter, call.tensors)
            if not fits:
                return None
            values[parameter.name] = value
            used.add(name)
        elif more and name in more:
            values[name] = more[name]
        elif not parameter.has_default:
            return None
    if any(name not in used and _has_tensor(value) for name, value in given.items()):
        return None  # such as batch_norm without statistics, which some kernels need but do not check
    if any(parameter.out for parameter in parameters(op)):
        return _with_outputs(call, op, values)
    made = Call.of(op, values)
    return made if made is not None and made.tensors and attempt(made) is not None else None


def _as_type(value: object, parameter: Parameter, tensors: Sequence[torch.Tensor]) -> tuple[object, bool]:
    """Return ``value`` converted to the parameter's type, and whether that is possible."""
    type_ = parameter.type
    if "List[Tensor]" in type_ or "List[Optional[Tensor]]" in type_:
        return value, isinstance(value, list | tuple)
    if "List[number]" in type_:
        if isinstance(value, list | tuple) and all(isinstance(item, torch.Tensor) and item.numel() for item in value):
            return [item.view(-1)[0].item() for item in value], True
        return value, isinstance(value, list | tuple)
    if "Tensor" in type_:
        if isinstance(value, bool | int | float | complex):
            return torch.tensor(value, dtype=tensors[0].dtype), True
        return value, isinstance(value, torch.Tensor) or (value is None and type_.startswith("Optional"))
    if "List[int]" in type_ and type(value) is int:
        return [value], True
    if "number" in type_ and isinstance(value, torch.Tensor):
        return (_number(value), True) if value.numel() else (None, False)
    return value, not isinstance(value, torch.Tensor)


def _has_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, list | tuple) and any(map(_has_tensor, value)))


def _number(value: torch.Tensor) -> object:
    """Return the first element; outside of -1..1, return one of the integers that tensors are filled with.

    So results stay exact, and a comparison with the number is neither true nor false everywhere.
    """
    number = value.reshape(-1)[0].item()
    if not isinstance(number, float) or not 1 <= abs(number) < math.inf:
        return number
    return math.copysign(1 + round(abs(number)) % 3, number)


def _with_outputs(call: Call, op: OpOverload, values: dict[str, object]) -> Call | None:
    """Return the call of ``op`` with output tensors of the shapes that the same call without them returns."""
    outputs = [parameter.name for parameter in parameters(op) if parameter.out]
    functional = _functional(op)
    plain = call if functional is None or functional == call.op else Call.of(functional, values)
    results = None if plain is None else attempt(plain)
    if results is None or len(results) < len(outputs):
        return None
    buffers = {name: _buffer(result) for name, result in zip(outputs, results, strict=False)}
    made = Call.of(op, {**values, **buffers})
    written = None if made is None else attempt(made)
    if not written:
        return None
    # torch would resize a buffer of another shape, which is no ordinary use of out=
    fits = zip(written[-len(outputs) :], buffers.values(), strict=True)
    return made if all(after.shape == before.shape for after, before in fits) else None


@cache
def _functional(op: OpOverload) -> OpOverload | None:
    """Return the overload with the parameters of ``op`` without its outputs, or None."""
    wanted = [(parameter.name, parameter.type) for parameter in parameters(op) if not parameter.out]
    packet = op.overloadpacket
    for name in packet.overloads():
        other: OpOverload = getattr(packet, name)
        if [(parameter.name, parameter.type) for parameter in parameters(other)] == wanted:
            return other
    return None


def _buffer(result: torch.Tensor) -> torch.Tensor:
    if result.is_floating_point() or result.is_complex():
        return torch.full(result.shape, float("nan"), dtype=result.dtype)
    if result.dtype == torch.bool:
        return torch.ones(result.shape, dtype=torch.bool)
    return torch.full(result.shape, 7, dtype=result.dtype)
