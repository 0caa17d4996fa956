"""All combinations of placements of a call's tensor arguments."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from verifier.core.wording import plural
from verifier.placements.alphabet import Alphabet
from verifier.placements.pairwise import Choices, sample_pairwise
from verifier.torch_internals.placements import Combination

__all__ = [
    "CombinationSpace",
]


@lru_cache(maxsize=256)
def _ways(alphabet: Alphabet, ndim: int, dtype: torch.dtype, mesh_ndim: int) -> tuple[tuple[Placement, ...], Choices]:
    """Return a tensor's possible placements on one mesh dim, and those on all mesh dims as tuples of their numbers."""
    letters = alphabet.placements(ndim, dtype)
    numbers = itertools.product(range(len(letters)), repeat=mesh_ndim)
    return letters, Choices(entry for entry in numbers if alphabet.allows(tuple(letters[n] for n in entry)))


@dataclass
class CombinationSpace:
    """All combinations of placements of some tensors on a mesh of ``mesh_ndim`` dims.

    Parameters
    ----------
    tensors
        The tensors to place, in order; a 0-d tensor cannot be sharded.
    mesh_ndim
        Number of mesh dims.
    alphabet
        Which placements to try on one mesh dim.
    cap
        The largest number of combinations; None for all.
    seed
        Fixes the sample if there are more than ``cap``.
    wanted
        Combinations that a sample prefers for its pairwise cover, and adds after the cover. If the cover leaves no room
        for them, they replace its last combinations.
    """

    tensors: Sequence[torch.Tensor]
    mesh_ndim: int
    alphabet: Alphabet = field(default_factory=Alphabet)
    cap: int | None = None
    seed: int = 0
    wanted: Sequence[Combination] = ()

    @cached_property
    def _letters(self) -> list[tuple[Placement, ...]]:
        return [letters for letters, _ in self._ways]

    @cached_property
    def _ways(self) -> list[tuple[tuple[Placement, ...], Choices]]:
        return [_ways(self.alphabet, tensor.ndim, tensor.dtype, self.mesh_ndim) for tensor in self.tensors]

    @cached_property
    def total(self) -> int:
        """Number of combinations, before any cap."""
        return math.prod(len(choices.entries) for _, choices in self._ways)

    def describe(self) -> str:
        """Return ``"all n combinations"`` or ``"sampled k of n combinations"``."""
        total = plural(self.total, "combination")
        return f"all {total}" if self.cap is None or self.total <= self.cap else f"sampled {self.cap} of {total}"

    def __iter__(self) -> Iterator[Combination]:
        # one factor per tensor and mesh dim, so that pairs within one tensor's placements are covered as well
        choices = [choices for _, choices in self._ways]
        if self.cap is None or self.total <= self.cap:
            for parts in itertools.product(*(each.entries for each in choices)):
                yield self._combination(list(itertools.chain(*parts)))
            return
        plain = [
            sum(not placement.is_partial() or placement == Partial("sum") for placement in letters)
            for letters in self._letters
            for _ in range(self.mesh_ndim)
        ]
        entries = {combination: self._entry(combination) for combination in self.wanted}
        wanted = {entry for entry in entries.values() if entry is not None}
        sample, _ = sample_pairwise(choices, self.cap, self.seed, plain, [e for e in entries.values() if e in wanted])
        inside = set(sample)
        left = [combination for combination, entry in entries.items() if entry not in inside]
        left = left[: self.cap - len(wanted & inside)]
        spared = [entry for entry in reversed(sample) if entry not in wanted][: len(left)]
        yield from (self._combination(entry) for entry in sample if entry not in spared)
        yield from left

    def _entry(self, combination: Combination) -> tuple[int, ...] | None:
        """Return the numbers of the placements in ``combination``; None if ``combination`` is not in this space."""
        entry: list[int] = []
        for (letters, choices), placements in zip(self._ways, combination, strict=True):
            if not all(placement in letters for placement in placements):
                return None
            part = tuple(map(letters.index, placements))
            if part not in choices.entries:
                return None
            entry += part
        return tuple(entry)

    def _combination(self, entry: Sequence[int]) -> Combination:
        width = self.mesh_ndim
        return tuple(
            tuple(letters[entry[position * width + mesh_dim]] for mesh_dim in range(width))
            for position, letters in enumerate(self._letters)
        )
