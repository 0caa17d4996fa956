"""Holds derived rules against calls that they were not derived from."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch.distributed.tensor import Partial, Shard

from verifier.core.case import MeshSpec, OpCase
from verifier.core.ops import resolve
from verifier.deriving.learning.cuts import InBlocks, refuted_in_blocks
from verifier.deriving.learning.evidence import CallEvidence, Inputs, Place, described, slot_names
from verifier.deriving.learning.generalise import DerivedRule, placements_of
from verifier.placements.alphabet import Alphabet
from verifier.placements.bounds import leaves_a_rank_empty
from verifier.placements.partials import largest_part
from verifier.rules.classify import Expected
from verifier.rules.execute import Cuts, LocalCall, Results
from verifier.rules.options import CheckOptions, Position
from verifier.rules.sample_on_mesh import CALL_ERRORS
from verifier.rules.samples import Sample, Values

__all__ = [
    "Asked",
    "Change",
    "Crossed",
    "HeldOut",
    "Here",
    "Untried",
    "changes",
    "crossed",
    "emptying_meshes",
    "other_flags",
    "other_numbers",
    "refuting",
    "refuting_in_blocks",
    "without_zero_factors",
]

_DRAWS = 2
"""Draws at each size and mesh."""
_MOST_RANKS = 16
"""Of meshes with more ranks than elements."""


_MOST_CROSSED = 16
"""So many calls get another value of an argument."""
_FACTORS = ("alpha", "beta", "value")
_MOST_NUMBERS = 64
"""So many calls get another integer."""
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

    def of(self, case: OpCase) -> OpCase:
        """Return a call with this value."""
        # what is exact with one value rounds with another: 0.2 times a sum is not the sum of products
        if self.name in case.kwargs or self.place >= len(case.args):
            return replace(case, kwargs={**case.kwargs, self.name: self.value}, exact=False)
        args = (*case.args[: self.place], self.value, *case.args[self.place + 1 :])
        return replace(case, args=args, exact=False)


@dataclass(frozen=True)
class Crossed:
    """A sample with the value that another one has for an argument."""

    sample: Sample
    change: Change

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
        whose = " of another call" if self.change.rare else ""
        return f"{self.sample.origin}, {self.change.name}={self.change.value}{whose}"

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
    return [replace(call, rare=call.rare or any(call.values.get(name) == 0 for name in names)) for call in calls]


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


@dataclass(frozen=True)
class Asked:
    """Placements of slots and results that have to hold for a call: a size, a draw, and a mesh.

    ``in_blocks`` if the rule that lists them holds only where shards begin at multiples of a block.
    """

    size: int
    draw: int
    mesh: MeshSpec
    inputs: Inputs
    outputs: Inputs
    in_blocks: bool


class HeldOut(Protocol):
    """A sample that refutes rules, in this process or in another one."""

    def calls(self) -> Sequence[tuple[int, int, CallEvidence]]:
        """Return its calls, each with the numbers of its size and draw; nothing is known to hold for them."""

    def refuted(self, asked: Sequence[Asked]) -> Sequence[Asked]:
        """Return what does not hold; of the same placements of slots and results the first."""

    def refuted_in_blocks(self, call: CallEvidence, asked: Sequence[InBlocks]) -> Mapping[Inputs, Place]:
        """Return what does not hold for a call at extents that are multiples of blocks, each with the place."""


@dataclass(frozen=True)
class Untried:
    """A sample that refutes rules for placements of which nothing is known.

    Parameters
    ----------
    known
        Placements of its slots of which it is known whether they hold.
    """

    sample: HeldOut
    known: frozenset[Inputs]

    def calls(self) -> Sequence[tuple[int, int, CallEvidence]]:
        return self.sample.calls()

    def refuted(self, asked: Sequence[Asked]) -> Sequence[Asked]:
        unknown = [one for one in asked if one.inputs not in self.known]
        return self.sample.refuted(unknown) if unknown else ()

    def refuted_in_blocks(self, call: CallEvidence, asked: Sequence[InBlocks]) -> Mapping[Inputs, Place]:
        return self.sample.refuted_in_blocks(call, asked)


@dataclass(frozen=True)
class Here:
    """A sample that is run in this process.

    Parameters
    ----------
    enter
        Told before each call.
    skip
        Calls that have ended the process before: what they were to bear out does not hold.
    """

    sample: Sample
    options: CheckOptions
    enter: Callable[[Position], None] = lambda position: None
    skip: frozenset[Position] = frozenset()

    def calls(self) -> list[tuple[int, int, CallEvidence]]:
        draws = itertools.product(range(self.options.sizes), range(_DRAWS))
        with _quietly():
            return [
                (
                    size,
                    draw,
                    described(self.sample.origin, case, local.tensors, [tuple(t.shape) for t in whole.tensors], whole),
                )
                for (size, draw), case, local, whole in self._run_each(0, draws)
            ]

    def refuted(self, asked: Sequence[Asked]) -> list[Asked]:
        by_draw: dict[tuple[int, int], list[tuple[int, Asked]]] = {}
        for number, one in enumerate(asked):
            by_draw.setdefault((one.size, one.draw), []).append((number, one))
        found: dict[tuple[Inputs, Inputs], Asked] = {}
        with _quietly():
            for drawn, case, local, whole in self._run_each(1, by_draw):
                for number, one in by_draw[drawn]:
                    position = (2, 0, 0, number)
                    self.enter(position)
                    key = one.inputs, one.outputs
                    if key not in found and (position in self.skip or not self._holds(case, local, whole, one)):
                        found[key] = one
        return list(found.values())

    def refuted_in_blocks(self, call: CallEvidence, asked: Sequence[InBlocks]) -> dict[Inputs, Place]:
        position = (3, 1, 0, 0)
        if position in self.skip:
            return {}
        with _quietly():
            return refuted_in_blocks(call, self.sample, asked, self.options.seed, lambda: self.enter(position))

    def _run_each(
        self, stage: int, draws: Iterable[tuple[int, int]]
    ) -> Iterator[tuple[tuple[int, int], OpCase, LocalCall, Results]]:
        """Run the sample at each size and draw, and leave out what has ended the process before, or cannot be run."""
        for size, draw in draws:
            position = (stage, size, draw, 0)
            self.enter(position)
            case = self.sample.draw(size, draw) if position not in self.skip else None
            if case is None:
                continue
            try:
                local = LocalCall(case)
                if self.skip or self.sample.claims_only:
                    local.raise_as_on_meta(local.tensors)
                whole = local(local.tensors)
            except CALL_ERRORS:
                continue
            yield (size, draw), case, local, whole

    def _holds(self, case: OpCase, local: LocalCall, whole: Results, asked: Asked) -> bool:
        careful = bool(self.skip or self.sample.claims_only)
        return _holds(case, local, whole.tensors, asked, self.options.seed + asked.draw, careful)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield


def refuting(rules: Sequence[DerivedRule], samples: Iterable[HeldOut], options: CheckOptions) -> Iterator[CallEvidence]:
    """Yield the calls that refute one of ``rules``, with what they refute; they count as rare."""
    for sample in samples:
        calls = sample.calls()
        asked = [one for size, draw, call in calls for one in _asked(rules, size, draw, call, options)]
        refuted = sample.refuted(asked) if asked else ()
        of_size = {size: call for size, _, call in reversed(calls)}
        for size in dict.fromkeys(one.size for one in refuted):  # what another extent refutes may hold for this one
            here = [one for one in refuted if one.size == size]
            yield replace(
                of_size[size],
                rules={one.inputs: () for one in here if not one.in_blocks},
                refuted_in_blocks={one.inputs: ((), one.mesh.world_size) for one in here if one.in_blocks},
                rare=True,
            )


def refuting_in_blocks(
    rules: Sequence[DerivedRule], samples: Iterable[tuple[CallEvidence, HeldOut]]
) -> Iterator[CallEvidence]:
    """Yield the calls that refute one of ``rules``, which ask for blocks, at extents that are multiples of these.

    Each sample goes with its call at the first size, of which nothing need be known.
    """
    for call, sample in samples:
        asked = [
            InBlocks(inputs, outputs, rule.cut.slot, block)
            for rule in rules
            if rule.cut is not None and (block := rule.cut.value(call)) > 1
            for inputs, outputs in placements_of(rule, call)
        ]
        if refuted := sample.refuted_in_blocks(call, asked) if asked else {}:
            yield replace(call, refuted_in_blocks=refuted, rare=True)


def _asked(
    rules: Sequence[DerivedRule], size: int, draw: int, call: CallEvidence, options: CheckOptions
) -> Iterator[Asked]:
    """Yield what ``rules`` list for a call on each mesh, where the call and its tensors can be so placed."""
    listed = [(rule, *placed) for rule in rules for placed in placements_of(rule, call)]
    for rule, inputs, outputs in listed:
        aimed = emptying_meshes(call, inputs) if options.emptied is None and rule.cut is None and not draw else ()
        for mesh in (*options.flat, *aimed):
            cut = rule.is_cut_in_blocks(call, inputs, mesh.world_size)
            if cut and not _leaves_out(call, inputs, mesh, options) and _is_legal(call, inputs):
                yield Asked(size, draw, mesh, inputs, outputs, rule.cut is not None)


def _leaves_out(call: CallEvidence, inputs: Inputs, mesh: MeshSpec, options: CheckOptions) -> bool:
    """Return whether a rank has no elements of a sharded dim, and the rules are not for that."""
    shards = ((p, shape) for p, shape in zip(inputs, call.shapes, strict=True) if p.is_shard())
    return any(options.leaves_out(shape[p.dim], mesh.world_size) for p, shape in shards)  # type: ignore[attr-defined]


def emptying_meshes(call: CallEvidence, inputs: Inputs) -> list[MeshSpec]:
    """Return numbers of ranks that leave one without elements of what is sharded: no more than elements, and more."""
    shards = ((p, shape) for p, shape in zip(inputs, call.shapes, strict=True) if isinstance(p, Shard))
    least = min((extent for p, shape in shards if (extent := shape[p.dim])), default=0)
    fewer = next((ranks for ranks in range(2, least) if leaves_a_rank_empty(least, ranks)), None)
    more = least + 1 if 0 < least < _MOST_RANKS else None
    return [MeshSpec((ranks,)) for ranks in (fewer, more) if ranks is not None]


def _is_legal(call: CallEvidence, inputs: Inputs) -> bool:
    """Return whether the tensors of a call can be so placed: integers have no average.

    Where a rule lists a sum of bools, DTensor makes one of a bool that each rank has.
    """
    return all(
        placement in Alphabet().placements(len(shape), dtype) or (dtype is torch.bool and placement == Partial())
        for placement, shape, dtype in zip(inputs, call.shapes, call.dtypes, strict=True)
    )


def _holds(
    case: OpCase, local: LocalCall, whole: Sequence[torch.Tensor], asked: Asked, seed: int, careful: bool
) -> bool:
    """Return whether the results of the ranks are placed as a rule says, which may be about their gradients, too."""
    mesh, inputs = asked.mesh, asked.inputs
    names = slot_names(case)
    slots = list(dict.fromkeys(names))
    cuts = Cuts(local.tensors, mesh.shape, seed)
    try:
        tensors = [cuts.of(n, (inputs[slots.index(name)],)) for n, name in enumerate(names)]
    except ValueError:  # of a list, another tensor than the first may have a dtype that cannot be so placed
        return True
    terms = sum(t.numel() for t in local.tensors) + sum(t.numel() for t in whole)
    try:
        for one in zip(*tensors, strict=True) if careful else ():
            local.raise_as_on_meta(one)
        made = [local(one) for one in zip(*tensors, strict=True)]
    except Exception:  # noqa: BLE001 - an op may raise anything on a rank's part; that refutes the rule
        return False
    for number, (result, placement) in enumerate(zip(whole, asked.outputs, strict=False)):
        expected = Expected(result, mesh.world_size, case.exact, terms, largest_part(result.dtype))
        expected.expect_parts(any(p.is_partial() for p in inputs))
        bit = expected.bit(placement)
        if any(number >= len(one.tensors) for one in made):
            return False
        if not bit or not expected.represented([one.tensors[number] for one in made], bit):
            return False
    return True
