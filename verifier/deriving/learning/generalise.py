"""From what holds for single calls to rules of their arguments: the fewest that explain all, and what none explains.

A rule is believed only if it holds, or was not tried, at each point of each call at which its conditions hold. A point
is a call and a tensor dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from verifier.deriving.learning.alike import as_one_result, returns_list, with_one_result
from verifier.deriving.learning.cuts import BlocksByCall
from verifier.deriving.learning.evidence import Blocks, CallEvidence, Inputs, Outputs, Place
from verifier.deriving.learning.language import Dim, Scope, Test, dims_of_inputs, dims_of_results, named_dims, tests

__all__ = ["Cut", "Derivation", "DerivedRule", "Part", "generalise", "placements_of", "points_of"]

_What = tuple[int, Inputs]
"""Placements of the slots of a call."""
Part = Placement | Dim
"""A placement that is not a shard, or the dim of a shard."""
_MOST_TESTS = 3
_MOST_RESULTS = 3
"""Of the placements that a result may have, so many are considered."""


@dataclass(frozen=True)
class Cut:
    """A condition of a rule: the shards of a slot begin at multiples of a block, and each rank has elements.

    Parameters
    ----------
    slot
        The number of the slot.
    text, value
        The size of the block: a number, or an argument of the call.
    held, failed
        At how many places it was seen to hold, and not to hold elsewhere, in the call with the fewest.
    """

    slot: int
    text: str
    value: Callable[[CallEvidence], int]
    held: int
    failed: int

    @property
    def in_ones(self) -> bool:
        """Whether all that is asked for is that each rank has elements."""
        return self.text == "1"


@dataclass(frozen=True)
class DerivedRule:
    """A rule: placements of slots and results, for the dims of ``pivot`` and the calls for which ``tests`` hold.

    Parameters
    ----------
    slots
        The slots that a call has to have, of which ``inputs`` are the placements.
    pivot
        The slot whose dims the rule is for; None for a rule without shards.
    gradients
        The slots of whose gradients the last of ``outputs`` are the placements.
    absent
        The places among what the op returns at which the calls return None; ``outputs`` leaves them out.
    alike
        Whether the first of ``outputs`` is that of all tensors of the list that the op returns.
    calls, points
        How many calls it explains, and how many placements in all.
    """

    slots: tuple[str, ...]
    pivot: int | None
    inputs: tuple[Part, ...]
    outputs: tuple[Part, ...]
    tests: tuple[Test, ...]
    calls: int
    points: int
    gradients: tuple[str, ...] = ()
    absent: tuple[int, ...] = ()
    cut: Cut | None = None
    alike: bool = False

    def is_cut_in_blocks(self, call: CallEvidence, inputs: Inputs, ranks: int) -> bool:
        """Return whether a call, with ``inputs`` on so many ranks, is cut as the rule asks for."""
        if self.cut is None:
            return True
        extent = call.shapes[self.cut.slot][inputs[self.cut.slot].dim]  # type: ignore[attr-defined]
        length = -(-extent // ranks)
        return length % max(1, self.cut.value(call)) == 0 and length * (ranks - 1) < extent


@dataclass(frozen=True)
class Derivation:
    """The rules of an op, and the placements that hold in some call and that no rule explains, with their calls.

    ``blocks`` has what holds only where shards begin at multiples of a block.
    """

    rules: tuple[DerivedRule, ...]
    unexplained: tuple[tuple[CallEvidence, Inputs], ...]
    explained: int
    blocks: BlocksByCall = field(default_factory=dict)


def generalise(calls: Sequence[CallEvidence], blocks: BlocksByCall | None = None) -> Derivation:
    """Return the rules that explain what holds for ``calls``.

    Parameters
    ----------
    blocks
        What holds only where shards begin at multiples of a block.
    """
    if as_one_result(calls):
        return _of_lists(calls, blocks or {})
    return _generalised(calls, blocks or {})


def _generalised(calls: Sequence[CallEvidence], blocks: BlocksByCall) -> Derivation:
    rules: list[DerivedRule] = []
    unexplained: list[tuple[CallEvidence, Inputs]] = []
    explained = 0
    by_slots: dict[object, list[CallEvidence]] = {}
    for call in calls:
        if call.rules or call.refuted_in_blocks:
            by_slots.setdefault((call.slots, call.gradients), []).append(call)
    for alike in by_slots.values():
        for group, tests_of_group in _by_results(alike):
            plain = {id(call): _wanted(call) for call in group}
            ways = [(group, plain, None, {id(call): call for call in group}), *_in_blocks(group, blocks)]
            for here, wanted, cut, originals in ways:
                all_ = [(originals[number], inputs) for number, some in wanted.items() for inputs in some]
                found, left = ([], all_) if tests_of_group is None else _of_group(here, wanted)
                rules += [replace(rule, tests=(*rule.tests, *(tests_of_group or ())), cut=cut) for rule in found]
                explained += len(all_) - len(left)
                unexplained += [(originals.get(id(call), call), inputs) for call, inputs in left]
    return Derivation(tuple(rules), tuple(unexplained), explained, blocks)


def _of_lists(calls: Sequence[CallEvidence], blocks: BlocksByCall) -> Derivation:
    """Return the rules of calls that return lists, with one result that stands for all."""
    ones: list[CallEvidence] = []
    of_ones: BlocksByCall = {}
    originals: dict[int, CallEvidence] = {}
    for call in calls:
        if returns_list(call) and not call.alike:
            one, some = with_one_result(call, blocks)
            ones.append(one)
            of_ones |= some
            originals[id(one)] = call
    made = _generalised(ones, of_ones)
    left = tuple((originals[id(call)], inputs) for call, inputs in made.unexplained)
    return replace(made, unexplained=left, blocks=blocks)


_Way = tuple[list[CallEvidence], dict[int, list[Inputs]], Cut, dict[int, CallEvidence]]
"""Calls as they are where a cut is kept, what rules have to explain of each, the cut, and the calls as they were."""


def _in_blocks(calls: Sequence[CallEvidence], blocks: BlocksByCall) -> Iterator[_Way]:
    """Yield the calls as they are where shards begin at multiples of a block, for each block that explains some."""
    for slot in range(len(calls[0].slots)):
        entries = [
            (call, inputs, one)
            for call in calls for inputs, one in blocks.get(id(call), {}).items() if one.slot == slot
        ]  # fmt: skip
        for cut, chosen in _cuts(slot, entries):
            changed, wanted, originals = [], {}, {}
            for call in calls:
                here = {inputs: one.outputs for other, inputs, one in chosen if other is call}
                kept = {
                    inputs: outputs
                    for inputs, outputs in call.rules.items()
                    if outputs or _may_refute(call, inputs, slot, cut.value(call))
                }
                wider = {  # what begins at multiples of 32 also begins at multiples of 8
                    inputs: one.outputs
                    for other, inputs, one in entries
                    if other is call and cut.value(call) % one.block == 0
                }
                refuted: dict[Inputs, Outputs] = {
                    inputs: ()
                    for inputs, place in call.refuted_in_blocks.items()
                    if _begins_at_multiples(call, inputs, slot, place, cut.value(call))
                }
                other = replace(call, rules={**kept, **wider, **here, **refuted})
                changed.append(other)
                wanted[id(other)], originals[id(other)] = list(here), call
            yield changed, wanted, cut, originals


def _begins_at_multiples(call: CallEvidence, inputs: Inputs, slot: int, place: Place, block: int) -> bool:
    """Return whether the shards of a slot begin at multiples of a block at a place."""
    cut, (extents, ranks) = inputs[slot], place
    if not isinstance(cut, Shard):
        return False
    extent = extents[slot] if extents else call.shapes[slot][cut.dim]
    return -(-extent // ranks) % max(1, block) == 0


def _may_refute(call: CallEvidence, inputs: Inputs, slot: int, block: int) -> bool:
    """Return whether a rule in blocks that lists what a call refutes might be wrong; not if it cannot apply there."""
    cut = inputs[slot]
    if isinstance(cut, Shard) and call.shapes[slot][cut.dim] <= block:
        return False  # one rank has all elements
    return not call.rare or not any(isinstance(p, Shard) for p in inputs)


def _cuts(
    slot: int, entries: Sequence[tuple[CallEvidence, Inputs, Blocks]]
) -> Iterator[tuple[Cut, list[tuple[CallEvidence, Inputs, Blocks]]]]:
    """Yield what the sizes of blocks may be: an argument that differs as they do, else a number for each of them."""
    ones = [entry for entry in entries if entry[2].block == 1]
    if ones:
        yield _cut(slot, "1", lambda call: 1, ones), ones
    entries = [entry for entry in entries if entry[2].block > 1]
    sizes = sorted({one.block for _, _, one in entries})
    names = list(entries[0][0].values) if len(sizes) > 1 else []
    for name in names:
        if all(call.values.get(name) == one.block for call, _, one in entries):
            yield _cut(slot, name, lambda call, name=name: int(call.values[name]), entries), list(entries)  # type: ignore[misc]
            return
    for size in sizes:
        some = [entry for entry in entries if entry[2].block == size]
        yield _cut(slot, str(size), lambda call, size=size: size, some), some  # type: ignore[misc]


def _cut(
    slot: int,
    text: str,
    value: Callable[[CallEvidence], int],
    entries: Sequence[tuple[CallEvidence, Inputs, Blocks]],
) -> Cut:
    found = [one for _, _, one in entries]
    return Cut(slot, text, value, min(len(one.held) for one in found), min(len(one.failed) for one in found))


def _by_results(calls: Sequence[CallEvidence]) -> list[tuple[list[CallEvidence], tuple[Test, ...] | None]]:
    """Return the calls in groups with the same results, and the conditions that tell each group from the others.

    The conditions are None if there are none that do: a rule of such calls cannot say which calls it is for.
    """
    groups: dict[object, list[CallEvidence]] = {}
    for call in calls:
        groups.setdefault((len(call.results), call.absent), []).append(call)
    if len(groups) == 1:
        return [(list(calls), ())]
    known = tests(calls, None)
    found: list[tuple[list[CallEvidence], tuple[Test, ...] | None]] = []
    for group in groups.values():
        others = [Scope(call) for call in calls if call not in group]
        common = [test for test in known if all(test.value(Scope(call)) for call in group)]
        ways = itertools.chain.from_iterable(
            itertools.combinations(common, count) for count in range(1, _MOST_TESTS + 1)
        )
        telling = (way for way in ways if not any(all(test.value(one) for test in way) for one in others))
        found.append((group, next(telling, None)))
    return found


def _wanted(call: CallEvidence) -> list[Inputs]:
    """Return the placements of slots that hold, but for all replicated, which DTensor adds itself; none if rare."""
    if call.rare:
        return []
    return [inputs for inputs in call.holding if any(p != Replicate() for p in inputs)]


@dataclass(frozen=True)
class _Schema:
    """A rule without its conditions."""

    pivot: int | None
    inputs: tuple[Part, ...]
    outputs: tuple[Part, ...]

    def at(self, scope: Scope) -> tuple[Inputs, Inputs] | None:
        """Return the placements of slots and results at a point; None if one is no dim of its tensor."""
        inputs = [_placed(part, scope, ndim) for part, ndim in zip(self.inputs, scope.call.ndims, strict=True)]
        outputs = [_placed(part, scope, ndim) for part, ndim in zip(self.outputs, scope.call.results, strict=False)]
        placed = [*inputs, *outputs]
        if any(one is None for one in placed):
            return None
        return tuple(p for p in inputs if p is not None), tuple(p for p in outputs if p is not None)


def _placed(part: Part, scope: Scope, ndim: int) -> Placement | None:
    if isinstance(part, Placement):
        return part
    dim = part.value(scope)
    return Shard(dim) if dim is not None and 0 <= dim < ndim else None


def placements_of(rule: DerivedRule, call: CallEvidence) -> Iterator[tuple[Inputs, Inputs]]:
    """Yield what a rule lists for a call: the placements of its slots, and those of its results."""
    for _, inputs, outputs in points_of(rule, call):
        yield inputs, outputs


def points_of(rule: DerivedRule, call: CallEvidence) -> Iterator[tuple[Scope, Inputs, Inputs]]:
    """Yield the points of a call at which a rule applies, with the placements of the slots and of the results."""
    count, given = len(rule.outputs) - len(rule.gradients), len(call.results) - len(call.gradients)
    if rule.slots != call.slots or rule.absent != call.absent or (not given if rule.alike else count != given):
        return
    schema = _Schema(rule.pivot, rule.inputs, rule.outputs[:count])
    scopes = (
        [Scope(call)] if rule.pivot is None else [Scope(call, rule.pivot, d) for d in range(call.ndims[rule.pivot])]
    )
    for scope in scopes:
        if all(test.value(scope) for test in rule.tests) and (placed := schema.at(scope)) is not None:
            inputs, outputs = placed
            yield scope, inputs, outputs * given if rule.alike else outputs


class _Points:
    """The points of a group of calls for one pivot, as bits."""

    def __init__(self, calls: Sequence[CallEvidence], pivot: int | None) -> None:
        if pivot is None:
            self.scopes = [Scope(call) for call in calls]
        else:
            self.scopes = [Scope(call, pivot, d) for call in calls for d in range(call.ndims[pivot])]
        self.tests = [(test, self._bits(test)) for test in tests(calls, pivot)]
        self.all = (1 << len(self.scopes)) - 1

    def _bits(self, test: Test) -> int:
        return sum(1 << number for number, scope in enumerate(self.scopes) if test.value(scope))

    def split(self, schema: _Schema) -> tuple[int, int, dict[int, _What]]:
        """Return the points at which ``schema`` holds and fails, and what it explains at each point where it holds."""
        holds = fails = 0
        explains = {}
        for number, scope in enumerate(self.scopes):
            placed = schema.at(scope)
            if placed is None:
                fails |= 1 << number
                continue
            inputs, outputs = placed
            allowed = scope.call.rules.get(inputs)
            if allowed is None:
                continue  # not tried
            if allowed and all(one in some for one, some in zip(outputs, allowed, strict=True)):
                holds |= 1 << number
                explains[number] = (id(scope.call), inputs)
            elif not allowed or schema.outputs:
                fails |= 1 << number
        return holds, fails, explains

    def condition(self, holds: int, fails: int) -> tuple[tuple[Test, ...], int] | None:
        """Return the conditions under which a schema never fails and holds most often, and where they hold."""
        best: tuple[tuple[Test, ...], int] | None = None
        if not fails & self.all:
            return (), self.all
        useful = [(test, bits) for test, bits in self.tests if bits & holds and fails & ~bits]
        for count in range(1, _MOST_TESTS + 1):
            for chosen in itertools.combinations(useful, count):
                bits = self.all
                for _, one in chosen:
                    bits &= one
                if bits & fails or not bits & holds:
                    continue
                if best is None or (bits & holds).bit_count() > (best[1] & holds).bit_count():
                    best = tuple(test for test, _ in chosen), bits
            if best is not None and not holds & ~best[1]:
                break
        return best


class _Dims:
    """What a shard's dim may stand for, in a group of calls: the same objects at each call, for schemas to be equal."""

    def __init__(self, calls: Sequence[CallEvidence]) -> None:
        self._calls = calls
        self._known: dict[tuple[int, int | None], list[Dim]] = {}

    def of(self, pivot: int, slot: int | None) -> list[Dim]:
        """Return the dims of a slot, or of a result if ``slot`` is None."""
        if (pivot, slot) not in self._known:
            found = dims_of_results(self._calls, pivot) if slot is None else dims_of_inputs(self._calls, pivot, slot)
            self._known[pivot, slot] = list(found)
        return self._known[pivot, slot]


