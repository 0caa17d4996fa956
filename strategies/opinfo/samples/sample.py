"""A sample: one call of an overload, at several sizes and with new values at each draw."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from strategies.opinfo.calls.by_op import Template
from strategies.opinfo.calls.call import Call, attempt, parameters, quiet
from strategies.opinfo.calls.op_facts import KEEP_VALUES, TRUSTING, WITH_FRACTIONS, WITH_ZEROS
from strategies.opinfo.calls.op_names import base_of
from strategies.opinfo.samples.argument_spellings import Variation
from strategies.opinfo.samples.fill_plans import (
    FillPlan,
    Regenerate,
    fills_of,
    make_plan,
    refilled,
    settled,
    thresholds_of,
    why_not_testable,
    widened,
)
from strategies.opinfo.samples.fills import SPECIAL_DRAWS, Chosen, Fill, Palette, with_specials
from verifier.core.case import OpCase
from verifier.processes.answers import ANSWERS
from verifier.records.memory import with_strides
from verifier.rules.samples import SampleOptions, Values

__all__ = ["CallsAtSizes", "OpInfoSample", "changes_of", "read_by_strides"]

_DIMS = ("dim", "dims", "dim0", "dim1", "axis")


@dataclass(frozen=True, eq=False)
class _Prepared:
    """The call at one size, ready to be filled."""

    call: Call
    plan: FillPlan
    fills: dict[int, Fill]
    tags: frozenset[str]


class CallsAtSizes(Protocol):
    """Where the calls of a sample come from: the row of an OpInfo, or the user's examples."""

    @property
    def options(self) -> SampleOptions: ...

    @property
    def generator(self) -> torch.Generator: ...

    def at_size(self, template: Template, size: int, seed: int = 0) -> Call | None:
        """Return the call at size number ``size`` with the values for ``seed``; None if there is none."""

    def regenerated(self, template: Template, size: int) -> Callable[[int], Call | None]:
        """Return a function from a draw's number to the call with its source's values for that draw."""


