"""Lists of numbers on which a rule of the user's branches: amounts, windows and sizes for each of several dims."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from strategies.opinfo.calls.call import Call, Parameter, parameters
from strategies.opinfo.calls.checked import is_trusting
from strategies.opinfo.samples.argument_spellings import DIMS, Variation, with_value
from strategies.opinfo.samples.asking.claimed import claimed
from verifier.torch_internals.amending.propagation import is_torchs
from verifier.torch_internals.rule_code.constants import constants_of_rule

__all__ = ["list_branches", "other_lists"]

_LONGEST = 8
"""Longer lists have an item for each of many tensors or elements."""
_DIVISORS = ("size", "stride", "dilation", "group", "kernel", "step")
"""Parts of the names of lists by which kernels divide: 0 may end the process."""
_MOST_CONSTANTS = 4
_LARGEST = 64


def list_branches(call: Call) -> Iterator[Variation]:
    """Yield the lists at which the op's rules, of the user's, claim something else."""
    if is_torchs(call.op):
        return
    usual = claimed(call)
    yield from (change for change in other_lists(call) if claimed(change.apply(call)) - usual)


def other_lists(call: Call) -> Iterator[Variation]:
    """Yield other lists of integers that are no dims, and other lists of flags, of a call.

    One item differs from the others, or has an extent of the first tensor, or the items add up to 0.
    """
    for parameter in parameters(call.op):
        kind = parameter.type.removeprefix("Optional[").removesuffix("]")
        if parameter.out or parameter.name in DIMS or not kind.startswith("List["):
            continue
        given = _given(call, parameter)
        if not 0 < len(given) <= _LONGEST:
            continue
        if all(type(item) is bool for item in given):
            others = [_replaced(given, place, not item) for place, item in enumerate(given)]
        elif all(type(item) is int for item in given) and not is_trusting(call):
            others = list(_integers(call, parameter, given))
        else:
            continue
        for other in dict.fromkeys(map(tuple, others)):
            if list(other) != list(given):
                yield Variation(f"{parameter.name} is {list(other)}", partial(_with_list, parameter.name, other))


def _given(call: Call, parameter: Parameter) -> Sequence[Any]:
    """Return a list of the call; in place of an empty one, which stands for a default, another list of the call."""
    given = call.values.get(parameter.name, parameter.default)
    if given is None or (isinstance(given, list | tuple) and not given):
        others = (call.values.get(one.name) for one in parameters(call.op) if one.type == "List[int]")
        given = next((one for one in others if one), ())
    return given if isinstance(given, list | tuple) else ()


def _integers(call: Call, parameter: Parameter, given: Sequence[int]) -> Iterator[list[Any]]:
    least = 1 if any(part in parameter.name for part in _DIVISORS) else -_LARGEST
    constants = sorted(one for one in constants_of_rule(call.op) if type(one) is int and abs(one) <= _LARGEST)
    extents = [*call.tensors[0].shape] if call.tensors else []
    for new in dict.fromkeys((1, 0, *constants[:_MOST_CONSTANTS])):
        if new >= least:
            yield from (_replaced(given, place, new) for place in range(len(given)))
            yield [new] * len(given)
    if len(given) > 1 and least < 0:
        amount = next((abs(item) for item in given if item), 1)
        yield from (_replaced(_replaced(given, place, amount), place + 1, -amount) for place in range(len(given) - 1))
    for place, item in enumerate(given):
        yield _replaced(given, place, item + 1)
        # a size of the last dims is that of as many last dims
        behind = place - len(given)
        yield from [_replaced(given, place, extents[behind])] if -behind <= len(extents) and extents[behind] else []


def _replaced(given: Sequence[Any], place: int, item: object) -> list[Any]:
    return [*given[:place], item, *given[place + 1 :]]


def _with_list(name: str, value: Sequence[object], call: Call) -> Call | None:
    return with_value(call, name, list(value))
