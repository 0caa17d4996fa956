"""Finds how a call can be filled with new values by running it, because no schema has an op's domain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch

from strategies.opinfo.calls.call import Call, attempt, parameters
from strategies.opinfo.calls.op_facts import (
    BITWISE,
    KEEP_VALUES,
    RANDOM_BASES,
    UNINITIALISED,
    UNIQUE_INDICES,
    WRITE_ONLY,
)
from strategies.opinfo.calls.op_names import base_of, stem
from strategies.opinfo.samples.fills import (
    Chosen,
    Constant,
    Domain,
    Fill,
    Flags,
    Integers,
    Palette,
    Poison,
    Regenerated,
    beyond_palettes,
    domain_of,
)

__all__ = [
    "FillPlan",
    "Level",
    "Regenerate",
    "fills_of",
    "make_plan",
    "refilled",
    "settled",
    "thresholds_of",
    "why_not_testable",
    "widened",
]

Regenerate = Callable[[int], Call | None]
"""Returns the same call with OpInfo's values for another seed, or None."""

_CHECKED_DRAWS = 3  # one of each palette
_MOST_DRAWS = 8
_ENOUGH_ELEMENTS = 48  # this many integral results are no accident
_PROBES = 2
_GRAIN = 2.0**12  # inverse of the fraction that products of up to six quarters are multiples of
_SMALL = 4  # fewer elements say nothing about a domain


class Level(IntEnum):
    """Kinds of values of floating tensors, from the most informative to the most cautious."""

    PALETTE = 0
    NONZERO = 1
    STRICT = 2  # nonzero, and small tensors stay in the domain of their OpInfo values
    CHOSEN = 3
    REGENERATED = 4
    CONSTANT = 5


@dataclass(frozen=True)
class FillPlan:
    """Facts about a sample, found at its first size.

    ``domains`` has the domain of each floating leaf. ``poison`` has the leaves whose values are not read. ``beyond``
    are values that the palettes do not have.
    """

    level: Level
    domains: dict[int, Domain]
    poison: frozenset[int]
    exact: bool
    beyond: tuple[int, ...] = ()


def why_not_testable(call: Call) -> str:
    """Return why the arguments of a call do not determine its results; empty if they do."""
    base = stem(base_of(str(call.op))) if call.op.namespace in ("aten", "prims") else ""
    if base in UNINITIALISED:
        return "uninitialised memory"
    if (torch.Tag.nondeterministic_seeded in call.op.tags or base in RANDOM_BASES) and not _draws_nothing(call):
        return "random"
    before = torch.get_rng_state()
    first, second = attempt(call), attempt(call)
    if not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)
        return "random"
    if first is not None and (second is None or not _same(first, second)):
        return "uninitialised memory" if base else "two calls of it return different results"
    return ""


def _draws_nothing(call: Call) -> bool:
    """Return whether a call draws no random numbers: its dropout has the probability 0, or it is not for training."""
    return any(
        (parameter.name == "dropout_p" and call.values.get(parameter.name, parameter.default) == 0)
        or (parameter.name in _TRAINING and call.values.get(parameter.name, parameter.default) is False)
        for parameter in parameters(call.op)
    )


_TRAINING = ("train", "training")


# --------------------------------------------------------------------------------------------------------------- fills
def fills_of(call: Call, plan: FillPlan, regenerate: Regenerate) -> dict[int, Fill]:
    """Return the fill of each tensor of ``call``, by leaf."""
    base = base_of(str(call.op)).rstrip("_")
    level = max(plan.level, Level.REGENERATED) if _keeps_values(call) else plan.level
    fills: dict[int, Fill] = {}
    for place, leaf in enumerate(call.leaves):
        if isinstance(leaf, torch.Tensor):
            # the flags of a mask are no indices that could occur twice, and OpInfo's are all equal in places
            indices = base in UNIQUE_INDICES and not _is_floating(leaf) and leaf.dtype != torch.bool
            keep = level >= Level.REGENERATED or indices
            if place in plan.poison:
                fills[place] = Poison(leaf.shape, leaf.dtype)
            elif base in WRITE_ONLY and place == 0 and not _is_floating(leaf) and leaf.dtype != torch.bool:
                fills[place] = Integers(leaf.shape, leaf.dtype, 0, 7)  # the captured tensor was uninitialised
            elif level == Level.CONSTANT:
                fills[place] = Constant(leaf)
            elif keep:
                fills[place] = Regenerated(_regenerated(call, regenerate, place))
            elif leaf.dtype == torch.bool:
                fills[place] = Flags(leaf.shape)
            elif not _is_floating(leaf):
                fills[place] = _integers(leaf)
            elif level == Level.CHOSEN or leaf.dtype == torch.complex32:
                fills[place] = Chosen(leaf.shape, leaf)
            else:
                free = level < Level.STRICT and leaf.numel() < _SMALL
                domain = "any" if free else plan.domains.get(place, "any")
                fills[place] = Palette(leaf.shape, leaf.dtype, domain, level == Level.PALETTE, plan.beyond)
    return fills


