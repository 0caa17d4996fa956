"""The source "opinfo": targets by the names of OpInfos or of aten overloads, and their samples."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice, zip_longest

import torch

import strategies.opinfo.second_calls  # noqa: F401 - declares the second calls of an op
from strategies.opinfo.calls.by_op import Row, Template, registered_of, wanted
from strategies.opinfo.calls.call import Call, attempt, quiet
from strategies.opinfo.calls.capture import MOST_CAPTURED, captured, entries_of, hidden, sharded
from strategies.opinfo.calls.op_names import home_rows, owners, row_names
from strategies.opinfo.calls.providers import PROVIDERS, is_known
from strategies.opinfo.handmade import NO_CALLS, handmade_of_row, handmade_overloads, handmade_samples
from strategies.opinfo.samples.argument_spellings import Variation, spellings
from strategies.opinfo.samples.asking.unreached import reaching_samples
from strategies.opinfo.samples.derived_overloads import additions, converted, family, is_sibling
from strategies.opinfo.samples.input_classes import ASKING, INPUT_CLASSES, InputClass
from strategies.opinfo.samples.sample import OpInfoSample, changes_of
from verifier.core.ops import resolve
from verifier.core.wording import did_you_mean
from verifier.planning.own_samples import overload_named
from verifier.processes.answers import ANSWERS
from verifier.rules.samples import Sample, SampleOptions, Target, names_overload
from verifier.torch_internals.names import OpOverload
from verifier.torch_internals.ops import cache_by_rules, registered_overloads
from verifier.torch_internals.registries import is_registered_by_user

__all__ = ["SCANNED", "SOURCE", "OpInfoSource"]

SCANNED = 16
"""So many samples of each OpInfo, evenly spaced, are enough to find the overloads that it dispatches to."""
_PROVIDERS = 3  # OpInfos from which calls of a helper op are taken, if the helper has no OpInfo
_SPELLINGS_OF_ONE = 6
_TRIES_OF_ONE_CLASS = 40
"""So many changes are tried to make calls of one class of input."""


@dataclass(frozen=True)
class OpInfoSource:
    """Draws the aten calls that OpInfo samples dispatch; see :class:`verifier.rules.samples.SampleSource`.

    Parameters
    ----------
    most
        Of so many samples of each OpInfo calls are captured.
    """

    name: str = "opinfo"
    most: int = MOST_CAPTURED

    @staticmethod
    def load() -> None:
        """Load the OpInfos, which takes a second; the modules that capture their calls are loaded with this one."""
        row_names()

    def prepare(self) -> None:
        """Load the OpInfos and the modules that capture their calls."""
        next(self.samples(Target("neg", self.name), SampleOptions()), None)

    def select(self, patterns: Sequence[str]) -> tuple[Target, ...]:
        """Return the OpInfos that match the globs, and overloads for globs that start with ``aten.``.

        A name without a glob may also name an overload for which DTensor has no rule.

        Raises
        ------
        ValueError
            If a pattern matches nothing; the message has the nearest valid name.
        """
        if not patterns:
            return self._all()
        targets: set[Target] = set()
        for pattern in patterns:
            if _is_overload(pattern):
                names = [name for name in _overload_names() if names_overload(pattern, name)] or _without_rule(pattern)
            else:
                names = fnmatch.filter(row_names(), pattern)
            if not names:
                hint = did_you_mean(pattern, [*row_names(), *_overload_names()])
                raise ValueError(f"no OpInfo and no aten overload with a rule matches {pattern!r}{hint}")
            targets |= {self._target(name) for name in names}
        return tuple(sorted(targets, key=_order))

    def samples(self, target: Target, options: SampleOptions) -> Iterator[Sample]:
        """Yield the samples of ``target``, in the same order at each call."""
        if target.overload is None:
            registered = registered_of().get(target.name, ())
            yield from _row_samples(Row(target.name, options, most=self.most), registered, options)
            for each in registered:
                yield from handmade_samples(str(each), options)
            yield from handmade_of_row(target.name, options)
            return
        op = _overload(target.overload)
        if op is None:
            return
        yield from handmade_samples(target.overload, options)
        found = target.overload in NO_CALLS or target.overload in handmade_overloads()
        for row in home_rows(op):
            for sample in _row_samples(Row(row, options, op, self.most), (op,), options, op):
                found = True
                yield sample
        if not found:
            for row in (_providers(op) or _dispatching(op))[:_PROVIDERS]:
                yield from _row_samples(Row(row, options, op, self.most), (op,), options, op)

    def _target(self, name: str) -> Target:
        return Target(name, self.name, name if _is_overload(name) else None)

    def _all(self) -> tuple[Target, ...]:
        """Return all rows that dispatch to an overload with a rule, and the overloads that belong to no row."""
        reached = _reached()
        rows = {row for row, ops in reached.items() if ops}
        families = {row: {family(op) for op in ops} for row, ops in reached.items()}
        everywhere = set(chain.from_iterable(families.values()))
        # a row without overloads of its own tests helpers; see Row
        helped: set[OpOverload] = set()
        for ops in reached.values():
            helpers = [op for op in ops if not owners(op)]
            if helpers and not any(set(home_rows(op)) & rows for op in ops if owners(op)):
                helped.update(helpers)
        left = [
            str(op)
            for op in registered_overloads()
            if family(op) in everywhere
            and op not in helped
            and not any(family(op) in families.get(row, ()) for row in home_rows(op))
        ]
        tested = {str(op) for row in rows for op in registered_of().get(row, ())}
        with_rule = {str(op) for op in registered_overloads()}
        left += [name for name in handmade_overloads() if name in with_rule and name not in tested and name not in left]
        return tuple(sorted((self._target(name) for name in (*rows, *left)), key=_order))


SOURCE = OpInfoSource()


def _order(target: Target) -> tuple[str, str]:
    return target.name, target.overload or ""


@cache_by_rules
def _overload_names() -> tuple[str, ...]:
    return tuple(sorted(str(op) for op in registered_overloads() if _is_overload(str(op))))


def _is_overload(text: str) -> bool:
    return text.startswith(("aten.", "prims."))


def _without_rule(name: str) -> list[str]:
    """Return the overload that ``name`` names, such as ``aten.trace``, with rules or without; nothing for a glob."""
    try:
        return [str(overload_named(name))]
    except ValueError:
        return []


def _overload(name: str) -> OpOverload | None:
    known = next((op for op in registered_overloads() if str(op) == name), None)
    return known or next((overload_named(one) for one in _without_rule(name)), None)


# ---------------------------------------------------------------------------------------------------------------- scan
@cache_by_rules
def _reached() -> dict[str, frozenset[OpOverload]]:
    """Return the overloads with a rule that each OpInfo's first samples dispatch to; the first call takes seconds."""
    return {row: _reached_by(row) for row in row_names()}


