"""Values of arguments other than tensors on which a rule of the user's branches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations, groupby, permutations
from typing import NamedTuple

import torch

from strategies.opinfo.calls.call import Call, Parameter, parameters
from strategies.opinfo.calls.checked import codes_of, is_trusting
from strategies.opinfo.calls.op_facts import COMPARED, KEEP_VALUES
from strategies.opinfo.calls.op_names import base_of
from strategies.opinfo.samples.argument_spellings import DIMS, Variation, with_value, with_values
from strategies.opinfo.samples.asking.claimed import claimed
from verifier.torch_internals.amending.propagation import is_torchs
from verifier.torch_internals.rule_code.constants import constants_of_rule

__all__ = [
    "OtherValue",
    "argument_branches",
    "equal_numbers",
    "flags_beside_branches",
    "may_read_none",
    "near_numbers",
    "other_values",
    "without_tensors",
]

_NUMBERS = (0, 1, -1, 2, 0.5, -0.5, math.inf, -math.inf)
"""Numbers on which rules branch, beside those in their code."""
_BESIDE = 0.5
"""A number in the code of a rule is a bound; so far from it are numbers on both sides."""
_KINDS = {"dtype", "out_dtype", "layout", "device", "memory_format", "pin_memory", "generator"}
"""Arguments that are numbers in the schema alone."""
_COUNTS = ("group", "num", "size", "stride", "dilation", "heads", "factor", "step", "N", "C", "HxW")
"""Parts of the names of arguments by which kernels divide, some without a look at them: 0 would end the process."""
_MOST_OPTIONAL, _MOST_FLAGS = 4, 2
_MOST_CONSTANTS = 8
_LARGEST = 64
"""Larger integers in the code of a rule are not given as arguments: an extent of that size would take long."""


def argument_branches(call: Call) -> Iterator[Variation]:
    """Yield the values of arguments other than tensors at which the op's rules, of the user's, claim something else.

    Dims are left out, of which any other one is another claim.
    """
    if is_torchs(call.op):
        return
    for base, changes in groupby(other_values(call), key=lambda change: change.base):
        usual = claimed(base(call))
        yield from (one.variation for one in changes if claimed(one.variation.apply(call)) - usual)


def flags_beside_branches(call: Call) -> Iterator[Variation]:
    """Yield the same calls with the other value of a flag, for which a rule may take another argument."""
    flags = [one for one in parameters(call.op) if one.type == "bool" and not may_read_none(call, one.name)]
    for variation in argument_branches(call) if flags else ():
        if (changed := variation.apply(call)) is None:
            continue
        for flag in flags[:_MOST_FLAGS]:
            before, now = (one.values.get(flag.name, flag.default) for one in (call, changed))
            if type(before) is bool and now is before:  # it is not this flag that makes the rules claim something else
                change = partial(_and_flag, variation, flag.name, not before)
                yield Variation(f"{variation.label}, {flag.name} is {not before}", change)


def _and_flag(variation: Variation, name: str, value: bool, call: Call) -> Call | None:
    changed = variation.apply(call)
    return None if changed is None else with_value(changed, name, value)


class OtherValue(NamedTuple):
    """A change of one argument of ``base`` of a call: of the call itself, or with the defaults of the others."""

    variation: Variation
    base: Callable[[Call], Call | None]


def other_values(call: Call) -> Iterator[OtherValue]:
    """Yield other values of the arguments that are neither tensors nor dims, on which rules may branch."""
    constants = sorted(constants_of_rule(call.op), key=lambda one: (isinstance(one, str), str(one)))
    for label, base in (("", _same), ("by default, ", _with_defaults)):
        start = base(call)
        if start is None:
            continue
        for parameter in parameters(call.op):
            given = start.values.get(parameter.name, parameter.default)
            for value in dict.fromkeys(_candidates(parameter, given, start, constants)):
                if value != given and not may_read_none(call, parameter.name):
                    change = partial(_with_argument, base, parameter.name, value)
                    yield OtherValue(Variation(f"{label}{parameter.name} is {value}", change), base)


def equal_numbers(call: Call) -> Iterator[Variation]:
    """Yield calls of ops of the user's in which one number has the value of another, as ``min`` that of ``max``.

    An op may then do something else, as ``histc`` does, which takes the range from the values.
    """
    if is_torchs(call.op):
        return
    kinds = {one.name: one.type for one in parameters(call.op) if one.type in ("number", "float")}
    given = {one.name: call.values.get(one.name, one.default) for one in parameters(call.op) if one.name in kinds}
    for name, other in permutations(given, 2):
        if given[name] != given[other] and kinds[name] == kinds[other]:
            yield Variation(f"{name} is {other}", partial(_with_argument, _same, name, given[other]))


def _same(call: Call) -> Call | None:
    return call


def _with_defaults(call: Call) -> Call | None:
    """Return the call with the default of each argument that has one and is no tensor; None if it is the same call."""
    changed = call
    for parameter in parameters(call.op):
        given = call.values.get(parameter.name, parameter.default)
        if parameter.has_default and given != parameter.default and not isinstance(given, torch.Tensor | list | tuple):
            changed = with_value(changed, parameter.name, parameter.default) or changed
        elif parameter.has_default and isinstance(given, list | tuple) and parameter.default is None:
            changed = with_value(changed, parameter.name, None) or changed
    return changed if changed is not call else None


def _with_argument(base: Callable[[Call], Call | None], name: str, value: object, call: Call) -> Call | None:
    start = base(call)
    return None if start is None else with_value(start, name, value)


def without_tensors(call: Call) -> Iterator[Variation]:
    """Yield the calls without some of the tensors that may be left out, of ops with rules of the user's.

    A rule may hold for each of two optional tensors, and not where one is there without the other. A tensor is not left
    out where others have values that belong to it, as a sequence and what sorts it.
    """
    if is_torchs(call.op):
        return
    belongs = base_of(str(call.op)) in KEEP_VALUES
    names = [
        one.name for one in parameters(call.op) if isinstance(call.values.get(one.name), torch.Tensor) and one.optional
    ][:_MOST_OPTIONAL]
    for count in range(1, len(names) + 1):
        for some in combinations(names, count):
            if not (belongs or is_trusting(call)) or _are_not_needed(frozenset(some), call):
                yield Variation(f"without {', '.join(some)}", partial(with_values, dict.fromkeys(some)))


def _are_not_needed(names: frozenset[str], call: Call) -> bool:
    """Return whether a kernel that checks no arguments takes the call without these tensors."""
    if "backward" in base_of(str(call.op)) or not names <= _NEVER_NEEDED | _STATISTICS:
        return False
    return not names & _STATISTICS or (names >= _STATISTICS and any(call.values.get(one) is True for one in _TRAINING))


def may_read_none(call: Call, name: str) -> bool:
    """Return whether another value of the argument ``name`` may let a kernel read statistics that are not there."""
    return name in _TRAINING and any(call.values.get(one, call) is None for one in _STATISTICS)


_NEVER_NEEDED = frozenset({"weight", "bias", "per_sample_weights"})
_STATISTICS = frozenset({"running_mean", "running_var"})
_TRAINING = ("training", "train")


def _candidates(
    parameter: Parameter, given: object, call: Call, constants: Sequence[int | float | str]
) -> Iterator[int | float | str | bool | None]:
    kind = parameter.type.removeprefix("Optional[").removesuffix("]")
    if parameter.name in DIMS | _KINDS or parameter.out or isinstance(given, torch.Tensor) or kind.startswith("List"):
        return
    numbers = near_numbers(constants)
    if parameter.type.startswith("Optional["):
        yield None
    if kind == "bool":
        yield not given
    elif kind in ("int", "SymInt") and (codes := codes_of(call.op, parameter.name)):
        yield from codes
    elif kind in ("int", "SymInt"):
        if is_trusting(call) and parameter.name not in COMPARED:
            return  # such as a size of which the kernel reads or writes as many elements
        extents = {extent for tensor in call.tensors[:1] for extent in tensor.shape}
        least = 1 if any(part in parameter.name for part in _COUNTS) else -_LARGEST
        more = sorted({extent + one for extent in extents for one in (-1, 0)})
        yield from (one for one in (*_NUMBERS, *numbers, *more) if isinstance(one, int) and one >= least)
    elif kind in ("float", "number"):
        yield from (*_NUMBERS, *numbers)
    elif kind == "str":
        yield from [one for one in constants if isinstance(one, str)][:_MOST_CONSTANTS]


def near_numbers(constants: Sequence[int | float | str]) -> list[int | float]:
    """Return the numbers among the constants of a rule's code that may be arguments, then such on both sides of each.

    A bool is no number, and large ones would take long as an extent.
    """
    numbers = [one for one in constants if not isinstance(one, str | bool) and abs(one) <= _LARGEST][:_MOST_CONSTANTS]
    return [*numbers, *(one + more for one in numbers for more in (-_BESIDE, _BESIDE))]
