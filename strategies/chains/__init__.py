"""The family of chains: what takes pending and masked results, and composite functions as they are called."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from hypothesis.strategies import SearchStrategy

from strategies.chains.building import STRIDED
from strategies.chains.inputs import OPS, chain_cases
from verifier.core.case import MeshSpec, OpCase
from verifier.placements.alphabet import Alphabet
from verifier.planning.families import DrawContext, NarrowFamily

__all__ = ["FAMILY", "ChainFamily"]


@dataclass(frozen=True)
class ChainFamily(NarrowFamily):
    """The cases of several ops in a row. An op is the name of a producer or of a composite function, both our own."""

    name: str = "chains"
    ops: tuple[str, ...] = OPS
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32)

    def budget(self, examples: int, combinations: int) -> tuple[int, int]:
        """Return twice as many cases as others try, and a seventh of the combinations: there are many pairs of ops."""
        return 2 * examples, max(2, combinations // 7)

    def cases(self, context: DrawContext) -> SearchStrategy[OpCase]:
        """Return a generator of cases; see :func:`strategies.chains.inputs.chain_cases`."""
        return chain_cases(context)

    def alphabet(self, case: OpCase, mesh: MeshSpec) -> Alphabet:
        """Return the usual placements; for some chains also strided shards, on several mesh dims in any shard order."""
        if STRIDED not in case.tags:
            return Alphabet()
        if mesh.ndim == 1:
            return Alphabet(partial=("sum",), strided=(2,))
        factors = {prod(mesh.shape[first:last]) for last in range(2, mesh.ndim + 1) for first in range(1, last)}
        return Alphabet(partial=("sum",), strided=tuple(sorted(factors - {1})), orders_on=mesh.shape)


FAMILY = ChainFamily()