def _keeps_values(call: Call) -> bool:
    return base_of(str(call.op)).rstrip("_") in KEEP_VALUES


def _integers(leaf: torch.Tensor) -> Fill:
    """Return a fill for a tensor that may hold indices, within the range of OpInfo's values."""
    if not leaf.numel():
        return Constant(leaf)
    low, high = int(leaf.min()), int(leaf.max())
    if low < 0:
        # such as an ignore_index of -100: no value between it and 0 is valid
        return Chosen(leaf.shape, leaf)
    return Integers(leaf.shape, leaf.dtype, 0 if leaf.numel() < _SMALL else low, high)


def _regenerated(call: Call, regenerate: Regenerate, place: int) -> Callable[[int], torch.Tensor]:
    leaf = call.leaves[place]
    assert isinstance(leaf, torch.Tensor)

    def tensor(number: int) -> torch.Tensor:
        other = regenerate(number)
        value = None if other is None else other.leaves[place]
        return value if isinstance(value, torch.Tensor) and value.shape == leaf.shape else leaf

    return tensor


def refilled(call: Call, fills: dict[int, Fill], generator: torch.Generator, number: int) -> list[object]:
    """Return the leaves of ``call`` with new tensors."""
    leaves = call.leaves
    for place, fill in fills.items():
        leaves[place] = fill.draw(generator, number)
    return leaves