def _of_group(
    calls: Sequence[CallEvidence], wanted: Mapping[int, Sequence[Inputs]]
) -> tuple[list[DerivedRule], list[tuple[CallEvidence, Inputs]]]:
    """Return the rules that explain what is ``wanted`` of each call, by its ``id``, and what none explains."""
    dims = _Dims(calls)
    left = {(id(call), inputs): (call, inputs) for call in calls for inputs in wanted[id(call)]}
    with_rules = {call for call, _ in left}
    schemas = list(dict.fromkeys(schema for call in calls for schema in _schemas(call, dims, wanted[id(call)])))
    points = {pivot: _Points(calls, pivot) for pivot in {schema.pivot for schema in schemas}}
    split = {schema: points[schema.pivot].split(schema) for schema in schemas}
    rules: list[DerivedRule] = []
    covers: list[set[_What]] = []
    # other dims of a call are another call, but not for its parts: those of a sample may all have a maximum by accident
    sources: dict[int, object] = {id(call): call.source for call in calls}
    ndims = {id(call): call.ndims for call in calls}
    kinds: dict[int, object] = {id(call): (call.source, call.ndims, named_dims(call)) for call in calls}
    while left:
        best: tuple[tuple[int, int, int], DerivedRule, set[_What], set[_What]] | None = None
        for rank, schema in enumerate(schemas):
            _, fails, explains = split[schema]
            here = {number: what for number, what in explains.items() if what in left}
            if not here or (best is not None and len(here) < best[0][0]):
                continue
            found = points[schema.pivot].condition(sum(1 << number for number in here), fails)
            if found is None:
                continue
            new = {what for number, what in here.items() if found[1] >> number & 1}
            shown = [what for number, what in explains.items() if found[1] >> number & 1]
            seen = len({call for call, _ in shown})
            apart = sources if schema.pivot is None else kinds
            may_show = [call for call in with_rules if schema.pivot is None or ndims[call][schema.pivot]]
            if len({apart[call] for call, _ in shown}) < min(2, len({apart[call] for call in may_show})):
                continue  # what one call shows may be an accident
            score = (len(new), -len(found[0]), -rank)
            if best is None or score > best[0]:
                rule = DerivedRule(
                    calls[0].slots, schema.pivot, schema.inputs, schema.outputs, found[0], seen, len(new),
                    calls[0].gradients, calls[0].absent, alike=calls[0].alike,
                )  # fmt: skip
                best = score, rule, new, set(shown)
        if best is None:
            break
        rules.append(best[1])
        covers.append(best[3])
        for what in best[2]:
            del left[what]
    return _without_needless(rules, covers), list(left.values())


