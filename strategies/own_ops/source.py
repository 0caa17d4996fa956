"""The source "own": calls of ops of the user's own, for the rule check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import torch

from strategies.opinfo.calls.by_op import Template, spread
from strategies.opinfo.calls.call import Call, attempt, parameters, quiet
from strategies.opinfo.calls.capture import Origin
from strategies.opinfo.calls.running import (
    accepts,
    copied,
    has_other_dtypes,
    has_other_shapes,
    resizes,
    undeclared_write,
)
from strategies.opinfo.samples.argument_spellings import Variation, spellings, with_value
from strategies.opinfo.samples.asking.arguments import without_tensors
from strategies.opinfo.samples.asking.unreached import reaching_samples
from strategies.opinfo.samples.extents import Extents, rare_extents
from strategies.opinfo.samples.sample import OpInfoSample, changes_of
from strategies.own_ops.arguments import dims_of_one, other_arguments, other_dims, other_values
from strategies.own_ops.beyond import beyond_numbers, misdescribed_extents
from strategies.own_ops.from_gradients import OfGradient, calls_in_gradients
from strategies.own_ops.from_schema import calls_from_schema
from strategies.own_ops.names import own_ops, own_ops_named
from strategies.own_ops.optional_tensors import optional_tensors
from verifier.core.errors import SamplesError
from verifier.core.wording import did_you_mean
from verifier.planning.own_samples import examples_of, is_sampled, overload_named, sampled_ops, say_made_from_schema
from verifier.rules.samples import Sample, SampleOptions, Target
from verifier.torch_internals.names import OpOverload

__all__ = ["SOURCE", "OwnSource", "own_samples"]

_CLASSES = (
    (spellings, 4, None, False),
    (rare_extents, 8, None, True),
    (other_arguments, 12, 3, True),
    (other_dims, 6, 3, True),
    (beyond_numbers, 6, 2, True),
)
"""Changes of calls, how many are made, of how many samples, and whether they are rare."""
_COMPLETED, _MOST_COMPLETED = 3, 6
"""So many samples get the optional tensors of other examples; so many calls are made of that."""
FROM_SCHEMA = "from its schema"
"""The label of calls that were made of the op's schema alone."""


@dataclass(frozen=True, eq=False)
class _OwnCalls:
    """The calls of an op, at several sizes; see :class:`strategies.opinfo.samples.sample.CallsAtSizes`."""

    op: OpOverload
    options: SampleOptions
    generator: torch.Generator = field(default_factory=torch.Generator)
    _extents: dict[Template, Extents] = field(default_factory=dict)

    def at_size(self, template: Template, size: int, seed: int = 0) -> Call | None:
        """Return the call at size number ``size``, with the values of its example for ``seed``."""
        with quiet():
            if size and template not in self._extents:
                self._extents[template] = Extents.of(template.call)
            call = template.call if not size else self._extents[template].at_size(size)
            if not seed or call is None:
                return call
            others = _given(self.op, self.options.dtype, seed) if is_sampled(str(self.op)) else []
            number = template.origin.sample
            other = others[number] if number < len(others) else None
            return other if other is not None and other.signature() == call.signature() else call

    def regenerated(self, template: Template, size: int) -> Callable[[int], Call | None]:
        """Return a function from a draw's number to the call with other values of its example."""
        return lambda number: self.at_size(template, size, 1 + number % 4)


