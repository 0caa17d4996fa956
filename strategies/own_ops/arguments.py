"""Other arguments of a call that was given: values that the op takes too, of which the examples may have one alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import NamedTuple

import torch

from strategies.opinfo.calls.call import Call
from strategies.opinfo.calls.checked import codes_of
from strategies.opinfo.calls.running import accepts
from strategies.opinfo.samples.argument_spellings import DIMS, Variation, with_value, with_values
from strategies.opinfo.samples.asking.arguments import near_numbers, without_tensors
from strategies.opinfo.samples.asking.claimed import claimed, kinds_of
from strategies.opinfo.samples.asking.extents import extent_branches, lengths_of_rule
from strategies.opinfo.samples.asking.lists import list_branches
from strategies.opinfo.samples.asking.tensors import as_floats, as_integers, branches
from verifier.torch_internals.amending.propagation import rule_function
from verifier.torch_internals.names import OpOverload, pytree
from verifier.torch_internals.rule_code.constants import constants_of_op, constants_of_rule, kinds_asked_for

__all__ = ["dims_of_one", "other_arguments", "other_dims", "other_values"]

_NUMBERS = (0, 1, -1, 2, 3, 0.5, -0.5, 1.0, -2.0, math.inf, -math.inf)
_DTYPES = (torch.int64, torch.float32, torch.float64, torch.bool)
_MOST_TEXTS, _LONGEST = 12, 32
"""So many texts in the code are given as arguments, and none that is longer."""
_MOST_DIMS = 5
_MOST_FLAGS = 3
"""Of so many flags all choices are tried."""

_DIM = re.compile(r"S\((\d+)\)")
Constants = tuple[int | float | str, ...]


def other_arguments(call: Call) -> Iterator[Variation]:
    """Yield the calls with another value of an argument, or with tensors of another kind, that the op takes.

    Those at which the op's rules claim something else come first, those at which they raise next, and then those at
    which they claim the same: a rule that does not look at an argument may be wrong for its other values. A rule may
    raise for a value that nobody means, so such calls are yielded for values alone that the schema names. For tensors
    that are None, see :mod:`strategies.own_ops.optional_tensors`. Infinities, and tensors of another kind, are taken
    only where the rules claim something else: of a scale that is infinite hardly any rule holds. Integers and complex
    numbers are taken, too, for an op that asks what kind of numbers it has.
    """
    if rule_function(call.op) is None:
        # DTensor would keep what it was asked of an op without a rule, and apply it to a rule that is registered later
        yield from (one.variation for one in _values(call) if not one.infinite)
        return
    usual = claimed(call)
    same: list[Variation] = []
    raising: list[Variation] = []
    without = (_Value(variation, named=True, infinite=False) for variation in without_tensors(call))
    for variation, named, infinite in (*_values(call), *_flags(call), *without):
        changed = variation.apply(call)
        if changed is None or not accepts(changed):
            continue
        rules = claimed(changed)
        if _raises(rules - usual):
            if named:
                raising.append(variation)
        elif rules - usual:
            yield variation
        elif not infinite:
            same.append(variation)
    kinds = kinds_asked_for(call.op)
    if kinds & {"is_floating_point", "dtype"}:
        yield as_integers(torch.int64)
    if "is_complex" in kinds:
        yield as_floats(torch.complex128)
    yield from branches(call)
    yield from extent_branches(call)
    yield from list_branches(call)
    yield from _numbers_of_dims(call)
    yield from (change for change in dims_of_one(call) if _are_new(claimed(change.apply(call)), usual))
    yield from raising
    yield from same


def other_values(call: Call) -> Iterator[Variation]:
    """Yield the call with another value of an argument, or of several flags; the op may refuse it."""
    yield from (one.variation for one in (*_values(call), *_flags(call)))


def other_dims(call: Call) -> Iterator[Variation]:
    """Yield the call with each other dim in place of one, counted from both ends, the farthest from the end first."""
    if rule_function(call.op) is None:
        return
    ndim = max((tensor.ndim for tensor in call.tensors), default=0)
    for argument in call.op._schema.arguments:
        given = call.values.get(argument.name, argument.default_value if argument.has_default_value() else None)
        if argument.name in DIMS and type(given) is int:
            for dim in dict.fromkeys((-ndim, ndim - 1, *range(1 - ndim, 0), *range(ndim - 1))):
                if dim != given:
                    yield Variation(f"{argument.name} is {dim}", partial(with_value, name=argument.name, value=dim))


def _raises(rules: frozenset[str]) -> bool:
    return any("raised in" in rule for rule in rules)


def _constants(op: OpOverload) -> Constants:
    """Return the numbers and texts in the code of the op's rule, and then those in its own code."""
    rule, own = (
        sorted((one for one in found if not isinstance(one, bool)), key=lambda one: (isinstance(one, str), str(one)))
        for found in (constants_of_rule(op), constants_of_op(op))
    )
    return tuple(dict.fromkeys((*rule, *own)))


