"""Second calls of an overload: the tensors of a first call with other arguments of each kind.

DTensor decides once for all calls that its cache takes for one, so a second call shows what the cache's key leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import torch

from strategies.opinfo.calls.call import Call, Parameter, attempt, parameters, quiet
from strategies.opinfo.calls.checked import codes_of
from strategies.opinfo.calls.op_facts import COMPARED, TRUSTING
from strategies.opinfo.calls.op_names import base_of
from strategies.opinfo.programs import called_both_ways, called_twice
from strategies.opinfo.samples.argument_spellings import spellings, with_value
from strategies.opinfo.samples.asking.arguments import may_read_none, near_numbers
from verifier.core.case import OpCase
from verifier.core.ops import resolve
from verifier.programs import SecondCall, calls_again
from verifier.torch_internals.amending.propagation import is_torchs
from verifier.torch_internals.names import OpOverload, pytree
from verifier.torch_internals.rule_code.constants import constants_of_op, constants_of_rule

__all__ = [
    "SECOND_CALL",
    "changes",
    "checks_no_sizes",
    "exchanged",
    "holds_tensor",
    "other_arguments",
    "second_calls",
    "squared",
]

SECOND_CALL = "second call"
"""The tag of programs that call an overload twice."""

_CHOICES: dict[str, tuple[object, ...]] = {
    "rounding_mode": (None, "floor", "trunc"),
    "approximate": ("none", "tanh"),
    "reduce": ("sum", "prod", "mean", "amax", "amin"),
    "mode": ("reflect", "constant", "replicate", "reduced", "complete", "r"),
    "side": ("left", "right"),
    "interpolation": ("linear", "lower", "higher", "midpoint", "nearest"),
    "ord": ("fro", "nuc"),
}
"""Values of arguments that are texts, by name."""
_CODES = ("dtype", "out_dtype", "layout", "memory_format")
"""Arguments whose type is an integer in a schema and is something else for users."""
_LONGEST, _MOST_TEXTS, _MOST_NUMBERS = 32, 12, 6
"""Longer texts in the code of a rule are no arguments. So many texts and numbers are taken."""
_SEEDS = 16
"""How often a call runs, to see whether its random numbers show in its results."""
_DTYPES = (torch.int64, torch.bool, torch.float32, torch.float64)


def checks_no_sizes(call: Call) -> bool:
    """Return whether the kernel may not check the sizes of its arguments, as in helper ops that users do not call."""
    base = base_of(str(call.op))
    helper = (base.startswith("_") and not base.startswith(("_foreach", "_to_copy"))) or "backward" in base
    return helper or base.startswith(TRUSTING)


def other_arguments(call: Call) -> Iterator[tuple[str, Call]]:
    """Yield calls with the tensors of ``call``, in each of which one other argument differs, by its name.

    Their arguments determine their results: a dropout with the probability 0 has no other call with one in between.
    """
    draws = torch.Tag.nondeterministic_seeded in call.op.tags
    yield from ((name, other) for name, other in _other_arguments(call) if not (draws and _is_drawn(other)))


def _is_drawn(call: Call) -> bool:
    """Return whether random numbers show in the results of a call."""
    drawn = []
    with torch.random.fork_rng(devices=[]):
        for seed in range(_SEEDS):
            torch.default_generator.manual_seed(seed)
            drawn.append(attempt(call))
    first = drawn[0]
    return first is None or any(other is None or not all(map(torch.equal, first, other)) for other in drawn)


def _other_arguments(call: Call) -> Iterator[tuple[str, Call]]:
    unchecked = checks_no_sizes(call)
    for parameter in parameters(call.op):
        if parameter.out or holds_tensor(given := call.values.get(parameter.name, parameter.default)):
            continue
        for value in (_harmless if unchecked else _others)(call, parameter, given):
            if value != given or type(value) is not type(given):
                changed = with_value(call, parameter.name, value)
                if changed is not None:
                    yield parameter.name, changed
    for variation in spellings(call):
        changed = variation.apply(call)
        if changed is not None:
            yield variation.label.partition("=")[0].partition(" ")[0], changed


def _harmless(call: Call, parameter: Parameter, given: object) -> Iterator[object]:
    """Yield other values that no kernel has to check: dims that all tensors have, and ends of the first one's shape.

    Of ops of the user's, flags, factors and codes of choices follow, none of which is a size.
    """
    if not is_torchs(call.op):
        yield from _choices(call, parameter, given)
    shape = call.tensors[0].shape
    alike = parameter.name == "dim" and all(tensor.shape == shape for tensor in call.tensors)
    if alike and type(given) is int:
        yield from range(len(shape))
    elif alike and isinstance(given, list | tuple) and given and shape:
        yield from ([(dim + step) % len(shape) for dim in given] for step in range(1, len(shape)))
        yield list(given[:-1])
    elif parameter.name == "normalized_shape" and len(call.tensors) == 1:
        yield from (list(shape[start:]) for start in range(len(shape)))


def _choices(call: Call, parameter: Parameter, given: object) -> Iterator[object]:
    """Yield other values of a flag, a factor, a code, or an integer that kernels compare with indices alone."""
    if type(given) is bool:
        if not may_read_none(call, parameter.name):
            yield not given
    elif type(given) is float or (type(given) is int and parameter.type == "number"):
        yield from (given + 1, -given, 0.0)
    elif type(given) is int:
        yield from (0, 1) if parameter.name in COMPARED else codes_of(call.op, parameter.name)


def _others(call: Call, parameter: Parameter, given: object) -> Iterator[object]:
    """Yield other values of an argument of ``call``, of each kind that its type allows."""
    type_, name = parameter.type, parameter.name
    if type(given) is int and (codes := codes_of(call.op, name)):
        yield from codes
        return
    if not is_torchs(call.op) and name not in _CODES:
        yield from _in_code(call, type_)
    if isinstance(given, bool):
        yield not given
    elif isinstance(given, int | float):
        yield given + 1
        if "number" in type_ or "float" in type_:
            yield -given  # what is monotone for one sign is not for the other
            yield from (given + 0.5, 0, float("inf"))
        elif "int" in type_:
            yield from (given - 1, 0)
            if given > 1:  # such as a number of groups, which has to divide an extent
                yield from (1, given * 2, given // 2)
    elif isinstance(given, list | tuple) and given and all(type(item) is int for item in given):
        yield [item + 1 for item in given]
        yield list(reversed(given))
        yield list(given[:-1])
        yield list(call.tensors[0].shape)
        yield list(call.tensors[0].shape[-len(given) - 1 :])
    elif isinstance(given, list | tuple) and given and all(type(item) in (bool, float) for item in given):
        yield [not item if isinstance(item, bool) else -item for item in given]
        yield list(reversed(given))
        yield list(given[:-1])
    elif given is None:
        if "number" in type_ or "float" in type_:
            yield from (1.0, 0.0)
        elif "List" not in type_ and "int" in type_ and name not in _CODES:
            yield from (0, 1)
    yield from _CHOICES.get(name, ())
    if (name in ("dtype", "out_dtype") and "int" in type_) or isinstance(given, torch.dtype):
        yield from _DTYPES
    if type_.startswith("Optional"):
        yield None


def _in_code(call: Call, type_: str) -> Iterator[object]:
    """Yield the texts, or numbers near those, that stand in the code of a rule of the user's and of the op itself."""
    found = constants_of_rule(call.op) | constants_of_op(call.op)
    constants = sorted(found, key=lambda one: (isinstance(one, str), str(one)))
    if "str" in type_:
        yield from [one for one in constants if isinstance(one, str) and len(one) <= _LONGEST][:_MOST_TEXTS]
    elif "List" not in type_ and any(part in type_ for part in ("number", "float", "int")):
        numbers = near_numbers(constants)
        yield from ([one for one in numbers if isinstance(one, int)] if "int" in type_ else numbers)[:_MOST_NUMBERS]