class OpInfoSample:
    """A captured call, perhaps changed by ``changes``; see :class:`verifier.rules.samples.Sample`."""

    def __init__(
        self, row: CallsAtSizes, template: Template, changes: tuple[Variation, ...] = (), rare: bool = False
    ) -> None:
        self._row, self._template, self._changes, self.rare = row, template, changes, rare
        self.called_again = False
        """Whether second calls follow though the sample is rare."""
        self._prepared: dict[int, _Prepared | None] = {}
        self._wide: dict[int, _Prepared | None] = {}
        self._takes_specials: bool | None = None
        self._strided = any(change.strided for change in changes)
        self._factor = math.prod(change.factor for change in changes)
        first = self._changed(template.call)
        assert first is not None
        self.first = first
        self._not_testable: str | None = None
        self.op = str(first.op)
        self.origin = ", ".join([template.label, *(change.label for change in changes)])
        text = f"{self.op}|{self.origin}|{template.origin}"
        self._seed = zlib.crc32(text.encode()) ^ (row.options.seed * 0x9E3779B1)

    @property
    def signature(self) -> str:
        """A text that is equal for two samples iff they differ at most in values; drawn strides count."""
        strides = [tensor.stride() for tensor in self.first.tensors] if self._strided else ""
        return f"{self.first.signature()}{strides}{'' if self._factor == 1 else self._factor}"

    @property
    def not_testable(self) -> str:
        """Why the rules cannot be checked on this sample; empty if they can."""
        if self._not_testable is None:
            with quiet():
                self._not_testable = why_not_testable(self.first)
        return self._not_testable

    def refuse(self, why: str) -> None:
        """Give a reason why the rules cannot be checked on this sample."""
        self._not_testable = why

    @property
    def unread(self) -> frozenset[str] | None:
        """The parameters whose values this call does not read at its first size; None if it cannot be drawn."""
        prepared = self._at(0)
        if prepared is None:
            return None
        names = prepared.call.parameter_of
        read = {names[place] for place in prepared.fills if place not in prepared.plan.poison}
        return frozenset(names[place] for place in prepared.plan.poison) - read

    def poison_only(self, names: Collection[str]) -> None:
        """Treat all parameters but ``names`` as read, because other calls of the overload read them."""
        prepared = self._at(0)
        if prepared is not None:
            kept = frozenset(place for place in prepared.plan.poison if prepared.call.parameter_of[place] in names)
            if kept != prepared.plan.poison:
                plan = replace(prepared.plan, poison=kept)
                self._prepared = {0: self._filled(prepared.call, plan, 0)}

    @property
    def claims_only(self) -> str:
        """Why only rules that DTensor claims can be tried; empty if all rules can."""
        if not base_of(self.op).startswith(TRUSTING):
            return ""
        return "its kernel trusts sizes: only what DTensor claims is tried"

    def draw(self, size: int, draw: int, values: Values = Values.USUAL) -> OpCase | None:
        """Return the call at size number ``size`` with the values of draw number ``draw``, or None."""
        special = values is Values.SPECIAL
        prepared = self._wide_at(size) if values is Values.WIDE else self._at(size)
        if prepared is None or (special and not self._can_be_special()):
            return None
        leaves = self._leaves(prepared, size, draw, special)
        # a threshold such as 0.1 among the values has parts that round
        rounds = special and not all((8 * threshold).is_integer() for threshold in thresholds_of(prepared.call))
        call = read_by_strides(prepared.call.with_leaves(leaves))
        return OpCase(
            op=self.op,
            call=f"torch.ops.{self.op}",
            args=call.args,
            kwargs=call.kwargs,
            family="opinfo",
            exact=prepared.plan.exact and not rounds,
            tags=prepared.tags | {"special"} if special else prepared.tags,
        )

    def _leaves(self, prepared: _Prepared, size: int, draw: int, special: bool) -> list[object]:
        # large odd factors, so that no two (size, draw) of a sample share a seed
        seed = self._seed + size * 0x85EBCA6B + draw * 0xC2B2AE35 + special
        generator = self._row.generator.manual_seed(seed & 0x7FFF_FFFF_FFFF_FFFF)
        leaves = refilled(prepared.call, prepared.fills, generator, draw)
        if base_of(self.op).rstrip("_") in WITH_FRACTIONS:
            leaves = [_times(leaf, 0.25) if place in prepared.fills else leaf for place, leaf in enumerate(leaves)]
        if base_of(self.op).rstrip("_") in WITH_ZEROS:
            leaves = [_with_zeros(leaf, generator) for leaf in leaves]
        if self.op.startswith("aten.round") and (decimals := prepared.call.values.get("decimals")):
            leaves = [_with_digits(leaf, decimals) for leaf in leaves]
        if self._factor != 1:
            leaves = [
                _times(leaf, self._factor) if place in prepared.fills else leaf for place, leaf in enumerate(leaves)
            ]
        if special:
            for place, fill in prepared.fills.items():
                if isinstance(fill, Palette | Chosen):
                    leaf = leaves[place]
                    assert isinstance(leaf, torch.Tensor)
                    if leaf.is_floating_point():
                        leaves[place] = with_specials(leaf, thresholds_of(prepared.call), generator, draw)
        if self._strided:
            leaves = [_laid_out(leaf, like) for leaf, like in zip(leaves, prepared.call.leaves, strict=True)]
        return leaves

    def varied(self, variation: Variation, rare: bool = False) -> OpInfoSample | None:
        """Return the sample with one more change; None if the change does not apply.

        Of a ``rare`` sample only what DTensor claims is tried.
        """
        if variation.apply(self.first) is None:
            return None
        return OpInfoSample(self._row, self._template, (*self._changes, variation), rare)

    # ------------------------------------------------------------------------------------------------------ preparing
    def _changed(self, call: Call | None) -> Call | None:
        for change in self._changes:
            call = None if call is None else change.apply(call)
        return call

    def _at(self, size: int) -> _Prepared | None:
        if size not in self._prepared:
            if size >= self._row.options.sizes:
                return None
            with quiet():
                self._prepared[size] = self._prepare(size)
        return self._prepared[size]

    def _wide_at(self, size: int) -> _Prepared | None:
        prepared = self._at(size)
        if size not in self._wide and prepared is not None:
            with quiet():
                plan = widened(prepared.call, prepared.plan, self._regenerate(size), self._row.generator)
            self._wide[size] = None if plan is None else self._filled(prepared.call, plan, size)
        return self._wide.get(size)

    def _prepare(self, size: int) -> _Prepared | None:
        call = self.first if size == 0 else self._changed(self._row.at_size(self._template, size))
        if call is None:
            return None
        if size == 0:
            plan = make_plan(call, self._regenerate(0), self._row.generator)
        else:
            first = self._at(0)
            plan = None if first is None else settled(call, first.plan, self._regenerate(size), self._row.generator)
        if plan is None:
            return None
        return self._filled(call, plan, size)

    def _filled(self, call: Call, plan: FillPlan, size: int) -> _Prepared:
        fills = fills_of(call, plan, self._regenerate(size))
        return _Prepared(call, plan, fills, _tags(call))

    def _regenerate(self, size: int) -> Regenerate:
        regenerated = self._row.regenerated(self._template, size)
        return lambda number: self._changed(regenerated(number))

    def _can_be_special(self) -> bool:
        """Return whether torch accepts special values at the first size; some ops check for them and raise."""
        if self._takes_specials is None:
            prepared = self._at(0)
            base = base_of(self.op).rstrip("_")
            filled = prepared is not None and any(
                isinstance(fill, Palette | Chosen) and fill.dtype.is_floating_point for fill in prepared.fills.values()
            )
            self._takes_specials = prepared is not None and filled and base not in KEEP_VALUES
            with quiet():
                for number in range(SPECIAL_DRAWS if self._takes_specials else 0):
                    assert prepared is not None
                    call = prepared.call.with_leaves(self._leaves(prepared, 0, number, True))
                    self._takes_specials = self._takes_specials and attempt(call) is not None
        return self._takes_specials


