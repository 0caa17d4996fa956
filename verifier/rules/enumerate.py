"""Which combinations of input placements are tried."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from verifier.placements.alphabet import Alphabet
from verifier.placements.pairwise import free_choice, sample_pairwise
from verifier.torch_internals.placements import Combination

__all__ = ["Kind", "combinations_in_all", "input_combinations", "product_choices"]

Kind = tuple[int, torch.dtype]
"""Number of dims and dtype of a tensor: what decides how it can be placed."""


@lru_cache(maxsize=4096)
def input_combinations(
    kinds: tuple[Kind, ...], groups: tuple[tuple[int, ...], ...], cap: int
) -> tuple[Combination, ...]:
    """Return the combinations to try of tensors of these kinds, on one mesh dim.

    All of them if they are not more than ``cap``. Else those that people use come first, every tensor placed alike and
    one placed while the others are replicated, and a pairwise cover fills the rest.

    Parameters
    ----------
    groups
        Numbers of tensors that are placed alike, as the elements of a list are; tensors in no group are replicated. A
        tensor that cannot have the placement of its group is replicated.

    >>> [str(c) for c in input_combinations(((0, torch.float64),), ((0,),), 8)][:2]
    ['((Replicate(),),)', '((Partial(sum),),)']
    """
    own = [Alphabet().placements(ndim, dtype) for ndim, dtype in kinds]
    letters = [tuple(dict.fromkeys(p for number in group for p in own[number])) for group in groups]

    def combination(choice: Sequence[Placement]) -> Combination:
        placed: list[Placement] = [Replicate()] * len(kinds)
        for group, placement in zip(groups, choice, strict=True):
            for number in group:
                if placement in own[number]:
                    placed[number] = placement
        return tuple((placement,) for placement in placed)

    if math.prod(len(one) for one in letters) <= cap:
        return tuple(dict.fromkeys(combination(choice) for choice in itertools.product(*letters)))
    chosen: dict[Combination, None] = {}
    for letter in dict.fromkeys(itertools.chain(*letters)):
        fits = [letter in one for one in letters]
        alike: list[Placement] = [letter if fit else Replicate() for fit in fits]
        chosen[combination(alike)] = None
        for number, fit in enumerate(fits):
            if fit:
                chosen[combination([letter if i == number else Replicate() for i in range(len(letters))])] = None
    for entry in sample_pairwise([free_choice(len(one)) for one in letters], cap, seed=0)[0]:
        if len(chosen) >= cap:
            break
        chosen[combination([one[i] for one, i in zip(letters, entry, strict=True)])] = None
    return tuple(chosen)[:cap]


@lru_cache(maxsize=4096)
def combinations_in_all(kinds: tuple[Kind, ...], groups: tuple[tuple[int, ...], ...]) -> int:
    """Return how many different combinations there are of tensors of these kinds, on one mesh dim.

    >>> combinations_in_all(((1, torch.float64), (0, torch.float64)), ((0,), (1,)))
    42
    """
    own = [Alphabet().placements(ndim, dtype) for ndim, dtype in kinds]
    return math.prod(len({letter for number in group for letter in own[number]}) for group in groups)


@lru_cache(maxsize=4096)
def product_choices(rules: int, mesh_ndim: int, cap: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Return which of ``rules`` rules to take on each mesh dim: every choice if they are few, else a pairwise cover.

    With two mesh dims a cover of all pairs would be every choice, so that it is cut to ``cap``; each rule is in it on
    each mesh dim as long as ``cap`` allows.
    """
    return tuple(sample_pairwise([free_choice(rules)] * mesh_ndim, cap, seed)[0]) if rules else ()
