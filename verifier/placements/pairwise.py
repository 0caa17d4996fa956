"""Samples of combinations that cover pairs early, if there are too many combinations to try all."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache

__all__ = ["Choices", "free_choice", "sample_pairwise"]

_CANDIDATES = 12

Entry = tuple[int, ...]


class Choices:
    """The values that a group of factors can have together: tuples with one number for each factor."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = tuple(entries)
        self.levels = tuple(1 + max(column) for column in zip(*self.entries, strict=True))
        self._having: defaultdict[tuple[tuple[int, int], ...], list[Entry]] = defaultdict(list)
        for entry in self.entries:
            places = list(enumerate(entry))
            for fixed in itertools.chain(((place,) for place in places), itertools.combinations(places, 2)):
                self._having[fixed].append(entry)

    def having(self, *fixed: tuple[int, int]) -> Sequence[Entry]:
        """Return the tuples with the given number at one or two places; ``fixed`` is in order of the places."""
        return self._having.get(fixed, ())


@lru_cache(maxsize=1024)
def free_choice(levels: int) -> Choices:
    """Return the choices of a single factor with this number of levels."""
    return Choices((level,) for level in range(levels))


def sample_pairwise(
    choices: Sequence[Choices], cap: int, seed: int, plain: Sequence[int] | None = None, wanted: Sequence[Entry] = ()
) -> tuple[list[Entry], bool]:
    """Return up to ``cap`` distinct tuples, and whether they cover all pairs of numbers that can occur together.

    A tuple joins one entry of each of ``choices``. A greedy cover of the pairs comes first. Its candidates are twelve
    ``wanted`` tuples and twelve random ones that contain an uncovered pair. The candidate that covers most new pairs is
    taken, a wanted one in a tie. When every pair is covered, the other wanted tuples follow, then random ones. The same
    arguments give the same sample.

    Parameters
    ----------
    plain
        The first ``plain[i]`` numbers of factor i are common; pairs of common numbers are covered first.
    wanted
        Tuples to prefer, in order.

    >>> sample, complete = sample_pairwise([free_choice(3), free_choice(3)], 100, seed=0)
    >>> len(sample), complete
    (9, True)
    """
    if math.prod(len(each.entries) for each in choices) <= cap:
        return [_joined(parts) for parts in itertools.product(*(each.entries for each in choices))], True
    levels = _joined(each.levels for each in choices)
    factors = [(group, place) for group, each in enumerate(choices) for place in range(len(each.levels))]
    rng = random.Random(f"{levels}/{seed}")
    pairs = list(itertools.combinations(range(len(levels)), 2))
    uncovered = {
        (i, a, j, b)
        for i, j in pairs
        for a in range(levels[i])
        for b in range(levels[j])
        if _can_be(choices, factors, (i, a), (j, b))
    }
    queue = sorted(uncovered)
    rng.shuffle(queue)
    common = plain or levels
    queue.sort(key=lambda pair: (pair[1] >= common[pair[0]]) + (pair[3] >= common[pair[2]]), reverse=True)
    waiting = list(dict.fromkeys(wanted))
    chosen: dict[Entry, None] = {}
    while len(chosen) < cap:
        while queue and queue[-1] not in uncovered:
            queue.pop()
        candidates = waiting[:_CANDIDATES]
        for _ in range(_CANDIDATES if queue else 1):
            parts = [rng.choice(each.entries) for each in choices]
            if queue:
                i, a, j, b = queue[-1]
                fixed: dict[int, list[tuple[int, int]]] = {}
                for factor, number in ((i, a), (j, b)):
                    group, place = factors[factor]
                    fixed.setdefault(group, []).append((place, number))
                for group, numbers in fixed.items():
                    options = choices[group].having(*numbers)
                    parts[group] = options[0] if len(options) == 1 else rng.choice(options)
            candidates.append(_joined(parts))
        best: Entry | None = None
        best_gain = -1
        for entry in candidates:
            gain = sum((i, entry[i], j, entry[j]) in uncovered for i, j in pairs) if queue else 0
            if gain > best_gain and entry not in chosen:
                best, best_gain = entry, gain
        if best is None:
            continue
        chosen[best] = None
        if best in waiting:
            waiting.remove(best)
        uncovered.difference_update((i, best[i], j, best[j]) for i, j in pairs)
    return list(chosen), not uncovered


def _can_be(
    choices: Sequence[Choices], factors: Sequence[tuple[int, int]], one: tuple[int, int], other: tuple[int, int]
) -> bool:
    """Return whether tuples contain both numbers, each given as ``(factor, number)``."""
    (group, place), (other_group, other_place) = factors[one[0]], factors[other[0]]
    first, second = (place, one[1]), (other_place, other[1])
    if group == other_group:
        return bool(choices[group].having(first, second))
    return bool(choices[group].having(first) and choices[other_group].having(second))


def _joined(parts: Iterable[Entry]) -> Entry:
    return tuple(itertools.chain.from_iterable(parts))