def exchanged(call: Call) -> Iterator[tuple[str, str, Call]]:
    """Yield calls in which a tensor and a ``None`` have changed places: two arguments, or the ends of a list.

    For a list, which both names name, that is the list the other way round, or behind a ``None`` if it has none.
    """
    values = {parameter.name: call.values.get(parameter.name, parameter.default) for parameter in parameters(call.op)}
    optional = [parameter for parameter in parameters(call.op) if "Optional[Tensor]" in parameter.type]
    for parameter in optional:
        given = values[parameter.name]
        if isinstance(given, list | tuple) and "List" in parameter.type:
            turned = [*reversed(given)] if any(item is None for item in given) else [None, *given]
            changed = with_value(call, parameter.name, turned)
            if changed is not None:
                yield parameter.name, parameter.name, changed
    singles = [parameter.name for parameter in optional if "List" not in parameter.type]
    for place, name in enumerate(singles):
        for also in singles[place + 1 :]:
            if (values[name] is None) != (values[also] is None):
                changed = Call.of(call.op, {**call.values, name: values[also], also: values[name]})
                if changed is not None:
                    yield name, also, changed


def squared(call: Call) -> Call:
    """Return ``call`` with tensors whose dims all have one size, so that another dim is legal as well.

    The size is the smallest of the call but 1. What a dim lacks is filled with its own elements.
    """
    size = min((size for tensor in call.tensors for size in tensor.shape if size > 1), default=1)

    def square(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        for dim, old in enumerate(leaf.shape):
            if old > 1:
                leaf = leaf.index_select(dim, torch.arange(size) % old)
        return leaf.detach()

    return call.with_leaves([square(leaf) for leaf in call.leaves])


def second_calls(case: OpCase) -> Iterator[SecondCall]:
    """Yield pairs of calls that torch accepts, in both orders.

    One of a pair is the plain call ``case``, but where torch leaves out an argument of it.
    """
    op = resolve(case.call)
    if not isinstance(op, OpOverload) or any(parameter.out for parameter in parameters(op)):
        return
    call = Call(op, case.args, case.kwargs)
    with quiet():
        made = attempt(call)
        if made is None:
            return
        beside: dict[str, list[Call]] = {}
        for name, other in other_arguments(call):
            if not changes(call, other):
                continue
            dropped = not is_torchs(op) and _is_dropped(call, name)
            written = call if dropped else _written_out(call, name)
            before, plain, results = made, written, attempt(other)
            if results is None:
                plain, other = squared(written), squared(other)
                square, results = attempt(plain), attempt(other)
                if square is None or results is None:
                    continue
                before = square
            elif dropped:
                beside.setdefault(name, []).append(other)
            for first, second, last in ((plain, other, results), (other, plain, before)):
                cast = _telling_cast(before, results, last)
                yield _pair(case, name, first, second, (changes(first, second), *cast))
        for name, others in beside.items():
            for one, two in pairwise(others):
                for first, second in ((one, two), (two, one)):
                    if changed := changes(first, second):
                        yield _pair(case, name, first, second, (changed,))
        for name, also, other in [] if checks_no_sizes(call) else exchanged(call):
            if attempt(other) is not None:
                yield _pair(case, name, call, other, (name, also))


def _is_dropped(call: Call, name: str) -> bool:
    """Return whether torch leaves an argument out before DTensor sees the call: it and all behind it are defaults.

    Two other values of it are both there, and so may have one key.
    """
    behind = [one for one in parameters(call.op) if not one.keyword_only]
    names = [one.name for one in behind]
    if name not in names:
        return False
    behind = behind[names.index(name) :]
    given = ((call.values.get(one.name, one.default), one.default) for one in behind if one.has_default)
    return all(one.has_default for one in behind) and all(
        not holds_tensor(value) and value == default for value, default in given
    )


def _written_out(call: Call, name: str) -> Call:
    """Return ``call`` with the argument ``name``, if it leaves that to its default: keys tell how many are given."""
    default = next((one.default for one in parameters(call.op) if one.name == name and one.has_default), None)
    changed = None if name in call.values or default is None else with_value(call, name, default)
    return changed or call


def _pair(case: OpCase, name: str, first: Call, second: Call, args: tuple[object, ...]) -> SecondCall:
    """Return a pair whose program has ``args`` behind the overload."""

    def program(of: Callable[..., object], call: Call, *given: object) -> OpCase:
        tags = case.tags | {SECOND_CALL}
        return replace(
            case,
            call=f"{of.__module__}.{of.__name__}",
            args=(case.op, *given),
            kwargs=call.values,
            exact=False,
            tags=tags,
        )

    cases = [replace(case, args=call.args, kwargs=call.kwargs) for call in (first, second)]
    exchanges = isinstance(args[0], str)
    both = program(called_both_ways if exchanges else called_twice, first, *args)
    rest = () if exchanges else args[1:]
    controls = (program(called_twice, first, []), program(called_twice, second, [], *rest))
    return SecondCall(name, cases[0], cases[1], both, controls)


def _telling_cast(
    these: list[torch.Tensor], those: list[torch.Tensor], last: list[torch.Tensor]
) -> tuple[torch.dtype, ...]:
    """Return a dtype for which DTensor decides by the dtype of a result, if the results of the calls differ in dtype.

    A pending sum of floats has to be reduced before a cast to integers, a pending sum of integers need not be.
    """
    if [t.dtype for t in these] == [t.dtype for t in those]:
        return ()
    return (torch.int64,) if all(t.is_floating_point() and bool(t.isfinite().all()) for t in last) else ()


def changes(call: Call, other: Call) -> list[list[object]]:
    """Return ``[name, value]`` of each argument of ``other`` that differs from ``call`` and holds no tensor."""
    found: list[list[object]] = []
    for parameter in parameters(call.op):
        before, after = (each.values.get(parameter.name, parameter.default) for each in (call, other))
        if not holds_tensor((before, after)) and (before != after or type(before) is not type(after)):
            found.append([parameter.name, after])
    return found


def holds_tensor(value: object) -> bool:
    """Return whether ``value`` is a tensor or a list with one."""
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


calls_again(second_calls)
