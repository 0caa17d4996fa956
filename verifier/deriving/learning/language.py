"""What derived rules are made of: tensor dims and conditions, each with its value for a call and its text as code."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from verifier.core.ops import resolve
from verifier.deriving.learning.evidence import CallEvidence
from verifier.torch_internals.names import OpOverload

__all__ = ["Dim", "DimSet", "Scope", "Test", "dim_sets", "dims_of_inputs", "dims_of_results", "named_dims", "tests"]

_DIMS = ("dim", "dims", "dim0", "dim1", "dim2", "dimension", "axis", "axes", "start_dim", "end_dim")
_LIKE_DIMS = re.compile(r"(?:.*_)?(?:dims?|dimensions?|ax[ie]s)\d*(?:_.*)?")
"""Names that arguments have that name dims, if their numbers may be dims of the first tensor in each call."""
_PAIRS_FROM_LAST = ("pad", "padding")
"""Arguments that may have two numbers for each dim, those of the last dim first."""
_OF_TORCH = ("aten", "prims", "_c10d_functional")
_NUMBERS = (1, 2, 3)
_SPECIAL = (0, 1)
"""Numbers that make a call another one, such as a factor of 1, or one group."""


@dataclass(frozen=True)
class Scope:
    """A call, and a tensor dim ``d`` of the slot ``pivot``; -1 for a rule without shards."""

    call: CallEvidence
    pivot: int = 0
    d: int = -1

    @property
    def ndim(self) -> int:
        return self.call.ndims[self.pivot]

    def ndim_of(self, slot: str) -> int:
        return self.call.ndims[self.call.slots.index(slot)]

    def shape_of(self, slot: str) -> tuple[int, ...]:
        return self.call.shapes[self.call.slots.index(slot)]

    def spans(self, slot: str) -> bool:
        """Return whether a slot, aligned with the pivot at the last dim, has more than one element at ``d``."""
        shape = self.shape_of(slot)
        place = self.d + len(shape) - self.ndim
        return place >= 0 and shape[place] != 1

    def has_extent_of(self, slot: str) -> bool:
        """Return whether a slot has as many elements at ``d`` as the pivot."""
        shape = self.shape_of(slot)
        return self.d < len(shape) and shape[self.d] == self.call.shapes[self.pivot][self.d]

    def extents(self, name: str) -> list[int]:
        """Return the extents of the dims that an argument names; a tensor without dims has none."""
        shape = self.call.shapes[0]
        return [shape[dim] for dim in self.dims(name) if dim < len(shape)]

    def dims(self, name: str) -> list[int]:
        """Return the dims that an argument names, of the first tensor, counted from the front and sorted."""
        return _named(self.call, name)


@dataclass(frozen=True)
class Dim:
    """A tensor dim as a function of a scope."""

    text: str
    value: Callable[[Scope], int | None]


@dataclass(frozen=True)
class Test:
    """A condition on a scope; ``of_call`` if it does not depend on ``d``."""

    text: str
    value: Callable[[Scope], bool]
    of_call: bool = True


@dataclass(frozen=True)
class DimSet:
    """Some dims of the first tensor, as an argument names them.

    Parameters
    ----------
    name, text
        What code calls them, and how it finds them.
    ordered
        Whether a dim may also be before or behind all of them.
    """

    name: str
    text: str
    value: Callable[[CallEvidence], Sequence[int]]
    ordered: bool = False


def dim_sets(calls: Sequence[CallEvidence], first: str) -> Iterator[DimSet]:
    """Yield the sets of dims that arguments of ``calls`` name; ``first`` is the name of the first tensor."""
    ndim = f"{first}_ndim"
    for name in calls[0].values:
        values = [call.values[name] for call in calls if name in call.values]
        if _is_dim(name, calls):
            kind = str(next(a.type for a in resolve(calls[0].case.call)._schema.arguments if a.name == name))  # type: ignore[attr-defined]
            given = f"([{name}] if isinstance({name}, int) else {name} or range({ndim}))"
            text = (
                f"[{name} % max({ndim}, 1)]"
                if kind == "int"
                else f"sorted({{dim % max({ndim}, 1) for dim in {given}}})"
            )
            yield DimSet(f"{name}_dims", text, lambda call, name=name: _named(call, name), True)  # type: ignore[misc]
            if not any(_is_int(value) for value in values):
                yield from _sets_of_lists(calls, name, ndim)
        elif name in _PAIRS_FROM_LAST and all(_are_pairs(call, name) for call in calls):
            text = f"{{{ndim} - 1 - n // 2 for n, one in enumerate({name}) if one}}"
            yield DimSet(f"{name}_dims", text, lambda call, name=name: _padded(call, name))  # type: ignore[misc]


def _sets_of_lists(calls: Sequence[CallEvidence], name: str, ndim: str) -> Iterator[DimSet]:
    if not all(call.values[name] for call in calls):
        text = f"{{dim % max({ndim}, 1) for dim in {name} or ()}}"
        yield DimSet(f"{name}_given", text, lambda call: _named(call, name) if call.values[name] else ())
    for other in calls[0].values:
        both = [(call.values[name] or [], call.values[other]) for call in calls]
        if other == name or not all(_are_ints(some) for _, some in both):
            continue
        if any(dims and len(dims) != len(some) for dims, some in both) or all(all(some) for _, some in both):  # type: ignore[arg-type]
            continue
        text = (
            f"{{dim % max({ndim}, 1) for dim, one in zip({name}, {other}) if one}} if {name} "
            f"else set(range({ndim})) if any({other}) else set()"
        )
        yield DimSet(f"{name}_with_{other}", text, lambda call, other=other: _named_with(call, name, other))  # type: ignore[misc]


def named_dims(call: CallEvidence) -> tuple[tuple[int, ...], ...]:
    """Return the dims that each argument names, counted from the front."""
    return tuple(tuple(_named(call, name)) for name in _dim_names([call]))


def _named(call: CallEvidence, name: str) -> list[int]:
    """Return the dims that an argument names, of the first tensor, counted from the front and sorted; all for none."""
    value, ndim = call.values[name], max(call.ndims[0], 1)
    if value is None or value == []:
        return list(range(call.ndims[0]))
    assert isinstance(value, int | list)
    return sorted({dim % ndim for dim in (value if isinstance(value, list) else [value])})


def _named_with(call: CallEvidence, name: str, other: str) -> list[int]:
    """Return the dims that an argument names and for which another one has a number that is not 0."""
    dims, numbers, ndim = call.values[name] or [], call.values[other], call.ndims[0]
    assert isinstance(dims, list)
    assert isinstance(numbers, list)
    if not dims:  # of the flattened tensor
        return list(range(ndim)) if any(numbers) else []
    return [dim % max(ndim, 1) for dim, number in zip(dims, numbers, strict=True) if number]


def _padded(call: CallEvidence, name: str) -> list[int]:
    """Return the dims for which one of a pair of numbers is not 0."""
    numbers = call.values[name]
    assert isinstance(numbers, list)
    return [call.ndims[0] - 1 - n // 2 for n, number in enumerate(numbers) if number]


def _are_pairs(call: CallEvidence, name: str) -> bool:
    value = call.values.get(name)
    return isinstance(value, list) and _are_ints(value) and len(value) % 2 == 0 and len(value) <= 2 * call.ndims[0]


def _is_dim(name: str, calls: Sequence[CallEvidence]) -> bool:
    """Return whether an argument names dims: by its name, and by what calls have for it.

    In an op that is not torch's, an argument of another name does if each call has a dim for it, not all the same.
    """
    values = [call.values[name] for call in calls if name in call.values]
    if not all(value is None or _is_int(value) or _are_ints(value) for value in values):
        return False
    if name in _DIMS:
        return True
    if not all(_in_range(call, name) for call in calls):
        return False
    return bool(_LIKE_DIMS.fullmatch(name)) or _selects(name, calls)


def _selects(name: str, calls: Sequence[CallEvidence]) -> bool:
    """Return whether an integer of an op that is not torch's may be a dim of the first tensor, by its values alone."""
    schema = resolve(calls[0].case.call)
    own = isinstance(schema, OpOverload) and schema.namespace not in _OF_TORCH
    return own and all(_is_int(call.values[name]) for call in calls) and len({call.values[name] for call in calls}) > 1