def _reached_by(row: str) -> frozenset[OpOverload]:
    composite = any(hidden(op) for op in registered_of().get(row, ()))
    calls = (
        captured(entry, torch.float64, size=0, seed=0, wanted=wanted, composite=composite, most=SCANNED)
        for _, entry in entries_of(row)
    )
    return frozenset(call.op for made in calls for each in made.values() for call in each)


@cache_by_rules
def _providers(op: OpOverload) -> tuple[str, ...]:
    """Return the OpInfos that dispatch to ``op``, or else to a sibling of ``op``."""
    if is_known():
        others = (rows for other, rows in PROVIDERS.items() if is_sibling(op, resolve(f"torch.ops.{other}")))  # type: ignore[arg-type]
        return PROVIDERS.get(str(op)) or next(others, ())
    rows = [row for row, ops in _reached().items() if op in ops]
    return tuple(rows or (row for row, ops in _reached().items() if any(is_sibling(op, other) for other in ops)))


@cache
def _dispatched() -> dict[str, frozenset[OpOverload]]:
    """Return all overloads that each OpInfo's first samples dispatch to; the first call takes some 10 seconds."""
    return {
        row: frozenset(
            call.op
            for _, entry in entries_of(row)
            for made in captured(entry, torch.float64, size=0, seed=0, wanted=lambda op: True, most=SCANNED).values()
            for call in made
        )
        for row in row_names()
    }


def _dispatching(op: OpOverload) -> tuple[str, ...]:
    """Return the OpInfos that dispatch to ``op``, if DTensor itself has no rule for it."""
    if op in registered_overloads() and not is_registered_by_user(op):
        return ()
    rows = ANSWERS.of(
        f"OpInfos that dispatch to {op}", lambda: frozenset(row for row, ops in _dispatched().items() if op in ops)
    )
    return tuple(row for row in row_names() if row in rows)


# ------------------------------------------------------------------------------------------------------------- samples
def _row_samples(
    row: Row, registered: Sequence[OpOverload], options: SampleOptions, only: OpOverload | None = None
) -> Iterator[Sample]:
    """Yield the samples of a row by overload: captured samples, their other spellings, then samples from siblings."""
    named: set[OpOverload] = set()
    for op, templates in row.templates.items():
        if sharded(op) if only is None else op == only:
            yield from _with_spellings([OpInfoSample(row, template) for template in templates], row, options, named)
    for op in registered:
        if op not in row.templates and (only is None or op == only):
            yield from _with_spellings(_derived(row, op, options), row, options, named)


