"""Which combinations to try first: products of the rules that DTensor claims, those seldom tried before all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch.distributed.tensor.placement_types import Placement

from verifier.cases import Combination, MeshSpec, OpCase
from verifier.converter import tensor_arguments
from verifier.placements import Alphabet
from verifier.rules.claims import claimed_rules

__all__ = ["Steering"]

Column = tuple[Placement, ...]
"""What a rule asks of the tensor arguments on one mesh dim."""


class Steering:
    """Steers trials to the rules that DTensor claims of each call.

    What it chooses depends on the cases that it has been shown, in their order, and not on what came of them. So all
    shards of a campaign, and a run that is resumed, choose alike if they show it every case that is drawn.

    Parameters
    ----------
    most
        At most so many combinations are chosen of a case.
    """

    def __init__(self, most: int) -> None:
        self.most = max(1, most)
        self._planned: Counter[tuple[str, str]] = Counter()
        self._claims: dict[tuple[object, ...], Mapping[str, Column]] = {}
        self._announced: set[tuple[str, str]] = set()

    def wanted(self, case: OpCase, mesh: MeshSpec) -> list[Combination]:
        """Return products of claimed rules, those planned least so far first; empty if none can be read."""
        rules = self._rules(case, mesh)
        seldom = sorted(rules, key=lambda text: (self._planned[case.op, text], text))
        wanted: list[Combination] = []
        for number in range(min(len(seldom), self.most)):
            # on each mesh dim one rule: in turn the same on all, its neighbours, and others
            texts = [seldom[(number + dim * (number % 3)) % len(seldom)] for dim in range(mesh.ndim)]
            combination: Combination = tuple(zip(*(rules[text] for text in texts), strict=True))
            if all(Alphabet.legal(placements) for placements in combination):
                wanted.append(combination)
                self._planned.update((case.op, text) for text in texts)
        return wanted

    def news(self, case: OpCase, mesh: MeshSpec) -> tuple[str, ...]:
        """Return the rules that are claimed of the call, if any of them has not been returned before; else nothing."""
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