def _in_range(call: CallEvidence, name: str) -> bool:
    """Return whether the numbers of an argument may be dims of the first tensor."""
    value, ndim = call.values.get(name), call.ndims[0]
    return all(-ndim <= one < ndim for one in (value if isinstance(value, list) else [] if value is None else [value]))  # type: ignore[operator]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_ints(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_int, value))


def _dim_names(calls: Sequence[CallEvidence]) -> list[str]:
    return [name for name in calls[0].values if _is_dim(name, calls)]


# ----------------------------------------------------------------------------------------------------------------- dims
def dims_of_inputs(calls: Sequence[CallEvidence], pivot: int, slot: int) -> Iterator[Dim]:
    """Yield dims of the slot number ``slot`` that a dim of the pivot may go with, the likeliest first."""
    name, whole = calls[0].slots[slot], f"{calls[0].slots[pivot]}_ndim"
    yield Dim("d", lambda scope: scope.d)
    yield Dim(f"d + {name}_ndim - {whole}", lambda scope: scope.d + scope.ndim_of(name) - scope.ndim)
    for number in (0, 1, 2):
        yield Dim(str(number), lambda scope, number=number: number)  # type: ignore[misc]
    for number in (1, 2):
        yield Dim(f"{name}_ndim - {number}", lambda scope, n=number: scope.ndim_of(name) - n)  # type: ignore[misc]
    yield Dim("d + 1", lambda scope: scope.d + 1)
    yield Dim("d - 1", lambda scope: scope.d - 1)
    for other in _dim_names(calls):
        yield Dim(f"{other}_dims[0]", lambda scope, other=other: next(iter(scope.dims(other)), None))  # type: ignore[misc]