def _is_floating(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


# --------------------------------------------------------------------------------------------------------------- plans
def make_plan(call: Call, regenerate: Regenerate, generator: torch.Generator) -> FillPlan | None:
    """Return the plan of ``call``; None if torch refuses the call."""
    reference = attempt(call)
    if reference is None:
        return None
    domains = {
        place: domain_of(leaf)
        for place, leaf in enumerate(call.leaves)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    }
    for level in Level:
        plan = FillPlan(level, domains, frozenset(), False)
        outcomes = _tried(call, plan, regenerate, generator, reference, _CHECKED_DRAWS)
        if outcomes is not None and not (level < Level.CHOSEN and _is_blunt(call, reference, outcomes)):
            poison = _unread(call, plan, regenerate, generator, outcomes)
            exact = _is_exact(call, plan, poison, regenerate, generator, outcomes)
            return FillPlan(level, domains, poison, exact)
    return None


def _is_blunt(call: Call, reference: Sequence[torch.Tensor], outcomes: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Return whether an op of the user's has a result that is the same everywhere only because few values are drawn.

    So is the largest of many elements.
    """
    if call.op.namespace in ("aten", "prims"):
        return False
    differ = [number for number, result in enumerate(reference) if _differs(result)]
    return any(not _differs(results[number]) for number in differ for results in outcomes)


def _differs(tensor: torch.Tensor) -> bool:
    return _is_floating(tensor) and tensor.numel() > 1 and bool((tensor != tensor.reshape(-1)[0]).any())


def settled(call: Call, plan: FillPlan, regenerate: Regenerate, generator: torch.Generator) -> FillPlan | None:
    """Return ``plan``, made at another size, adjusted to ``call``; None if torch refuses the call."""
    reference, again = attempt(call), attempt(call)
    if reference is None or again is None or not _same(reference, again):
        return None  # some kernels read past the end at some sizes
    for level in Level:
        if level >= plan.level:
            exact = plan.exact and level == plan.level
            here = FillPlan(level, plan.domains, plan.poison, exact)
            outcomes = _tried(call, here, regenerate, generator, reference, 1)
            if outcomes is not None:
                if (
                    exact
                    and not _is_bitwise(call)
                    and (not _integral(outcomes[0]) or _rounds(call, here, regenerate, generator))
                ):
                    return replace(here, exact=False)
                return here
    return None


def widened(call: Call, plan: FillPlan, regenerate: Regenerate, generator: torch.Generator) -> FillPlan | None:
    """Return ``plan`` with values of both signs, and with values on both sides of the call's scalar arguments.

    The domains stay if torch refuses both signs or returns NaN for them. The result is None if nothing is wider.
    """
    reference = attempt(call)
    if reference is None or plan.level != Level.PALETTE or _keeps_values(call):
        return None
    beyond = beyond_palettes(thresholds_of(call))
    fills = fills_of(call, plan, regenerate).values()
    narrow = any(isinstance(fill, Palette) and fill.domain != "any" for fill in fills)
    wider = [replace(plan, domains={}, beyond=beyond)] if narrow else []
    wider += [replace(plan, beyond=beyond)] if beyond else []
    for wide in wider:
        outcomes = _tried(call, wide, regenerate, generator, reference, _CHECKED_DRAWS)
        if outcomes is not None:
            return replace(wide, exact=_is_exact(call, wide, plan.poison, regenerate, generator, outcomes))
    return None


def thresholds_of(call: Call) -> tuple[float, ...]:
    """Return the scalar arguments that are plain numbers, which may be thresholds."""
    named = [(parameter.name, parameter.type) for parameter in parameters(call.op)]
    values = [call.values.get(name) for name, type_ in named if "number" in type_ or "float" in type_]
    return tuple(float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool))


def _tried(
    call: Call,
    plan: FillPlan,
    regenerate: Regenerate,
    generator: torch.Generator,
    reference: Sequence[torch.Tensor],
    draws: int,
) -> list[list[torch.Tensor]] | None:
    """Return the results of some draws; None if a draw raises or has more NaN and infinities than OpInfo's values."""
    fills = fills_of(call, plan, regenerate)
    allowed = _not_finite(reference)
    outcomes = []
    for number in range(draws):
        results = attempt(call.with_leaves(refilled(call, fills, generator.manual_seed(number), number)))
        if results is None or len(results) != len(reference):
            return None
        if plan.level < Level.REGENERATED and _not_finite(results) > allowed:
            return None
        outcomes.append(results)
    return outcomes


def _not_finite(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() - int(tensor.isfinite().sum()) for tensor in tensors if _is_floating(tensor))


def _unread(
    call: Call,
    plan: FillPlan,
    regenerate: Regenerate,
    generator: torch.Generator,
    outcomes: Sequence[Sequence[torch.Tensor]],
) -> frozenset[int]:
    """Return the leaves whose values the op does not read: NaN in them does not change the results of draws."""
    if _keeps_values(call):
        return frozenset()  # NaN as a coordinate crashes some kernels
    if not any(result.is_floating_point() and result.numel() for result in outcomes[0]):
        return frozenset()  # a comparison with NaN may have the same result
    fills = fills_of(call, plan, regenerate)
    return frozenset(
        place
        for place, fill in fills.items()
        if isinstance(leaf := call.leaves[place], torch.Tensor)
        and leaf.is_floating_point()
        and leaf.numel()
        and not _is_read(call, place, fill, fills, generator, outcomes)
    )


def _is_read(
    call: Call,
    place: int,
    fill: Fill,
    fills: dict[int, Fill],
    generator: torch.Generator,
    outcomes: Sequence[Sequence[torch.Tensor]],
) -> bool:
    """Return whether other values of the leaf ``place`` change a result."""
    leaf = call.leaves[place]
    assert isinstance(leaf, torch.Tensor)
    for number, before in enumerate(outcomes):
        leaves = refilled(call, fills, generator.manual_seed(number), number)
        # NaN first, which decides most cases; ops that only compare (relu's backward) need other values, too
        probes = [float("nan"), 0.0, 1e4, -1e4] if number == 0 else [float("nan")]
        others = [torch.full(leaf.shape, value, dtype=leaf.dtype) for value in probes]
        redraws = _MOST_DRAWS if leaf.numel() < _SMALL else 1
        others += [fill.draw(generator, number + 1 + redraw) for redraw in range(redraws)]
        for other in others:
            leaves[place] = other
            after = attempt(call.with_leaves(leaves))
            if after is None or _has_nan(after) or not _same(before, after):
                return True
    return False


def _has_nan(tensors: Sequence[torch.Tensor]) -> bool:
    return any(_is_floating(tensor) and bool(tensor.isnan().any()) for tensor in tensors)


def _same(these: Sequence[torch.Tensor], those: Sequence[torch.Tensor]) -> bool:
    return len(these) == len(those) and all(
        a.shape == b.shape and a.dtype == b.dtype and (torch.equal(a, b) or _same_but_for_nan(a, b))
        for a, b in zip(these, those, strict=True)
    )


def _same_but_for_nan(a: torch.Tensor, b: torch.Tensor) -> bool:
    return _is_floating(a) and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


# --------------------------------------------------------------------------------------------------------------- exact
def _is_exact(
    call: Call,
    plan: FillPlan,
    poison: frozenset[int],
    regenerate: Regenerate,
    generator: torch.Generator,
    outcomes: Sequence[Sequence[torch.Tensor]],
) -> bool:
    """Return whether all floating values are small integers, and so many results are that it is no accident.

    The op must also be exact on fractions, unlike the root of a power; see :func:`_rounds`.
    """
    if _is_bitwise(call):
        return True
    fills = fills_of(call, plan, regenerate)
    for place, fill in fills.items():
        leaf = call.leaves[place]
        read = place not in poison and isinstance(leaf, torch.Tensor) and _is_floating(leaf) and leaf.numel()
        if read and not (isinstance(fill, Palette) and fill.is_integral):
            return False
    if not all(_integral(results) for results in outcomes):
        return False
    seen = sum(result.numel() for results in outcomes for result in results)
    for number in range(len(outcomes), _MOST_DRAWS):
        if seen >= _ENOUGH_ELEMENTS:
            break
        results = attempt(call.with_leaves(refilled(call, fills, generator.manual_seed(number), number)))
        if results is None or not _integral(results):
            return False
        seen += sum(result.numel() for result in results)
    return not _rounds(call, plan, regenerate, generator)


def _is_bitwise(call: Call) -> bool:
    return base_of(str(call.op)).rstrip("_") in BITWISE


def _rounds(call: Call, plan: FillPlan, regenerate: Regenerate, generator: torch.Generator) -> bool:
    """Return whether the op rounds values like the summands of a Partial: quarters of up to eleven binary digits.

    Sums, products and selections of quarters are multiples of a small fraction. Roots, powers, divisions and
    exponentials are not, although they may return small integers. The check is in float64, which has all digits.
    """
    fills = fills_of(call, plan, regenerate)
    for number in range(_PROBES):
        leaves = refilled(call, fills, generator.manual_seed(number), number)
        for place, leaf in enumerate(leaves):
            if isinstance(fills.get(place), Palette) and isinstance(leaf, torch.Tensor):
                leaves[place] = _quarters(leaf, generator)
        results = attempt(call.with_leaves(leaves))
        if results is not None and not all(_is_grained(result) for result in results):
            return True
    return False


def _quarters(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return odd quarters, in float64 or complex128, with the signs of the elements of ``like``."""
    if like.is_complex():
        return torch.complex(_quarters(like.real, generator), _quarters(like.imag, generator))
    odd = torch.randint(0, 1024, like.shape, generator=generator).double() / 2 + 0.25
    return like.sign().double() * odd


def _is_grained(tensor: torch.Tensor) -> bool:
    """Return whether all elements that are small enough to have fractional digits are multiples of a small fraction."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj().resolve_neg())
    if not tensor.is_floating_point():
        return True
    scaled = tensor.double() * _GRAIN
    known = scaled[scaled.abs() < 2.0**48]  # NaN and infinities are left out as well
    return torch.equal(known, known.round())


def _integral(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all finite elements are integers, far below the limit of exact integers of the dtype."""
    for tensor in tensors:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj().resolve_neg())
        if tensor.is_floating_point() and tensor.numel():
            largest = 0.125 / torch.finfo(tensor.dtype).eps
            finite = tensor if bool(tensor.isfinite().all()) else tensor.nan_to_num(0.0, 0.0, 0.0)
            if not torch.equal(finite, finite.round()) or bool(finite.abs().max() > largest):
                return False
    return True
