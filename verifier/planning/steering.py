"""Chooses among too many combinations: those whose rules or redistributions were planned least often so far.

For an op these are products of the rules that DTensor claims. For a program that redistributes, they are placements
from which its explicit redistributions start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import product

import torch
from torch.distributed.tensor.placement_types import Placement

from verifier.core.arguments import tensor_arguments
from verifier.core.case import MeshSpec, OpCase
from verifier.core.placement_text import format_placements
from verifier.placements.alphabet import Alphabet
from verifier.placements.edges import edges_between, resolved_moves
from verifier.programs import explicit_moves
from verifier.rules.claims import claimed_rules
from verifier.torch_internals.placements import Combination, Placements

__all__ = ["Steering"]

Column = tuple[Placement, ...]
"""The placements that a rule requires of the tensor arguments on one mesh dim."""


class Steering:
    """Steers trials to the rules that DTensor claims of each call, and to edges between placements.

    Its choice depends on the cases that it has been shown, in order, and not on their outcomes. So all shards of a
    campaign, and a resumed run, make the same choice if they show it every case that is drawn.

    Parameters
    ----------
    most
        The most combinations to choose per case.
    """

    def __init__(self, most: int) -> None:
        self.most = max(1, most)
        self._planned: Counter[tuple[str, str]] = Counter()
        self._edges: Counter[tuple[int, str]] = Counter()
        self._claims: dict[tuple[object, ...], Mapping[str, Column]] = {}
        self._announced: set[tuple[str, str]] = set()

    def wanted(self, case: OpCase, mesh: MeshSpec, alphabet: Alphabet | None = None) -> list[Combination]:
        """Return the combinations that have to be tried; empty if nothing distinguishes combinations.

        For a call with explicit redistributions these are combinations of placements in ``alphabet`` from which a
        redistribution takes an edge that was planned least so far. For other calls they are products of claimed rules,
        least-planned first.
        """
        if explicit_moves(case):
            return self._from_least_planned(case, mesh, alphabet or Alphabet())
        rules = self._rules(case, mesh)
        seldom = sorted(rules, key=lambda text: (self._planned[case.op, text], text))
        wanted: list[Combination] = []
        for number in range(min(len(seldom), self.most)):
            # one rule per mesh dim: in turn the same rule on all mesh dims, its neighbours, and other rules
            texts = [seldom[(number + dim * (number % 3)) % len(seldom)] for dim in range(mesh.ndim)]
            combination: Combination = tuple(zip(*(rules[text] for text in texts), strict=True))
            if all(Alphabet.legal(placements) for placements in combination):
                wanted.append(combination)
                self._planned.update((case.op, text) for text in texts)
        return wanted

    def _from_least_planned(self, case: OpCase, mesh: MeshSpec, alphabet: Alphabet) -> list[Combination]:
        """Return combinations, chosen one by one, whose whole redistributions have been planned least often.

        Ties go to combinations with more edges on single mesh dims that are rare so far. Tensors are placed one by one,
        because there are too many combinations of all tensors.
        """
        tensors = tensor_arguments(case.args, case.kwargs)
        choices = [_choices(alphabet, tensor.ndim, tensor.dtype, mesh.ndim) for tensor in tensors]
        targets = [[target for source, target in explicit_moves(case) if source == n] for n in range(len(tensors))]
        wanted: dict[Combination, None] = {}
        for _ in range(min(self.most, max(map(len, choices), default=0))):
            combination: Combination = ()
            for number, options in enumerate(choices):
                need = partial(self._need, mesh, number, targets[number])
                combination = (*combination, min(options, key=need))
            for number, source in enumerate(combination):  # tensors that are not redistributed take turns, too
                self._edges[mesh.ndim, f"{number}: {format_placements(source)}"] += 1
            for source, target in resolved_moves(case, combination):
                self._edges.update((mesh.ndim, edge) for edge in _names(source, target))
            wanted[combination] = None
        return list(wanted)

    def _need(
        self, mesh: MeshSpec, number: int, targets: Sequence[Placements], source: Placements
    ) -> tuple[int, float, int, str]:
        """Sort key that puts the least-planned redistributions of tensor ``number`` from ``source`` first."""
        text = format_placements(source)
        whole, news = 0, 0.0
        for target in targets:
            first, *rest = _names(source, target)
            whole += self._edges[mesh.ndim, first]
            news += sum(1 / (1 + self._edges[mesh.ndim, edge]) for edge in rest)
        return whole, -news, self._edges[mesh.ndim, f"{number}: {text}"], text

    def news(self, case: OpCase, mesh: MeshSpec) -> tuple[str, ...]:
        """Return the rules that DTensor claims of the call if any of them is new; otherwise nothing."""
        rules = {(case.op, text) for text in self._rules(case, mesh)}
        if rules <= self._announced:
            return ()
        self._announced |= rules
        return tuple(sorted(text for _, text in rules))

    def _rules(self, case: OpCase, mesh: MeshSpec) -> Mapping[str, Column]:
        kinds = tuple((tensor.ndim, tensor.dtype) for tensor in tensor_arguments(case.args, case.kwargs))
        key = case.call, kinds, tuple(sorted(case.tags)), mesh.shape[0]
        if key not in self._claims:
            self._claims[key] = claimed_rules(case, mesh.shape[0])
        return self._claims[key]


@lru_cache(maxsize=65536)
def _names(source: Placements, target: Placements) -> tuple[str, ...]:
    """Return the name of a redistribution as a whole, and of its edge on each mesh dim."""
    first, last = format_placements(source), format_placements(target)
    return f"{first} => {last}", *edges_between(first, last)


@lru_cache(maxsize=256)
def _choices(alphabet: Alphabet, ndim: int, dtype: torch.dtype, mesh_ndim: int) -> tuple[Placements, ...]:
    """Return every way to place a tensor of ``ndim`` dims."""
    letters: Sequence[Placement] = alphabet.placements(ndim, dtype)
    return tuple(choice for choice in product(letters, repeat=mesh_ndim) if alphabet.allows(choice))