def dims_of_results(calls: Sequence[CallEvidence], pivot: int) -> Iterator[Dim]:
    """Yield dims of a result that a dim of the pivot may become, the likeliest first."""
    yield Dim("d", lambda scope: scope.d)
    names = _dim_names(calls)
    for name in names:
        below = f"d - sum(dim < d for dim in {name}_dims)"
        yield Dim(below, lambda scope, name=name: scope.d - sum(dim < scope.d for dim in scope.dims(name)))  # type: ignore[misc]
        values = [call.values[name] for call in calls]
        if all(_is_int(value) for value in values):
            at = f"{name} % ({calls[0].slots[0]}_ndim + 1)"
            yield Dim(f"d + (d >= {at})", lambda scope, name=name: _inserted(scope, name))  # type: ignore[misc]
        if all(_are_ints(value) for value in values):
            yield Dim(
                f"[dim % {calls[0].slots[0]}_ndim for dim in {name}].index(d)",
                lambda scope, name=name: _permuted(scope, name),  # type: ignore[misc]
            )
    for name in names:
        if all(_is_int(call.values[name]) for call in calls):
            yield Dim(f"{name}_dims[0]", lambda scope, name=name: next(iter(scope.dims(name)), None))  # type: ignore[misc]
    for one, other in itertools.pairwise(names):
        if all(_is_int(call.values[one]) and _is_int(call.values[other]) for call in calls):
            text = f"{{{one}_dims[0]: {other}_dims[0], {other}_dims[0]: {one}_dims[0]}}.get(d, d)"
            yield Dim(text, lambda scope, one=one, other=other: _swapped(scope, one, other))  # type: ignore[misc]
            below = f"d - ({one}_dims[0] < d) - ({other}_dims[0] < d)"
            yield Dim(below, lambda scope, both=(one, other): _behind_both(scope, both))  # type: ignore[misc]
            ndim = f"{calls[0].slots[0]}_ndim"
            left = f"[n for n in range({ndim} + 1) if n not in ({one} % ({ndim} + 1), {other} % ({ndim} + 1))]"
            yield Dim(f"[*{left}, {ndim}][d]", lambda scope, both=(one, other): _between_both(scope, both))  # type: ignore[misc]
    for slot in calls[0].slots:
        if slot != calls[0].slots[pivot]:
            text = f"d + {slot}_ndim - {calls[0].slots[pivot]}_ndim"
            yield Dim(text, lambda scope, slot=slot: scope.d + scope.ndim_of(slot) - scope.ndim)  # type: ignore[misc]
            yield Dim(f"d + {slot}_ndim - 1", lambda scope, slot=slot: scope.d + scope.ndim_of(slot) - 1)  # type: ignore[misc]
    yield Dim("d + 1", lambda scope: scope.d + 1)
    yield Dim("d - 1", lambda scope: scope.d - 1)
    for number in (0, 1, 2):
        yield Dim(str(number), lambda scope, number=number: number)  # type: ignore[misc]
    for slot in calls[0].slots if calls[0].gradients else ():
        for number in (1, 2):
            text = f"{slot}_ndim - {number}"
            yield Dim(text, lambda scope, slot=slot, n=number: scope.ndim_of(slot) - n)  # type: ignore[misc]