class _Value(NamedTuple):
    """A change of one argument; ``named`` if the schema alone says that the op takes the value."""

    variation: Variation
    named: bool
    infinite: bool


def _values(call: Call) -> Iterator[_Value]:
    constants = _constants(call.op)
    for argument in call.op._schema.arguments:
        if argument.is_out:
            continue
        kind = str(argument.real_type)
        optional = kind.startswith("Optional[")
        kind = kind[len("Optional[") : -1] if optional else kind
        default = argument.default_value if argument.has_default_value() else None
        given = call.values.get(argument.name, default)
        named = [default] * argument.has_default_value() + [None] * optional + [given is not True] * (kind == "bool")
        lengths = lengths_of_rule(call.op) if "Tensor" in kind and isinstance(given, list | tuple) and given else []
        longer = [[*given, *given * length][:length] for length in lengths]  # type: ignore[misc, operator]
        others = codes_of(call.op, argument.name) if kind == "int" else ()
        for number, value in enumerate((*named, *(others or _candidates(kind, given, constants)), *longer)):
            if not _alike(value, given):
                change = partial(with_value, name=argument.name, value=value)
                variation = Variation(f"{argument.name} is {_shown(value)}", change)
                yield _Value(variation, number < len(named), isinstance(value, float) and math.isinf(value))


def _flags(call: Call) -> Iterator[_Value]:
    """Yield the other choices of several flags at once: a rule may be right for each of them alone."""
    given = {one.name: call.values.get(one.name, one.default_value) for one in call.op._schema.arguments}
    flags = [name for name, value in given.items() if type(value) is bool][:_MOST_FLAGS]
    for count in range(2, len(flags) + 1):
        for some in combinations(flags, count):
            values = {name: not given[name] for name in some}
            label = ", ".join(f"{name} is {value}" for name, value in values.items())
            yield _Value(Variation(label, partial(with_values, values)), named=True, infinite=False)


def _alike(one: object, other: object) -> bool:
    return type(one) is type(other) and not isinstance(one, torch.Tensor | list | tuple) and one == other


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value)


def _candidates(kind: str, given: object, constants: Constants) -> Iterator[object]:
    """Yield other values of an argument whose type is ``kind``; the op may refuse them."""
    numbers = near_numbers(constants)
    if kind in ("int", "SymInt"):
        # kernels divide by counts, some without a look at them: 0 would end the process
        positive = isinstance(given, int) and given > 0
        yield from dict.fromkeys(n for n in (*numbers, *_NUMBERS) if isinstance(n, int) and (n > 0 or not positive))
    elif kind in ("float", "number", "Scalar"):
        yield from dict.fromkeys(float(one) if kind == "float" else one for one in (*numbers, *_NUMBERS))
    elif kind == "str":
        yield from [one for one in constants if isinstance(one, str) and len(one) <= _LONGEST][:_MOST_TEXTS]
    elif kind == "ScalarType":
        yield from _DTYPES
    elif kind.startswith("List[") and isinstance(given, list | tuple):
        yield from _lists(given)


def _lists(given: Sequence[object]) -> Iterator[list[object]]:
    yield list(given[:1])
    yield list(given[:-1])
    yield [*given, *given[-1:]]
    yield list(reversed(given))
    if all(type(one) is int for one in given):
        yield [0] * len(given)
        for place in range(len(given)):
            yield [one if other == place else 0 for other, one in enumerate(given)]