@dataclass(frozen=True)
class OwnSource:
    """Draws calls of the user's own ops; see :class:`verifier.rules.samples.SampleSource`."""

    name: str = "own"

    def prepare(self) -> None:
        """Do nothing: there is nothing to load."""

    def select(self, patterns: Sequence[str]) -> tuple[Target, ...]:
        """Return the user's own ops that the globs name; without globs those with samples or rules.

        Raises
        ------
        ValueError
            If a pattern names none, or an op of which no call could be made.
        """
        names: set[str] = set() if patterns else set(own_ops())
        for pattern in patterns:
            found = own_ops_named(pattern)
            if not found:
                raise ValueError(f"no op of your own matches {pattern!r}{did_you_mean(pattern, own_ops())}")
            names.update(found)
        with_calls = [name for name in sorted(names) if _has_calls(name)]
        if patterns and not with_calls:
            raise ValueError(f"no call of {', '.join(sorted(names))} could be made")
        return tuple(Target(name, self.name, name) for name in with_calls)

    def samples(self, target: Target, options: SampleOptions) -> Iterator[Sample]:
        """Yield the samples of ``target``, in the same order at each call."""
        yield from own_samples(target.name, options)


SOURCE = OwnSource()


def own_samples(name: str, options: SampleOptions) -> Iterator[OpInfoSample]:
    """Yield the samples of an overload: its calls, and changes of them; other extents and arguments are rare."""
    op = overload_named(name)
    calls = _OwnCalls(op, options)
    made, labels = _made(op, options.dtype)
    numbered = {call.signature(): number for number, call in reversed(list(enumerate(made)))}
    templates = [
        Template(Origin(0, number, name, 0), made[number], f"{labels[number]}, call {number}")
        for number in sorted(numbered.values())
    ]
    samples = [OpInfoSample(calls, template) for template in spread(templates, options.max_samples)]
    if samples and (written := undeclared_write(samples[0].first)):
        samples[0].refuse(f"writes to its argument {written}, which its schema does not declare")
        yield samples[0]
        return
    if samples and samples[0].not_testable:
        yield samples[0]
        return
    yield from samples
    seen = set(numbered)
    drawn = [*samples]
    with quiet():
        for changes, most, of, rare in _CLASSES:
            left = most if options.rare or not rare else 0
            for sample in samples[:of]:
                asking = changes is other_arguments
                offered = changes_of(sample, changes) if asking and left else changes(sample.first)
                for change in offered if left else ():
                    other = sample.varied(change, rare)
                    if left and other is not None and other.signature not in seen and accepts(other.first):
                        seen.add(other.signature)
                        left -= 1
                        drawn.append(other)
                        yield other
        if options.rare:
            optional = _with_optional_tensors(samples[:_COMPLETED], made, seen)
            for other in (*optional, *_with_made_tensors(samples[:1], made, seen)):
                drawn.append(other)
                yield other
            yield from _misdescribed(samples[:_COMPLETED])
            yield from reaching_samples(drawn, _changes_of_one, accepts)


def _with_optional_tensors(
    samples: Sequence[OpInfoSample], examples: Sequence[Call], seen: set[str]
) -> Iterator[OpInfoSample]:
    """Yield samples with the optional tensors of all examples, as far as the op takes them, and then without some."""
    left = _MOST_COMPLETED
    for sample in samples:
        complete = sample.varied(Variation("with tensors of others", partial(_completed, tuple(examples))), rare=True)
        if complete is None or not accepts(complete.first):
            continue
        fewer = (complete.varied(change, rare=True) for change in without_tensors(complete.first))
        for other in (complete, *fewer):
            if left and other is not None and other.signature not in seen and accepts(other.first):
                seen.add(other.signature)
                left -= 1
                yield other


def _with_made_tensors(
    samples: Sequence[OpInfoSample], examples: Sequence[Call], seen: set[str]
) -> Iterator[OpInfoSample]:
    """Yield samples with a tensor for an optional argument for which no example has one."""
    for sample in samples:
        for change in optional_tensors(sample.first, examples):
            other = sample.varied(change, rare=True)
            if other is not None and other.signature not in seen and accepts(other.first):
                seen.add(other.signature)
                yield other


def _changes_of_one(call: Call) -> Iterator[Variation]:
    """Yield changes of a call for which its op's rules are not asked."""
    for changes in (other_values, spellings, rare_extents, other_dims, dims_of_one, beyond_numbers):
        yield from changes(call)