def _inserted(scope: Scope, name: str) -> int:
    value = scope.call.values[name]
    assert isinstance(value, int)
    return scope.d + (scope.d >= value % (scope.call.ndims[0] + 1))


def _permuted(scope: Scope, name: str) -> int | None:
    value = scope.call.values[name]
    assert isinstance(value, list)
    places = [dim % max(scope.call.ndims[0], 1) for dim in value]
    return places.index(scope.d) if scope.d in places else None


def _behind_both(scope: Scope, names: tuple[str, str]) -> int:
    """Return where a dim is without the two that arguments name."""
    return scope.d - sum(dim < scope.d for name in names for dim in scope.dims(name))


def _between_both(scope: Scope, names: tuple[str, str]) -> int | None:
    """Return where a dim is if the last one becomes the two that arguments name."""
    count = scope.call.ndims[0] + 1
    taken = [scope.call.values[name] % count for name in names]  # type: ignore[operator]
    left = [n for n in range(count) if n not in taken]
    return [*left, count - 1][scope.d] if scope.d <= len(left) else None


def _swapped(scope: Scope, one: str, other: str) -> int | None:
    (first, *_), (second, *_) = [*scope.dims(one), -1], [*scope.dims(other), -1]
    return {first: second, second: first}.get(scope.d, scope.d)


# ---------------------------------------------------------------------------------------------------------------- tests
def tests(calls: Sequence[CallEvidence], pivot: int | None) -> list[Test]:
    """Return the conditions that rules may have, the simplest first; without ``pivot`` only those on the call."""
    found = list(_tests_of_call(calls))
    if pivot is None:
        return found
    return [*_tests_of_dim(calls, pivot), *found]


