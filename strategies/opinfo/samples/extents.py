"""Other extents of a call that was given: extents that are equal there stay equal, as far as the op asks for that."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch

from strategies.opinfo.calls.call import Call, parameters
from strategies.opinfo.calls.running import accepts
from strategies.opinfo.samples.argument_spellings import Variation

__all__ = ["Extents", "Group", "rare_extents"]

Place = tuple[int, int]
"""A leaf of the call, and a tensor dim of it."""
Group = tuple[Place, ...]
"""The places of one extent."""

_UNEVEN, _SMALL = (5, 7, 11, 13, 9, 15), (2, 3, 1, 2, 3, 1)
_MORE, _EVEN = (7, 13, 5, 11, 17, 9), (12, 4, 8, 6, 24, 16)
_WANTED = (None, _UNEVEN, _SMALL, _MORE, _EVEN)
"""The extents to try first at each size, for the call's extents in turn; the first size is the call as it is."""
_MOST_ELEMENTS = 1 << 22
"""A call with more elements takes more memory than a worker has."""
_MOST_CALLS = 60
"""So many calls are tried to find one at another size."""
_GROUPS: WeakKeyDictionary[Call, tuple[Group, ...]] = WeakKeyDictionary()
"""The groups of each call: each of hundreds of changes of a call asks for them."""


@dataclass(frozen=True)
class Extents:
    """Which extents of a call belong together: each group has the places of one extent.

    Parameters
    ----------
    call
        The call that was given.
    groups
        The places of each extent, in the order in which the call has them.
    """

    call: Call
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, call: Call) -> Extents:
        """Return the groups of equal extents in ``call``.

        Equal extents of different dims of one tensor are two groups if the op takes other values for one of them.
        """
        if call not in _GROUPS:
            _GROUPS[call] = cls._found(call).groups
        return cls(call, _GROUPS[call])

    @classmethod
    def _found(cls, call: Call) -> Extents:
        tensors = [(number, leaf) for number, leaf in enumerate(call.leaves) if isinstance(leaf, torch.Tensor)]
        by_extent: dict[int, list[Place]] = {}
        for number, tensor in tensors:
            for dim, extent in enumerate(tensor.shape):
                by_extent.setdefault(extent, []).append((number, dim))
        found = cls(call, tuple(tuple(places) for places in by_extent.values()))
        for group in list(found.groups):
            for split in _splits(group):
                other = cls(call, tuple(part for one in found.groups for part in (split if one == group else (one,))))
                if other._takes(split[-1]):
                    found = other
                    break
        return found

    def extent(self, group: Group) -> int:
        """Return the extent of the places of ``group``."""
        number, dim = group[0]
        leaf = self.call.leaves[number]
        assert isinstance(leaf, torch.Tensor)
        return leaf.shape[dim]

    def _takes(self, group: Group) -> bool:
        extent = self.extent(group)
        return any(accepts(self.resized({group: new})) for new in (extent + 1, 2 * extent)) if extent > 1 else False

    def at_size(self, size: int) -> Call | None:
        """Return the call at size number ``size``; None if the op takes no other extents, or there is no such size."""
        if size == 0:
            return self.call
        if size >= len(_WANTED):
            return None
        wanted, chosen, tries = _WANTED[size], dict[Group, int](), 0
        assert wanted is not None
        together = {group: wanted[n % len(wanted)] for n, group in enumerate(self._free)}
        if (whole := self._taken(together)) is not None:
            return whole
        for number, group in enumerate(self._free):
            for extent in _candidates(self.extent(group), wanted[number % len(wanted)]):
                tries += 1
                if tries < _MOST_CALLS and self._taken({**chosen, group: extent}) is not None:
                    chosen[group] = extent
                    break
        for extents in self._in_proportion([group for group in self._free if group not in chosen], wanted[0]):
            tries += 1
            if tries < _MOST_CALLS and not chosen.keys() & extents.keys() and self._taken(chosen | extents) is not None:
                chosen |= extents
        return self._taken(chosen) if chosen else None

    def _in_proportion(self, groups: Sequence[Group], wanted: int) -> Iterator[dict[Group, int]]:
        """Yield other extents for two groups of which one is a multiple of the other, as of rows and their blocks."""
        for small, large in itertools.permutations(groups, 2):
            times, rest = divmod(self.extent(large), self.extent(small))
            if not rest and times > 1:
                for extent in _candidates(self.extent(small), wanted):
                    yield {small: extent, large: times * extent}

    @property
    def _free(self) -> list[Group]:
        """The groups whose extents are not 0 or 1, which are such on purpose."""
        return [group for group in self.groups if self.extent(group) > 1]

    def _taken(self, extents: Mapping[Group, int]) -> Call | None:
        """Return the first call with other extents that the op takes; None if it takes none.

        With the extents change integers that are such an extent, and then indices. Only different calls are tried.
        """
        if self.elements(extents) > _MOST_ELEMENTS:
            return None
        before = {self.extent(group) for group in extents}
        counts = any(type(leaf) is int and leaf > 1 and leaf in before for leaf in self.call.leaves)
        indices = any(isinstance(leaf, torch.Tensor) and _may_be_indices(leaf) for leaf in self.call.leaves)
        ways = itertools.product((True, False) if counts else (True,), (False, True) if indices else (False,))
        return next(filter(accepts, (self.resized(extents, *way) for way in ways)), None)

    def other(self, group: Group, extent: int) -> Call | None:
        """Return the call with another extent of one group, and of what changes with it; None if it is not taken."""
        return self._taken({group: extent}) if extent != self.extent(group) else None

    def elements(self, extents: Mapping[Group, int]) -> int:
        """Return the number of elements of all tensors of the call with other extents of some groups."""
        new = {place: extent for group, extent in extents.items() for place in group}
        shapes = [
            (number, leaf.shape) for number, leaf in enumerate(self.call.leaves) if isinstance(leaf, torch.Tensor)
        ]
        return sum(math.prod(new.get((n, dim), old) for dim, old in enumerate(shape)) for n, shape in shapes)

    def resized(self, extents: Mapping[Group, int], integers: bool = False, indices: bool = False) -> Call:
        """Return the call with other extents of some groups; elements are those of the call, repeated.

        Parameters
        ----------
        integers
            Whether integers among the arguments that are equal to an extent change with it.
        indices
            Whether elements of integral tensors are kept below the new extents.
        """
        leaves = self.call.leaves
        new = {place: extent for group, extent in extents.items() for place in group}
        before = {self.extent(group): extent for group, extent in extents.items()}
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                shape = [new.get((number, dim), extent) for dim, extent in enumerate(leaf.shape)]
                leaves[number] = _repeated(_below(leaf, before) if indices else leaf, shape)
            elif integers and type(leaf) is int and leaf > 1 and leaf in before:
                leaves[number] = before[leaf]
        return self.call.with_leaves(leaves)


