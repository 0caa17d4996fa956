"""Finds rules that hold only where shards begin at multiples of a block, such as those of kernels with block scales.

A call is tried at extents and numbers of ranks that are aimed at the boundary between holding and not: shards of each
length in ``_LENGTHS``, of which many are multiples of the same numbers, with and without a shorter last shard.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Shard

from verifier.deriving.learning.evidence import (
    Blocks,
    CallEvidence,
    Inputs,
    Outputs,
    Place,
    groups_of_results,
    kept_where_written,
    slot_names,
)
from verifier.placements.partials import largest_part
from verifier.rules.classify import Expected
from verifier.rules.execute import Cuts, LocalCall
from verifier.rules.sample_on_mesh import CALL_ERRORS
from verifier.rules.samples import Sample

__all__ = ["BlocksByCall", "InBlocks", "blocks_of", "refuted_in_blocks"]

_LENGTHS = (2, 3, 4, 5, 6, 8, 10, 12, 15, 16, 20, 24, 25, 32, 40, 48, 64, 80, 96, 112, 128, 144, 160, 192, 256)
"""Lengths of a shard that are tried."""
_FIRST = (128, 160, 192)
"""The lengths that are tried first: nearly every block divides one of them."""
_MULTIPLES = (1, 2, 3)
"""For an op that takes few extents: the extent that was given, so many times, on so many ranks as follow."""
_RANKS = (2, 3, 4, 5, 6, 7, 8)
_TIMES = (1, 2, 3, 4, 5, 8)
"""So many blocks a shard has where a rule is tried that asks for blocks."""
_DRAWS = 2
_MOST_ELEMENTS, _MOST_OF_RESULTS = 1 << 15, 1 << 18
"""Elements of a tensor, and of all results, at the places that are tried."""
_LEAST_HOLDING, _LEAST_FAILING = 4, 4
"""Rules are believed only if they were seen to hold, and to fail, at so many places."""

BlocksByCall = dict[int, dict[Inputs, Blocks]]
"""The rules that hold where shards begin at multiples of a block, by the ``id`` of a call."""


@dataclass(frozen=True)
class _Place:
    """Where a rule is tried: a call with other extents of the sharded dims, and the number of ranks."""

    extents: tuple[int, ...]
    """Of the sharded dim of each slot; 0 for a slot that is not sharded."""
    ranks: int

    def lengths(self) -> tuple[int, ...]:
        return tuple(-(-extent // self.ranks) for extent in self.extents)

    def has_elements(self) -> bool:
        """Return whether each rank has elements of each sharded dim."""
        return all(
            not extent or length * (self.ranks - 1) < extent
            for extent, length in zip(self.extents, self.lengths(), strict=True)
        )


def blocks_of(
    call: CallEvidence, sample: Sample, seed: int, enter: Callable[[], None] = lambda: None
) -> dict[Inputs, Blocks]:
    """Return the rules of ``call`` that hold only where shards begin at multiples of a block.

    ``enter`` is called before each placement of the slots is tried.
    """
    draws = _Draws(sample)
    found = {}
    for inputs, outputs in call.rules.items():
        dims = [placement.dim if isinstance(placement, Shard) else None for placement in inputs]
        if outputs or any(p.is_partial() for p in inputs) or all(dim is None for dim in dims):
            continue
        enter()
        trial = _Trial(draws, inputs, dims, seed)
        if any(trial.at(place) for place in _first_places(call, dims)):
            blocks = _explained(trial, _places(call, dims), dims)
            if blocks is not None:
                found[inputs] = blocks
    return found


@dataclass(frozen=True)
class InBlocks:
    """What a rule says of a call where the shards of a slot begin at multiples of a block."""

    inputs: Inputs
    outputs: Inputs
    slot: int
    block: int


def refuted_in_blocks(
    call: CallEvidence,
    sample: Sample,
    asked: Iterable[InBlocks],
    seed: int,
    enter: Callable[[], None] = lambda: None,
) -> dict[Inputs, Place]:
    """Return the placements of slots that do not hold though shards begin at multiples of a block, each with a place.

    The extents of a call seldom are multiples of the block of a rule. So it is tried at others, as far as the op takes
    them. ``enter`` is called before each rule is tried.
    """
    draws = _Draws(sample)
    found: dict[Inputs, Place] = {}
    for one in asked if draws.calls else ():
        dims = [placement.dim if isinstance(placement, Shard) else None for placement in one.inputs]
        given = _given(call, dims)
        enter()
        trial = _Trial(draws, one.inputs, dims, seed)
        for times, ranks in itertools.product(_TIMES, (2, 3)):
            for place in _scaled(given, ranks * times * one.block, ranks, given[one.slot]):
                allowed = trial.at(place)
                if allowed is not None and not _are_among(one.outputs, allowed):
                    found.setdefault(one.inputs, (place.extents, place.ranks))
            if one.inputs in found:
                break
    return found


def _are_among(outputs: Inputs, allowed: Outputs) -> bool:
    return bool(allowed) and all(p in some for p, some in zip(outputs, allowed, strict=False))


def _first_places(call: CallEvidence, dims: Sequence[int | None]) -> Iterator[_Place]:
    given = _given(call, dims)
    yield from (place for length in _FIRST for place in _scaled(given, 2 * length, 2))
    yield from (_Place(tuple(n * extent for extent in given), 2) for n in _MULTIPLES)


def _places(call: CallEvidence, dims: Sequence[int | None]) -> Iterator[_Place]:
    given = _given(call, dims)
    for length in _LENGTHS:
        for ranks in (2, 3):
            yield from _scaled(given, ranks * length, ranks)
            yield from _scaled(given, ranks * length - length // 2, ranks)
    for ranks in _RANKS:
        yield from (_Place(tuple(n * extent for extent in given), ranks) for n in _MULTIPLES)


def _given(call: CallEvidence, dims: Sequence[int | None]) -> tuple[int, ...]:
    return tuple(0 if dim is None else shape[dim] for shape, dim in zip(call.shapes, dims, strict=True))


def _scaled(given: Sequence[int], extent: int, ranks: int, of: int | None = None) -> Iterator[_Place]:
    """Yield the place at which a sharded dim has ``extent``, and the others keep their share of it.

    It is the longest one, or the one whose given extent is ``of``.
    """
    base = max(given) if of is None else of
    if base and all(one * extent % base == 0 for one in given):
        yield _Place(tuple(one * extent // base for one in given), ranks)


class _Draws:
    """Calls of a sample at its first size, the slot of each tensor, and the values that each tensor has in them."""

    def __init__(self, sample: Sample) -> None:
        cases = [case for n in range(_DRAWS + 2) if (case := sample.draw(0, n)) is not None]
        self.calls = [LocalCall(case) for case in cases]
        self.names = slot_names(cases[0]) if cases else []
        columns = zip(*(call.tensors for call in self.calls), strict=True)
        self.values = [torch.cat([one.reshape(-1) for one in column]) for column in columns]


class _Trial:
    """Placements of the slots of a call, tried at places; what was tried is remembered."""

    def __init__(self, draws: _Draws, inputs: Inputs, dims: Sequence[int | None], seed: int) -> None:
        self._draws, self._inputs, self._dims, self._seed = draws, inputs, dims, seed
        self._known: dict[_Place, Outputs | None] = {}

    def at(self, place: _Place) -> Outputs | None:
        """Return the placements that the results may have; empty if there are none, None if the op refuses extents."""
        if place not in self._known:
            self._known[place] = self._run(place)
        return self._known[place]

    def _run(self, place: _Place) -> Outputs | None:
        if not place.has_elements():
            return None
        allowed: list[set[object]] = []
        for draw in range(_DRAWS):
            made = self._drawn(place, draw)
            if made is None:
                return None
            letters, masks = made
            here = [{p for n, p in enumerate(some) if m >> n & 1} for some, m in zip(letters, masks, strict=True)]
            if allowed and len(allowed) != len(here):
                return None
            allowed = [a & b for a, b in zip(allowed, here, strict=True)] if allowed else here
            if not all(allowed):
                return ()
        return tuple(frozenset(some) for some in allowed)  # type: ignore[arg-type]

    def _drawn(self, place: _Place, draw: int) -> tuple[list[tuple[object, ...]], list[int]] | None:
        base, names = self._draws.calls[draw % len(self._draws.calls)], self._draws.names
        slots = list(dict.fromkeys(names))
        generator = torch.Generator().manual_seed(self._seed + 101 * draw + sum(place.extents) + place.ranks)
        tensors = []
        for name, tensor, values in zip(names, base.tensors, self._draws.values, strict=True):
            dim, extent = self._dims[slots.index(name)], place.extents[slots.index(name)]
            shape = [extent if n == dim else one for n, one in enumerate(tensor.shape)]
            if math.prod(shape) > _MOST_ELEMENTS:
                return None
            tensors.append(_other_values(values, shape, generator))
        try:
            whole = base(tensors)
        except CALL_ERRORS:
            return None
        if sum(t.numel() for t in whole.tensors) > _MOST_OF_RESULTS:
            return None
        terms = sum(t.numel() for t in tensors) + sum(t.numel() for t in whole.tensors)
        expected = [Expected(t, place.ranks, False, terms, largest_part(t.dtype)) for t in whole.tensors]
        cuts = Cuts(tensors, (place.ranks,), self._seed + draw)
        placed = [self._inputs[slots.index(name)] for name in names]
        cut = [cuts.of(n, (p,)) for n, p in enumerate(placed)]
        firsts = [group[0] for group in groups_of_results(names, base, whole)]
        letters: list[tuple[object, ...]] = [expected[n].letters for n in firsts]
        try:
            made = [base(one) for one in zip(*cut, strict=True)]
        except Exception:  # noqa: BLE001 - an op may raise anything on a rank's part; that refutes the rule
            return letters, [0] * len(firsts)
        if any(len(one.tensors) != len(expected) for one in made):
            return letters, [0] * len(firsts)
        masks = [one.represented([rank.tensors[n] for rank in made]) for n, one in enumerate(expected)]
        kept = kept_where_written(base, whole, expected, placed, masks)
        return letters, [kept[n] if kept else 0 for n in firsts]


def _other_values(values: torch.Tensor, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Return a tensor of another shape with some of ``values``; those of floating dtypes are varied."""
    if not values.numel():
        return values.new_zeros(shape)
    made = values[torch.randint(values.numel(), tuple(shape), generator=generator)]
    if made.is_floating_point() or made.is_complex():
        made = made * (1 + torch.randint(0, 16, tuple(shape), generator=generator).to(made.dtype) / 16)
    return made


def _explained(trial: _Trial, places: Iterable[_Place], dims: Sequence[int | None]) -> Blocks | None:
    """Return the block of the first slot that explains where placements hold and where they do not."""
    tried = {place: outputs for place in dict.fromkeys(places) if (outputs := trial.at(place)) is not None}
    holding = {place: outputs for place, outputs in tried.items() if outputs}
    failing = [place for place in tried if place not in holding]
    if len(holding) < _LEAST_HOLDING or len(failing) < _LEAST_FAILING:
        return None
    if len({len(outputs) for outputs in holding.values()}) > 1:  # as many results as extents say
        return None
    common = [frozenset.intersection(*column) for column in zip(*holding.values(), strict=True)]
    for slot, dim in enumerate(dims):
        block = math.gcd(*(place.lengths()[slot] for place in holding))
        if dim is None or block < 2 or any(place.lengths()[slot] % block == 0 for place in failing):
            continue
        if len({place.lengths()[slot] for place in holding}) > 1 and all(common):
            held, failed = (tuple((place.extents, place.ranks) for place in some) for some in (holding, failing))
            return Blocks(tuple(common), slot, block, held, failed)
    return None
