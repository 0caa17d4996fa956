"""Calls with other arguments than samples have: those of another call, other numbers and flags, swapped tensors."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import Replicate

from verifier.core.case import OpCase
from verifier.core.ops import resolve
from verifier.deriving.learning.evidence import CallEvidence
from verifier.rules.samples import Sample, Values

__all__ = [
    "Change",
    "Crossed",
    "Swap",
    "changes",
    "crossed",
    "other_flags",
    "other_numbers",
    "swaps",
    "without_zero_factors",
]

_MOST_CROSSED = 16
"""So many calls get another value of an argument."""
_FACTORS = ("alpha", "beta", "value")
_MOST_NUMBERS = 64
"""So many calls get another integer."""
_MOST_SWAPS = 4
"""So many calls get two tensors in the place of each other."""
_MOST_FLAGS = 4
"""So many calls get the other value of a flag."""


@dataclass(frozen=True)
class Change:
    """Another value of an argument of a sample: its origin, the argument, its place, and the value.

    Parameters
    ----------
    rare
        Whether the call that this makes refutes rules, and need not be explained.
    """

    origin: str
    name: str
    place: int
    value: object
    rare: bool = True

    def __str__(self) -> str:
        return f"{self.name}={self.value}{' of another call' * self.rare}"

    def of(self, case: OpCase) -> OpCase:
        """Return a call with this value."""
        # what is exact with one value rounds with another: 0.2 times a sum is not the sum of products
        if self.name in case.kwargs or self.place >= len(case.args):
            return replace(case, kwargs={**case.kwargs, self.name: self.value}, exact=False)
        args = (*case.args[: self.place], self.value, *case.args[self.place + 1 :])
        return replace(case, args=args, exact=False)


@dataclass(frozen=True)
class Swap:
    """Two tensors of a sample in the place of each other: its origin, the arguments, and their places.

    The call that this makes refutes rules, and need not be explained: one of a kind would be an accident.
    """

    origin: str
    names: tuple[str, str]
    places: tuple[int, int]
    rare: bool = True

    def __str__(self) -> str:
        return f"{' and '.join(self.names)} swapped"

    def of(self, case: OpCase) -> OpCase:
        """Return a call with these tensors swapped."""
        args = list(case.args)
        one, other = self.places
        args[one], args[other] = args[other], args[one]
        return replace(case, args=tuple(args))


@dataclass(frozen=True)
class Crossed:
    """A sample with the value that another one has for an argument, or with two tensors swapped."""

    sample: Sample
    change: Change | Swap

    claims_only = ""

    @property
    def rare(self) -> bool:
        return self.change.rare

    @property
    def not_testable(self) -> str:
        return self.sample.not_testable

    @property
    def op(self) -> str:
        return self.sample.op

    @property
    def origin(self) -> str:
        return f"{self.sample.origin}, {self.change}"

    def draw(self, size: int, draw: int, values: Values = Values.USUAL) -> OpCase | None:
        case = self.sample.draw(size, draw, values)
        return None if case is None else self.change.of(case)


def crossed(calls: Sequence[CallEvidence], samples: Sequence[Sample]) -> list[Crossed]:
    """Return samples with arguments of others, one at a time; see :func:`changes`."""
    by_origin = {sample.origin: sample for sample in samples}
    return [Crossed(by_origin[change.origin], change) for change in changes(calls, by_origin)]


def changes(calls: Sequence[CallEvidence], origins: Container[str]) -> list[Change]:
    """Return arguments of calls for others of ``origins``, one at a time: they tell apart what goes together by chance.

    In ``x[1:3]`` and ``x[:]`` both bounds are given or none is, so that a rule may name the wrong one. Factors also get
    the opposite sign: a maximum of parts times a positive number is that of the whole.
    """
    usual = [call for call in calls if not call.rare]
    found: list[Change] = []
    for place, argument in enumerate(resolve(usual[0].case.call)._schema.arguments if usual else ()):  # type: ignore[attr-defined]
        name = argument.name
        values = {repr(call.values[name]): call.values[name] for call in usual if name in call.values}
        opposite = [-value for value in values.values() if isinstance(value, float) and value]
        values |= {repr(value): value for value in opposite}
        here = [
            Change(call.origin, name, place, value)
            for call in usual
            for text, value in values.items()
            if text != repr(call.values.get(name)) and call.origin in origins
        ]
        found += here[:: math.ceil(len(here) / _MOST_CROSSED) or 1]
    return found


def other_numbers(calls: Sequence[CallEvidence], origins: Container[str]) -> list[tuple[CallEvidence, Change]]:
    """Return integers, and lists of them, of calls for greater and smaller ones, each with the call that this makes.

    All calls of which a rule asks for blocks of 9 may have the same factor of 3.
    """
    found: list[tuple[CallEvidence, Change]] = []
    for call in calls:
        arguments = resolve(call.case.call)._schema.arguments  # type: ignore[attr-defined]
        places = {argument.name: place for place, argument in enumerate(arguments)}
        for name, value in call.values.items() if call.origin in origins else ():
            for step in (1, -1, 2):
                other = _stepped(value, step)
                if other is not None:
                    change = Change(call.origin, name, places[name], other)
                    origin = f"{call.origin}, {name}={other}"
                    made = replace(call, origin=origin, values={**call.values, name: other}, case=change.of(call.case))
                    found.append((replace(made, rules={}, rare=True), change))
    return found[:: math.ceil(len(found) / _MOST_NUMBERS) or 1]


def _stepped(value: object, step: int) -> object:
    """Return an integer, or a list of them, that differs by ``step``; None if it is none or would be less than 1."""
    if type(value) is int:
        return value + step if value + step > 0 else None
    if isinstance(value, list) and value and all(type(one) is int and one + step > 0 for one in value):
        return [one + step for one in value]
    return None


def without_zero_factors(calls: Sequence[CallEvidence]) -> list[CallEvidence]:
    """Return the calls; those with a factor of 0 are rare, if others have another one.

    What is multiplied by 0 does not matter, so that it may have any placement, and no rule is worth having for that.
    """
    names = [name for name in _FACTORS if any(not call.rare and call.values.get(name, 0) != 0 for call in calls)]
    return [
        replace(call, rare=call.rare or (any(call.values.get(name) == 0 for name in names) and _ignores_a_tensor(call)))
        for call in calls
    ]


def _ignores_a_tensor(call: CallEvidence) -> bool:
    """Return whether the results are whole wherever all tensors are but one, of which ranks have any parts."""
    whole, results = Replicate(), len(call.results) - len(call.gradients)
    for slot in range(len(call.slots)):
        of_parts = [
            outputs[:results]
            for inputs, outputs in call.rules.items()
            if inputs[slot].is_partial() and all(p == whole for n, p in enumerate(inputs) if n != slot)
        ]
        if of_parts and all(outputs and all(whole in some for some in outputs) for outputs in of_parts):
            return True
    return False


def other_flags(calls: Sequence[CallEvidence], origins: Container[str]) -> list[Change]:
    """Return the other value of each flag of some calls: too few may keep the dims that they reduce, for example.

    Calls for which more holds come first, one of each source before a second one of it.
    """
    usual = [call for call in calls if not call.rare]
    known = {(call.shapes, repr(call.values)) for call in usual}
    found: list[Change] = []
    for place, argument in enumerate(resolve(usual[0].case.call)._schema.arguments if usual else ()):  # type: ignore[attr-defined]
        if str(argument.type) != "bool":
            continue
        name, of_source = argument.name, Counter[str]()
        here = []
        for call in sorted(usual, key=lambda call: -len(call.holding)):
            other = not call.values[name]
            if call.origin in origins and (call.shapes, repr({**call.values, name: other})) not in known:
                here.append((of_source[call.source], Change(call.origin, name, place, other, rare=False)))
                of_source[call.source] += 1
        found += [change for _, change in sorted(here, key=lambda one: one[0])[:_MOST_FLAGS]]
    return found


def swaps(calls: Sequence[CallEvidence], origins: Container[str]) -> list[Swap]:
    """Return tensors of unlike numbers of dims in the place of each other, if no call has more dims in the second one.

    Of most ops that broadcast, samples have as many dims or more in the first tensor. A rule that counts dims from the
    front is right there, and names a dim that does not exist where the second tensor has more.
    """
    usual = [call for call in calls if not call.rare and call.origin in origins]
    pairs: dict[tuple[str, str], list[Swap]] = {}
    for call in usual:
        arguments = resolve(call.case.call)._schema.arguments  # type: ignore[attr-defined]
        tensors = [
            (argument.name, place, value)
            for place, (argument, value) in enumerate(zip(arguments, call.case.args, strict=False))
            if isinstance(value, torch.Tensor) and argument.alias_info is None
        ]
        for (one, here, first), (other, there, second) in itertools.combinations(tensors, 2):
            if first.dtype == second.dtype and first.ndim != second.ndim:
                pairs.setdefault((one, other), []).append(Swap(call.origin, (one, other), (here, there)))
    return [
        swap
        for (one, other), some in pairs.items()
        if all(_ndim_of(call, one) >= _ndim_of(call, other) for call in usual)
        or all(_ndim_of(call, one) <= _ndim_of(call, other) for call in usual)
        for swap in some[:_MOST_SWAPS]
    ]


def _ndim_of(call: CallEvidence, slot: str) -> int:
    return call.ndims[call.slots.index(slot)] if slot in call.slots else 0