def _splits(group: Group) -> Iterator[tuple[Group, ...]]:
    """Yield a group in two: the places of a dim that stands beside another dim of the same tensor, and the others."""
    for dim in sorted({dim for _, dim in group}):
        beside = [place for place in group if place[1] == dim]
        others = [place for place in group if place[1] != dim]
        if others and {number for number, _ in beside} & {number for number, _ in others}:
            yield tuple(others), tuple(beside)


def _candidates(extent: int, wanted: int) -> Iterator[int]:
    """Yield other extents for one: the wanted one, its neighbours, then those that share its divisors."""
    yield from dict.fromkeys(
        other
        for other in (wanted, extent + 1, extent + 2, 3 * extent, extent // 2, 3 * extent // 2, 2 * extent, 5 * extent)
        if other > 0 and other != extent
    )


def _repeated(tensor: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Return the elements of ``tensor`` in another shape."""
    if list(tensor.shape) == shape:
        return tensor
    if not tensor.numel():
        return tensor.new_zeros(shape)
    return tensor.reshape(-1)[torch.arange(math.prod(shape)) % tensor.numel()].view(shape)


def _may_be_indices(tensor: torch.Tensor) -> bool:
    floats = tensor.is_floating_point() or tensor.is_complex()
    return not floats and tensor.dtype != torch.bool and tensor.numel() > 0


def _below(tensor: torch.Tensor, extents: Mapping[int, int]) -> torch.Tensor:
    """Return integers that may be indices, below the new one of each extent that they were below."""
    if not _may_be_indices(tensor):
        return tensor
    bounds = [new for old, new in extents.items() if old > int(tensor.max()) and new > 0]
    return tensor % min(bounds) if bounds else tensor


# ------------------------------------------------------------------------------------------------- classes of extents
def rare_extents(call: Call) -> Iterator[Variation]:
    """Yield the changes of extents that usual calls seldom have: one of them 1, or 0, and two of them equal."""
    if any(parameter.out for parameter in parameters(call.op)):
        return  # torch would resize the output
    groups = Extents.of(call).groups
    for label, change in (("1", _one), ("0", _none)):
        for number in range(len(groups)):
            yield Variation(f"extent {number} is {label}", partial(_resized, change, number))
    for number in range(1, len(groups)):
        yield Variation(f"extent {number} is that of 0", partial(_resized, _first, number))


def _resized(change: Callable[[Extents], int], number: int, call: Call) -> Call | None:
    extents = Extents.of(call)
    if number >= len(extents.groups):
        return None
    group, extent = extents.groups[number], change(extents)
    if extents.extent(group) == extent:
        return None
    other = extents.resized({group: extent}, integers=True)
    return other if accepts(other) else None


def _one(extents: Extents) -> int:
    return 1


def _none(extents: Extents) -> int:
    return 0


def _first(extents: Extents) -> int:
    return extents.extent(extents.groups[0])
