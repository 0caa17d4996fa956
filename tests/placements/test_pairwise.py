"""Samples cover pairs early, have what is wanted, and never anything that is not allowed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch

from verifier.core.placement_text import REDUCTIONS
from verifier.placements.alphabet import Alphabet
from verifier.placements.combinations import CombinationSpace
from verifier.placements.pairwise import Choices, free_choice, sample_pairwise

Pair = tuple[int, object, int, object]


def pairs_in(rows: Sequence[Sequence[object]]) -> set[Pair]:
    return {(i, row[i], j, row[j]) for row in rows for i, j in itertools.combinations(range(len(row)), 2)}


def free(*levels: int) -> list[Choices]:
    return [free_choice(level) for level in levels]


@pytest.mark.parametrize("levels", [(8, 7), (8, 8, 8), (8, 7, 6, 3), (5,) * 6])
def test_a_sample_covers_every_pair_when_the_cap_allows(levels: tuple[int, ...]) -> None:
    first, second = sorted(levels)[-2:]
    cap = 3 * first * second
    sample, complete = sample_pairwise(free(*levels), cap, seed=1)
    assert complete
    assert len(sample) == len(set(sample)) == min(cap, math.prod(levels))
    assert pairs_in(sample) == pairs_in(list(itertools.product(*map(range, levels))))


def test_a_sample_covers_pairs_early() -> None:
    every = list(itertools.product(range(8), repeat=4))
    sample, complete = sample_pairwise(free(8, 8, 8, 8), 60, seed=0)
    assert not complete
    assert len(pairs_in(sample)) > 0.75 * 6 * 64 > len(pairs_in(every[:60]))


def test_a_sample_follows_from_its_seed() -> None:
    assert sample_pairwise(free(8, 8, 8), 30, seed=5) == sample_pairwise(free(8, 8, 8), 30, seed=5)
    assert sample_pairwise(free(8, 8, 8), 30, seed=5) != sample_pairwise(free(8, 8, 8), 30, seed=6)


def test_what_is_wanted_is_in_the_cover_where_it_covers_as_much_and_follows_it_where_not() -> None:
    every = pairs_in(list(itertools.product(range(6), repeat=3)))
    plainly, _ = sample_pairwise(free(6, 6, 6), 150, seed=0)
    cover = next(n for n in range(150) if pairs_in(plainly[:n]) == every)
    diagonal = [(n, n, n) for n in range(6)]  # no two of them share a pair
    near = [(n, n, (n + 1) % 6) for n in range(6)]  # each shares one with the diagonal
    sample, complete = sample_pairwise(free(6, 6, 6), 150, seed=0, wanted=[*diagonal, *near, (0, 0, 2)])
    assert complete
    assert sample[:6] == diagonal
    assert {*near, (0, 0, 2)} <= set(sample[: cover + 13])
    assert pairs_in(sample[: cover + 13]) == every
    short, complete = sample_pairwise(free(6, 6, 6), 6, seed=0, wanted=[(0, 0, 0), (0, 0, 0), (0, 0, 1), *diagonal])
    assert not complete
    assert short == diagonal


def test_pairs_that_can_be_are_covered_whatever_cannot() -> None:
    together = Choices((a, b) for a in range(6) for b in range(6) if (a - b) % 3 == 1)
    possible = [(*two, one) for two in together.entries for one in range(5)]
    sample, complete = sample_pairwise([together, free_choice(5)], 59, seed=0)
    assert complete
    assert set(sample) < set(possible)
    assert pairs_in(sample) == pairs_in(possible)


@pytest.mark.parametrize("mesh", [(2, 2), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_placements_of_shard_orders_are_covered_though_few_of_all_are_any(mesh: tuple[int, ...], count: int) -> None:
    tensors = [torch.ones(4, 3, dtype=torch.int64)] * count
    alphabet = Alphabet(partial=("sum", "max"), strided=(2, 4), orders_on=mesh)
    space = CombinationSpace(tensors, len(mesh), alphabet, cap=600)
    one = [c for (c,) in CombinationSpace(tensors[:1], len(mesh), alphabet)]
    width = len(mesh)
    within = pairs_in(one)
    letters = [{row[place] for row in one} for place in range(width)]
    every = within if count == 1 else within | {(i + width, a, j + width, b) for i, a, j, b in within}
    if count == 2:
        every |= {
            (i, a, width + j, b) for i in range(width) for j in range(width) for a in letters[i] for b in letters[j]
        }
    assert pairs_in([[p for placements in combination for p in placements] for combination in space]) == every


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cap", [*range(2, 30, 3), *range(34, 46)])
def test_nothing_that_is_wanted_is_lost(cap: int, seed: int) -> None:
    """At every size around that of the cover, which is 36 or a little more."""
    tensors = [torch.ones(2, 2), torch.ones(2, 2), torch.ones(2)]
    every = list(CombinationSpace(tensors, 1, Alphabet(partial=REDUCTIONS[:3])))
    wanted = every[seed :: len(every) // (cap // 2)][: cap // 2]
    chosen = list(CombinationSpace(tensors, 1, Alphabet(partial=REDUCTIONS[:3]), cap, seed, wanted))
    assert len(chosen) == len(set(chosen)) == cap
    assert set(wanted) <= set(chosen)


def test_more_than_fits_is_cut() -> None:
    tensors = [torch.ones(2, 2), torch.ones(2, 2)]
    every = list(CombinationSpace(tensors, 1))
    assert len(list(CombinationSpace(tensors, 1, cap=5, wanted=every[:9]))) == 5