def _without_needless(rules: list[DerivedRule], covers: Sequence[set[_What]]) -> list[DerivedRule]:
    """Return the rules without those that explain nothing which the others do not."""
    kept = list(range(len(rules)))
    for number in range(len(rules)):
        others = set[_What]().union(*(covers[other] for other in kept if other != number))
        if covers[number] <= others:
            kept.remove(number)
    return [rules[number] for number in kept]


def _schemas(call: CallEvidence, dims: _Dims, wanted: Iterable[Inputs]) -> Iterator[_Schema]:
    """Yield what the rules of one call may be an example of."""
    for inputs in wanted:
        shards = [number for number, placement in enumerate(inputs) if isinstance(placement, Shard)]
        pivot = shards[0] if shards else None
        scope = Scope(call) if pivot is None else Scope(call, pivot, inputs[pivot].dim)  # type: ignore[attr-defined]
        slots = [list(_parts_of_input(dims, pivot, number, p, scope)) for number, p in enumerate(inputs)]
        results = [list(_parts_of_result(dims, pivot, allowed, scope)) for allowed in call.rules[inputs]]
        for parts in itertools.product(*slots):
            for outputs in itertools.product(*results):
                yield _Schema(pivot, parts, outputs)


def _parts_of_input(dims: _Dims, pivot: int | None, slot: int, placement: Placement, scope: Scope) -> Iterator[Part]:
    if not isinstance(placement, Shard):
        yield placement
        return
    assert pivot is not None
    known = dims.of(pivot, slot)
    yield from (dim for dim in (known[:1] if slot == pivot else known) if dim.value(scope) == placement.dim)


def _parts_of_result(dims: _Dims, pivot: int | None, allowed: frozenset[Placement], scope: Scope) -> Iterator[Part]:
    useful = sorted(allowed, key=lambda p: (not p.is_replicate(), not isinstance(p, Shard), str(p)))
    for placement in useful[:_MOST_RESULTS]:
        if not isinstance(placement, Shard):
            yield placement
        elif pivot is not None:
            yield from (dim for dim in dims.of(pivot, None) if dim.value(scope) == placement.dim)
