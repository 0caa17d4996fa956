"""Extents on which a rule of the user's branches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations

import torch

from strategies.opinfo.calls.call import Call, attempt
from strategies.opinfo.calls.checked import is_unchecked
from strategies.opinfo.samples.argument_spellings import Variation
from strategies.opinfo.samples.asking.claimed import claimed
from strategies.opinfo.samples.extents import Extents, Group
from verifier.torch_internals.amending.propagation import is_torchs
from verifier.torch_internals.names import OpOverload
from verifier.torch_internals.rule_code.constants import constants_of_rule

__all__ = ["broadcast_extents", "extent_branches", "lengths_of_rule", "other_extents", "tied_ones"]

_MOST_SHARED = 4
_MOST_LENGTHS, _LONGEST_LIST = 2, 12
_MOST_CONSTANTS = 8
_LARGEST = 64
"""Larger integers in the code of a rule are not given as arguments: an extent of that size would take long."""
_MOST_ELEMENTS, _MOST_TIMES = 1 << 15, 8
"""A call has at most so many elements, or so many times those that it had. A call of millions takes level 1 longer than
all other calls of the op."""


def extent_branches(call: Call) -> Iterator[Variation]:
    """Yield the extents at which the op's rules claim something else. Only the user's rules are asked."""
    if not is_torchs(call.op):
        usual = claimed(call)
        yield from (change for change in other_extents(call) if claimed(change.apply(call)) - usual)


def other_extents(call: Call) -> Iterator[Variation]:
    """Yield other extents of a call on which rules may branch.

    Those are near a number in the code of the rules, or equal to, twice or half another extent, or they make a product,
    a quotient or a sum of another extent such a number.
    """
    if is_unchecked(call) or not all(tensor.numel() for tensor in call.tensors):
        return
    constants = sorted(one for one in constants_of_rule(call.op) if type(one) is int and 0 < one <= _LARGEST)
    near = [one + more for more in (0, 1) for one in (1, *constants[:_MOST_CONSTANTS])]
    extents = Extents.of(call)
    others = sorted({extents.extent(group) for group in extents.groups})
    factors = dict.fromkeys((2, *(one for one in constants[:_MOST_CONSTANTS] if one > 1)))
    near += [new for one in others for new in (one, 2 * one, one // 2) if 0 < new <= _LARGEST]
    near += [new for f in factors for one in others for new in (f * one, one // f, f - one) if 0 < new <= _LARGEST]
    for number, group in enumerate(_alone_too(extents)):
        for extent in dict.fromkeys(near):
            if extent != extents.extent(group):
                yield Variation(f"extent {number} is {extent}", partial(_with_extent, number, extent))


def broadcast_extents(call: Call) -> Iterator[Variation]:
    """Yield the calls in which a tensor lacks its first dim and two extents are equal, if rules claim more there.

    A rule may take a dim for another one that has the same extent.
    """
    if is_torchs(call.op) or is_unchecked(call) or len(call.tensors) < 2:
        return
    for number in range(len(call.tensors)):
        fewer = _without_first(number, call)
        if fewer is None or (usual := claimed(fewer)) == claimed(None):
            continue
        extents = Extents.of(fewer)
        equal = sorted({extents.extent(group) for group in extents.groups})
        for place, group in enumerate(extents.groups):
            for extent in equal:
                if extent != extents.extent(group) and claimed(extents.other(group, extent)) - usual:
                    change = partial(_broadcast_with_extent, number, place, extent)
                    yield Variation(f"tensor {number} without its first dim, extent {place} is {extent}", change)


def _without_first(number: int, call: Call) -> Call | None:
    return call.with_tensors((number,), lambda one: one[0].clone() if one.ndim and len(one) else None)


def _broadcast_with_extent(number: int, place: int, extent: int, call: Call) -> Call | None:
    fewer = _without_first(number, call)
    return None if fewer is None else _with_extent(place, extent, fewer)


def lengths_of_rule(op: OpOverload) -> list[int]:
    """Return lengths of lists at which a rule may branch: the whole numbers in its code, and one more."""
    found = sorted(one for one in constants_of_rule(op) if type(one) is int and 2 < one <= _LONGEST_LIST)
    return [length for one in found[:_MOST_LENGTHS] for length in (one, one + 1)]


def _alone_too(extents: Extents) -> list[Group]:
    """Return the places of each extent, and then each of several places alone: a rule may compare them."""
    shared = [group for group in extents.groups if len(group) > 1]
    return [*extents.groups, *((place,) for group in shared[:_MOST_SHARED] for place in group[:_MOST_SHARED])]


def _with_extent(number: int, extent: int, call: Call) -> Call | None:
    extents = Extents.of(call)
    groups = _alone_too(extents)
    if number >= len(groups):
        return None
    elements = extents.elements({groups[number]: extent})
    few = elements <= max(_MOST_ELEMENTS, _MOST_TIMES * extents.elements({}))
    return extents.other(groups[number], extent) if few else None


def tied_ones(call: Call) -> Iterator[Variation]:
    """Yield calls of ops of the user's in which two dims of one extent, which may have to be equal, have one element.

    The inner dim of a product or both dims of a square matrix cannot have one alone.
    """
    if is_torchs(call.op) or is_unchecked(call) or torch.Tag.pointwise in call.op.tags:
        return
    dims = [(n, dim, e) for n, tensor in enumerate(call.tensors) for dim, e in enumerate(tensor.shape) if e > 1]
    for one, other in combinations(dims, 2):
        if one[2] == other[2]:
            change = partial(_narrowed, (one[:2], other[:2]))
            changed = change(call)
            if changed is not None and attempt(changed) is not None:
                named = " and ".join(f"dim {dim} of tensor {number}" for number, dim, _ in (one, other))
                yield Variation(f"{named} are 1", change)


def _narrowed(dims: Sequence[tuple[int, int]], call: Call) -> Call | None:
    """Return the call with the first slice along each of ``dims``, the numbers of tensors and of their dims."""
    places = [place for place, leaf in enumerate(call.leaves) if isinstance(leaf, torch.Tensor)]
    leaves = list(call.leaves)
    for number, dim in dims:
        tensor = leaves[places[number]]
        assert isinstance(tensor, torch.Tensor)
        if dim >= tensor.ndim or not tensor.shape[dim]:
            return None
        leaves[places[number]] = tensor.narrow(dim, 0, 1).clone()
    return call.with_leaves(leaves)