def _numbers_of_dims(call: Call) -> Iterator[Variation]:
    """Yield the call with more or fewer dims in front, if the op takes it and its rules branch on their number.

    An op may take a number of dims that nobody means. So calls are left out at which the rules raise, or claim only
    what they claim of the given call, with dims counted from either end.
    """
    most = max((tensor.ndim for tensor in call.tensors), default=0)
    outs = {argument.name for argument in call.op._schema.arguments if argument.is_out}
    read = pytree.tree_leaves([value for name, value in call.values.items() if name not in outs])
    # a result has the dims that the op says, so that out= alone cannot have more
    ways = (False, True) if any(isinstance(one, torch.Tensor) and one.ndim == most for one in read) else (True,)
    usual, on_fake = claimed(call), accepts(call, on_fake_tensors=True)
    from_the_end = {_shifted(rule, -most) for rule in usual}
    for ndim in range(_MOST_DIMS + 1):
        for everywhere in ways:
            variation = Variation(f"{ndim} dims", partial(_with_dims, ndim - most, most, everywhere))
            changed = variation.apply(call) if ndim != most else None
            if changed is None or not accepts(changed, on_fake_tensors=on_fake):
                continue
            rules = claimed(changed)
            if not _raises(rules) and any(
                rule not in usual and _shifted(rule, -ndim) not in from_the_end for rule in rules
            ):
                yield variation
                break


def dims_of_one(call: Call) -> Iterator[Variation]:
    """Yield the call with a dim fewer, or a dim more, of one of several tensors, and with none, if the op takes it."""
    outs = {argument.name for argument in call.op._schema.arguments if argument.is_out}
    read = [id(value) for name, value in call.values.items() if name not in outs]
    places = [place for place, leaf in enumerate(call.leaves) if isinstance(leaf, torch.Tensor)]
    if len(places) < 2:
        return
    on_fake = accepts(call, on_fake_tensors=True)
    for number, place in enumerate(places):
        leaf = call.leaves[place]
        assert isinstance(leaf, torch.Tensor)
        for ndim in dict.fromkeys((0, leaf.ndim - 1, leaf.ndim + 1)):
            if id(leaf) in read and 0 <= ndim <= _MOST_DIMS and ndim != leaf.ndim:
                change = Variation(f"{ndim} dims of tensor {number}", partial(_one_with_dims, place, ndim - leaf.ndim))
                changed = change.apply(call)
                if changed is not None and accepts(changed, on_fake_tensors=on_fake):
                    yield change


def _one_with_dims(place: int, more: int, call: Call) -> Call | None:
    leaves = call.leaves
    leaf = leaves[place]
    if not isinstance(leaf, torch.Tensor) or leaf.ndim + more < 0 or not leaf.numel():
        return None
    leaves[place] = leaf.expand(*(2,) * more, *leaf.shape).clone() if more > 0 else leaf[(0,) * -more].clone()
    return call.with_leaves(leaves)


def _are_new(rules: frozenset[str], usual: frozenset[str]) -> bool:
    """Return whether rules do not raise, and have one that is not as the usual ones, whatever the dims are."""
    return not _raises(rules) and bool(kinds_of(rules) - kinds_of(usual))


def _shifted(rule: str, by: int) -> str:
    """Return a rule with another number in each shard."""
    return _DIM.sub(lambda found: f"S({int(found[1]) + by})", rule)


def _with_dims(more: int, most: int, everywhere: bool, call: Call) -> Call | None:
    """Return the call with so many more dims of 2 in front of its tensors, or of those alone that have most dims."""
    leaves = call.leaves
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and (everywhere or leaf.ndim == most):
            if leaf.ndim + more < 0:
                return None
            leaves[place] = (
                leaf.expand(*(2,) * more, *leaf.shape).clone()
                if more > 0
                else leaf[(0,) * -more]
                if leaf.numel()
                else leaf
            )
    return call.with_leaves(leaves)