def changes_of(sample: OpInfoSample, changes: Callable[[Call], Iterable[Variation]]) -> list[Variation]:
    """Return the changes of a call that depend on what rules claim, which is asked for one dtype alone, if it is kept.

    A rule that claims something else of another dtype has such a change of the first dtype.
    """
    if not ANSWERS.kept:
        return list(changes(sample.first))
    shapes = tuple(tuple(tensor.shape) for tensor in sample.first.tensors)
    key = changes.__qualname__, sample.op, sample.origin, shapes
    if key not in ANSWERS.here:
        ANSWERS.here[key] = list(changes(sample.first))
    found: list[Variation] = ANSWERS.here[key]
    return found


def read_by_strides(call: Call) -> Call:
    """Return ``call``, with contiguous tensors if its kernel gives other results for these.

    Some kernels take contiguous memory for granted, because autograd makes it so, as that of native_group_norm_backward
    does. Such a call says nothing of a rule.
    """
    tensors = call.tensors
    if all(tensor.is_contiguous() for tensor in tensors):
        return call
    plain = call.with_leaves([leaf.contiguous() if isinstance(leaf, torch.Tensor) else leaf for leaf in call.leaves])
    with quiet():
        given, expected = attempt(call), attempt(plain)
    if given is None or expected is None or len(given) != len(expected):
        return call
    return call if all(map(_close, given, expected)) else plain


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=1e-3, atol=1e-3, equal_nan=True)


def _laid_out(leaf: object, like: object) -> object:
    """Return the values of ``leaf`` with the strides of ``like``, if both are tensors."""
    if not isinstance(leaf, torch.Tensor) or not isinstance(like, torch.Tensor) or leaf.stride() == like.stride():
        return leaf
    return with_strides(leaf, like.stride())


def _times(leaf: object, factor: float) -> object:
    return leaf * factor if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _with_zeros(leaf: object, generator: torch.Generator) -> object:
    if not isinstance(leaf, torch.Tensor) or leaf.dtype == torch.bool:
        return leaf
    return leaf.masked_fill(torch.randint(0, 3, leaf.shape, generator=generator) == 0, 0)


def _with_digits(leaf: object, decimals: object) -> object:
    """Return a tensor of numbers that rounding to so many decimals changes."""
    if not isinstance(leaf, torch.Tensor) or not isinstance(decimals, int):
        return leaf
    return leaf * (10.0 ** max(0, -decimals) / 3)


def _tags(call: Call) -> frozenset[str]:
    values, base = call.values, base_of(str(call.op))
    tags = set()
    for name in _DIMS:
        dims = values.get(name)
        if any(isinstance(dim, int) and dim < 0 for dim in (dims if isinstance(dims, list | tuple) else (dims,))):
            tags.add("negative dim")
    if values.get("keepdim") is True:
        tags.add("keepdim")
    written = [parameter for parameter in parameters(call.op) if parameter.written]
    if any(parameter.out for parameter in written):
        tags.add("out=")
    elif written:
        tags.add("in-place")
    if base.startswith("_foreach"):
        tags.add("foreach")
    shapes = [tensor.shape for tensor in call.tensors]
    if len(set(shapes)) > 1 and any(1 in shape or len(shape) < max(map(len, shapes)) for shape in shapes):
        tags.add("broadcast")
    if any(0 in shape for shape in shapes):
        tags.add("empty tensor")
    return frozenset(tags)