def _misdescribed(samples: Sequence[OpInfoSample]) -> Iterator[OpInfoSample]:
    """Yield the first sample with an extent at which the fake kernel tells another shape than the op's."""
    for sample in samples:
        for change in misdescribed_extents(sample.first) if accepts(sample.first) else ():
            if (other := sample.varied(change, rare=True)) is not None:
                yield other
                return


def _completed(examples: Sequence[Call], call: Call) -> Call | None:
    """Return the call with a tensor of an example for each argument that is None and may be a tensor; None if none."""
    changed = call
    for parameter in parameters(call.op):
        if parameter.optional and changed.values.get(parameter.name) is None:
            given = (one.values.get(parameter.name) for one in examples)
            tensors = (one for one in given if isinstance(one, torch.Tensor))
            ways = (with_value(changed, parameter.name, one) for one in tensors)
            changed = next((one for one in ways if one is not None and accepts(one)), changed)
    return changed if changed is not call else None


def _made(op: OpOverload, dtype: torch.dtype) -> tuple[Sequence[Call], Sequence[str]]:
    """Return the calls of an op, and where each comes from: examples, gradients of other ops, or the op's schema."""
    if is_sampled(str(op)):
        declared = _given(op, dtype)
        return declared, ["its samples"] * len(declared)
    if of_others := _in_gradients(op, dtype, sampled_ops()):
        return [one.call for one in of_others], [f"in the gradient of {one.other}" for one in of_others]
    from_schema = calls_from_schema(op, dtype)
    return from_schema, [FROM_SCHEMA] * len(from_schema)


@cache
def _in_gradients(op: OpOverload, dtype: torch.dtype, sampled: tuple[str, ...]) -> tuple[OfGradient, ...]:
    """Return the calls of an op that run in the gradients of the ops with examples, which are ``sampled``."""
    others = (overload_named(name) for name in sampled if name != str(op))
    return tuple(calls_in_gradients(op, (call for other in others for call in _given(other, dtype))))


def _given(op: OpOverload, dtype: torch.dtype, seed: int = 0) -> list[Call]:
    """Return the declared examples as calls, with floating tensors of ``dtype`` if the op takes them.

    Raises
    ------
    SamplesError
        If the op does not take an example; the message has what it raised.
    """
    calls = []
    for number, example in enumerate(examples_of(str(op), seed)):
        call = Call(op, example.args, example.kwargs)
        leaves = [_detached(leaf) for leaf in call.leaves]
        call = call.with_leaves(leaves)
        usual = (torch.float32, torch.float64)
        cast = [leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.dtype in usual else leaf for leaf in leaves]
        with quiet():
            other = call.with_leaves(cast)
            if accepts(other):
                calls.append(other)
            elif accepts(call):
                calls.append(call)
            elif has_other_shapes(other):  # which is to be shown
                calls.append(other)
            elif has_other_shapes(call) or has_other_dtypes(call):
                calls.append(call)
            elif not seed:
                raise SamplesError(f"samples of {op}: the op does not take example {number}: {_refusal(call)}")
    return calls


def _detached(leaf: object) -> object:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _refusal(call: Call) -> str:
    fresh = copied(call)
    try:
        fresh.op(*fresh.args, **fresh.kwargs)
    except Exception as error:  # noqa: BLE001 - the user's kernel may raise anything
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    results = attempt(call)
    if results is not None and resizes(call, results):
        return "it would resize a tensor that is given for a result"
    return "its results are not those of its fake kernel"


@cache
def _has_calls(name: str) -> bool:
    """Return whether calls of an overload can be made; say once that they were made from the schema."""
    if is_sampled(name):
        _given(overload_named(name), torch.float64)
        return True
    if _in_gradients(overload_named(name), torch.float64, sampled_ops()):
        return True
    if not calls_from_schema(overload_named(name), torch.float64):
        return False
    say_made_from_schema(name)
    return True
