"""Calls beyond what examples have: above the numbers in the op's own code, and where its fake kernel is another's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch

from strategies.opinfo.calls.call import Call, attempt
from strategies.opinfo.calls.checked import is_unchecked
from strategies.opinfo.calls.running import accepts, has_other_shapes
from strategies.opinfo.samples.argument_spellings import Variation
from strategies.opinfo.samples.extents import Extents, Group
from verifier.torch_internals.amending.propagation import rule_function
from verifier.torch_internals.names import OpOverload
from verifier.torch_internals.rule_code.constants import constants_of_op, constants_of_rule

__all__ = ["beyond_numbers", "misdescribed_extents"]

_USUAL, _LARGEST = 16, 4096
"""Extents and values up to the first are drawn in any case; a call beyond the second would take long."""
_MOST_ELEMENTS = 1 << 16
_MOST_NUMBERS = 3
_MORE = 1.5
_PALETTE = 4
"""About the largest value that is drawn."""


def beyond_numbers(call: Call) -> Iterator[Variation]:
    """Yield calls with extents, and with values, above the large numbers in the code of a user's op and of its rule.

    An op may take as many columns as a limit, or leave out values above one: its rule holds below it alone. A whole
    extent is half as large again as the number, so that a part of it on a rank is smaller.
    """
    if rule_function(call.op) is None or is_unchecked(call) or not all(tensor.numel() for tensor in call.tensors):
        return
    for limit in _limits(call.op):
        factor = 1 << math.ceil(math.log2(limit / _PALETTE))
        if any(tensor.is_floating_point() for tensor in call.tensors) and _is_finite(call, factor):
            yield Variation(f"values {factor} times as large", _same, factor=factor)
        extents = Extents.of(call)
        for number, group in enumerate(extents.groups):
            rest = _elements(call, group) // extents.extent(group)
            for extent in dict.fromkeys((math.ceil(_MORE * limit), math.ceil(_MORE * limit / rest))):
                if extents.extent(group) < extent and extent * rest <= _MOST_ELEMENTS:
                    yield Variation(f"extent {number} is {extent}", partial(_with_extent, number, extent))


def misdescribed_extents(call: Call) -> Iterator[Variation]:
    """Yield extents that the op takes, and of which its fake kernel tells another shape, beside those where it agrees.

    An op whose fake kernel agrees at no other extent may not be meant for other extents.
    """
    if is_unchecked(call):
        return
    extents = Extents.of(call)
    for number, group in enumerate(extents.groups):
        given = extents.extent(group)
        others = {new: extents.resized({group: new}, integers=True) for new in (given + 1, given + 2, given + 3)}
        if given > 1 and any(map(accepts, others.values())):
            for new, other in others.items():
                if has_other_shapes(other):
                    yield Variation(f"extent {number} is {new}", partial(_with_extent, number, new, described=False))


def _limits(op: OpOverload) -> list[float]:
    numbers = {abs(one) for one in constants_of_op(op) | constants_of_rule(op) if not isinstance(one, str | bool)}
    return sorted(one for one in numbers if _USUAL < one <= _LARGEST)[:_MOST_NUMBERS]


def _elements(call: Call, group: Group) -> int:
    """Return the elements of the largest tensor that has the extent of ``group``."""
    leaves = (call.leaves[place] for place, _ in group)
    return max(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))


def _is_finite(call: Call, factor: int) -> bool:
    leaves = call.leaves
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            leaves[place] = leaf * factor
    results = attempt(call.with_leaves(leaves))
    return results is not None and all(bool(result.isfinite().all()) for result in results)


def _same(call: Call) -> Call | None:
    return call


def _with_extent(number: int, extent: int, call: Call, described: bool = True) -> Call | None:
    """Return the call with another extent, if the op takes it; the fake kernel is asked only if ``described``."""
    extents = Extents.of(call)
    if number >= len(extents.groups):
        return None
    if described:
        return extents.other(extents.groups[number], extent)
    return extents.resized({extents.groups[number]: extent}, integers=True)