def _tests_of_dim(calls: Sequence[CallEvidence], pivot: int) -> Iterator[Test]:
    ndim = f"{calls[0].slots[pivot]}_ndim"
    for some in dim_sets(calls, calls[0].slots[0]):
        yield Test(f"d not in {some.name}", lambda s, some=some: s.d not in some.value(s.call), False)  # type: ignore[misc]
        yield Test(f"d in {some.name}", lambda s, some=some: s.d in some.value(s.call), False)  # type: ignore[misc]
        if some.ordered:
            before, behind = f"d < min({some.name}, default=0)", f"d > max({some.name}, default=-1)"
            yield Test(before, lambda s, some=some: s.d < min(some.value(s.call), default=0), False)  # type: ignore[misc]
            yield Test(behind, lambda s, some=some: s.d > max(some.value(s.call), default=-1), False)  # type: ignore[misc]
    for number in (1, 2):
        yield Test(f"d < {ndim} - {number}", lambda s, n=number: s.d < s.ndim - n, False)  # type: ignore[misc]
        yield Test(f"d == {ndim} - {number}", lambda s, n=number: s.d == s.ndim - n, False)  # type: ignore[misc]
    for number in (0, 1, 2):
        yield Test(f"d == {number}", lambda s, n=number: s.d == n, False)  # type: ignore[misc]
        yield Test(f"d > {number}", lambda s, n=number: s.d > n, False)  # type: ignore[misc]
    for name in _lists_of_last_dims(calls):  # a norm over the last dims is given their extents
        last = f"{ndim} - len({name})"
        yield Test(f"d < {last}", lambda s, name=name: s.d < s.ndim - len(s.call.values[name]), False)  # type: ignore[misc]
        yield Test(f"d >= {last}", lambda s, name=name: s.d >= s.ndim - len(s.call.values[name]), False)  # type: ignore[misc]
    for slot in calls[0].slots:
        if slot != calls[0].slots[pivot]:
            yield Test(f"d >= {ndim} - {slot}_ndim", lambda s, slot=slot: s.d >= s.ndim - s.ndim_of(slot), False)  # type: ignore[misc]
            yield Test(f"d < {ndim} - {slot}_ndim", lambda s, slot=slot: s.d < s.ndim - s.ndim_of(slot), False)  # type: ignore[misc]
            at = f"d + {slot}_ndim - {ndim}"
            spans = f"({at} >= 0 and {slot}.shape[{at}] != 1)"
            yield Test(spans, lambda s, slot=slot: s.spans(slot), False)  # type: ignore[misc]
            yield Test(f"not {spans}", lambda s, slot=slot: not s.spans(slot), False)  # type: ignore[misc]
            same = f"({slot}_ndim > d and {slot}.shape[d] == {calls[0].slots[pivot]}.shape[d])"
            yield Test(same, lambda s, slot=slot: s.has_extent_of(slot), False)  # type: ignore[misc]
    name = calls[0].slots[pivot]
    yield Test(f"{name}.shape[d] != 1", lambda s, slot=name: s.shape_of(slot)[s.d] != 1, False)  # type: ignore[misc]


def _lists_of_last_dims(calls: Sequence[CallEvidence]) -> Iterator[str]:
    """Yield the names of arguments that have the extents of the last dims of the first tensor, in each call."""
    for name in calls[0].values:
        values = [call.values[name] for call in calls]
        if name not in _dim_names(calls) and all(_are_ints(value) and value for value in values):
            both = zip(values, (call.shapes[0] for call in calls), strict=True)
            if all(tuple(value) == shape[len(shape) - len(value) :] for value, shape in both):  # type: ignore[arg-type]
                yield name