def _with_spellings(
    samples: list[OpInfoSample], row: Row, options: SampleOptions, named: set[OpOverload]
) -> Iterator[Sample]:
    seen = {sample.signature for sample in samples}
    testable = []
    for sample in samples:
        if not sample.not_testable:
            testable.append(sample)
        elif sample.first.op not in named:
            # report the overload once
            named.add(sample.first.op)
            yield sample
    # a mask that is True everywhere, or a threshold above all values, makes one call ignore values that others read
    unread = [names for sample in testable if (names := sample.unread) is not None]
    common = frozenset.intersection(*unread) if unread else frozenset()
    for sample in testable:
        sample.poison_only(common)
    yield from testable
    made = [*testable]
    left = options.max_samples if options.max_samples is not None else len(testable) * _SPELLINGS_OF_ONE
    with quiet():
        # from each sample in turn, with another first variation, so that a limit keeps variations of every kind
        offered = zip_longest(*(_rotated(sample, place) for place, sample in enumerate(testable)))
        for sample, variation in (pair for round_ in offered for pair in round_ if pair is not None):
            if left == 0:
                break
            other = sample.varied(variation)
            if other is not None and other.signature not in seen:
                seen.add(other.signature)
                other.poison_only(common)
                left -= 1
                made.append(other)
                yield other
        own = row.overload is not None or any(row.name in home_rows(sample.first.op) for sample in testable)
        if options.rare:
            for other in _of_input_classes(testable, seen, common, options, own):
                made.append(other)
                yield other
            for other in reaching_samples(made, _changes_of_classes, _is_taken) if own else ():
                other.poison_only(common)
                yield other


def _changes_of_classes(call: Call) -> Iterator[Variation]:
    for one in INPUT_CLASSES:
        if one.changes not in ASKING:
            yield from one.changes(call)


def _is_taken(call: Call) -> bool:
    return attempt(call) is not None


def _of_input_classes(
    samples: Sequence[OpInfoSample], seen: set[str], common: frozenset[str], options: SampleOptions, own: bool
) -> Iterator[OpInfoSample]:
    """Yield variations of ``samples`` of each class of input, from the samples in turn and up to a limit.

    Of calls that do not belong to their row, one of each class is enough: other rows have the same.
    """
    # calls of several dims tell more, and two of them are enough to be in turn
    samples = sorted(samples, key=lambda sample: min(2, max((t.ndim for t in sample.first.tensors), default=0)))[::-1]
    for one in INPUT_CLASSES:
        left = one.most if own else 1
        left *= 1 if options.max_samples is not None else 4
        tries = _TRIES_OF_ONE_CLASS
        labels: set[str] = set()
        with quiet():
            # from each sample in turn, with another first change, so that a limit keeps changes of every kind
            asked = one.of([sample.first for sample in samples])
            offered = zip_longest(*(_turned(samples[n], place, one) for place, n in enumerate(asked)))
            for sample, change in (pair for round_ in offered for pair in round_ if pair is not None):
                if not left or not tries:
                    break
                if one.once and change.label in labels:
                    continue
                tries -= 1
                other = sample.varied(change, rare=True)
                if other is not None and other.signature not in seen and attempt(other.first) is not None:
                    seen.add(other.signature)
                    labels.add(change.label)
                    other.called_again = one.again
                    other.poison_only(common)
                    left -= 1
                    yield other


def _turned(sample: OpInfoSample, place: int, one: InputClass) -> list[tuple[OpInfoSample, Variation]]:
    changes = changes_of(sample, one.changes) if one.changes in ASKING else list(one.changes(sample.first))
    start = place % len(changes) if changes and not one.once else 0
    return [(sample, change) for change in (*changes[start:], *changes[:start])]


def _rotated(sample: OpInfoSample, place: int) -> list[tuple[OpInfoSample, Variation]]:
    variations = list(islice(spellings(sample.first), _SPELLINGS_OF_ONE))
    start = place % len(variations) if variations else 0
    return [(sample, variation) for variation in (*variations[start:], *variations[:start])]


def _derived(row: Row, op: OpOverload, options: SampleOptions) -> list[OpInfoSample]:
    """Return samples of an overload that no OpInfo dispatches to, made from samples of its siblings."""
    made: dict[str, OpInfoSample] = {}
    limit = options.max_samples
    sources = [other for other in row.templates if is_sibling(op, other)]
    templates: list[Template] = [
        t for other in sorted(sources, key=lambda o: _distance(op, o)) for t in row.templates[other]
    ]
    with quiet():
        for template in templates:
            if limit is not None and len(made) >= limit:
                break
            for more in additions(op):
                change = Variation(f"from {template.call.op}", partial(converted, op=op, more=more))
                first = change.apply(template.call)
                if first is not None and first.signature() not in made:
                    made[first.signature()] = OpInfoSample(row, template, (change,))
    return list(made.values())


def _distance(op: OpOverload, other: OpOverload) -> tuple[float, str]:
    """Return a distance between the names of two siblings: ``add_.Tensor`` is close to ``add.Tensor``."""
    return -difflib.SequenceMatcher(None, str(op), str(other)).ratio(), str(other)