def _tests_of_call(calls: Sequence[CallEvidence]) -> Iterator[Test]:
    dims = _dim_names(calls)
    for name in calls[0].values:
        values = [call.values[name] for call in calls]
        if any(value is None for value in values):
            yield Test(f"{name} is None", lambda s, name=name: s.call.values[name] is None)  # type: ignore[misc]
            yield Test(f"{name} is not None", lambda s, name=name: s.call.values[name] is not None)  # type: ignore[misc]
        if name in dims:
            first = calls[0].slots[0]
            text = f"all({first}.shape[dim] == 1 for dim in {name}_dims if dim < {first}_ndim)"
            yield Test(text, lambda s, name=name: all(one == 1 for one in s.extents(name)))  # type: ignore[misc]
        if name in dims and (name in _DIMS or _LIKE_DIMS.fullmatch(name)):
            continue
        if any(isinstance(value, torch.dtype) for value in values):
            text = f"{name} is None or {name}.is_floating_point"
            yield Test(f"({text})", lambda s, name=name: _is_floating_or_none(s.call.values[name]))  # type: ignore[misc]
        if all(_are_ints(value) for value in values) and any(one < 0 for value in values for one in value):  # type: ignore[attr-defined]
            text = f"max({name}, default=0) <= 0"
            yield Test(text, lambda s, name=name: max(s.call.values[name], default=0) <= 0)  # type: ignore[misc]
        for place in range(_most_flags(values)):
            yield Test(f"{name}[{place}]", lambda s, name=name, n=place: bool(s.call.values[name][n]))  # type: ignore[misc]
            yield Test(f"not {name}[{place}]", lambda s, name=name, n=place: not s.call.values[name][n])  # type: ignore[misc]
        numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(numbers) == len(values) and any(v < 0 for v in numbers):
            yield Test(f"{name} > 0", lambda s, name=name: s.call.values[name] > 0)  # type: ignore[misc]
            yield Test(f"{name} < 0", lambda s, name=name: s.call.values[name] < 0)  # type: ignore[misc]
        if any(isinstance(value, bool) for value in values):
            yield Test(name, lambda s, name=name: bool(s.call.values[name]))  # type: ignore[misc]
            yield Test(f"not {name}", lambda s, name=name: not s.call.values[name])  # type: ignore[misc]
        # a fraction that calls have in common is an accident, and so is a number that only rare calls have
        kinds = [
            value for value in (call.values[name] for call in calls if not call.rare)
            if (isinstance(value, int | str) and not isinstance(value, bool))
            or (isinstance(value, float) and value.is_integer())
        ]  # fmt: skip
        few = len(set(kinds)) <= len(_NUMBERS)
        for value in (kind for kind in dict.fromkeys(kinds) if few or kind in _SPECIAL):
            yield Test(f"{name} == {value!r}", lambda s, name=name, value=value: s.call.values[name] == value)  # type: ignore[misc]
    for one, other in itertools.permutations(calls[0].slots, 2):
        yield Test(f"{one}_ndim >= {other}_ndim", lambda s, a=one, b=other: s.ndim_of(a) >= s.ndim_of(b))  # type: ignore[misc]
    for place, slot in enumerate(calls[0].slots):
        if any(call.lengths[place] > 1 for call in calls):
            yield Test(f"len({slot}) == 1", lambda s, n=place: s.call.lengths[n] == 1)  # type: ignore[misc]
        if len({call.dtypes[place] for call in calls}) > 1:
            for kind in ("is_floating_point", "is_complex"):
                test = f"{slot}.dtype.{kind}"
                yield Test(test, lambda s, n=place, kind=kind: getattr(s.call.dtypes[n], kind))  # type: ignore[misc]
                yield Test(f"not {test}", lambda s, n=place, kind=kind: not getattr(s.call.dtypes[n], kind))  # type: ignore[misc]
        for number in _NUMBERS:
            yield Test(f"{slot}_ndim == {number}", lambda s, slot=slot, n=number: s.ndim_of(slot) == n)  # type: ignore[misc]
            yield Test(f"{slot}_ndim > {number}", lambda s, slot=slot, n=number: s.ndim_of(slot) > n)  # type: ignore[misc]
    for one, other in itertools.pairwise(calls[0].slots):
        yield Test(f"{one}_ndim == {other}_ndim", lambda s, a=one, b=other: s.ndim_of(a) == s.ndim_of(b))  # type: ignore[misc]
        yield Test(f"{one}_ndim > {other}_ndim", lambda s, a=one, b=other: s.ndim_of(a) > s.ndim_of(b))  # type: ignore[misc]


def _most_flags(values: Sequence[object]) -> int:
    """Return how many bools each of ``values`` has; 0 if one is no list of them, or has another number of them."""
    lengths = {len(v) if isinstance(v, list) and all(isinstance(one, bool) for one in v) else 0 for v in values}
    return lengths.pop() if len(lengths) == 1 else 0


def _is_floating_or_none(value: object) -> bool:
    return value is None or (isinstance(value, torch.dtype) and value.is_floating_point)
