"""The family of explicit redistributions between any placements: alone, in a row, and between ops."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from hypothesis.strategies import SearchStrategy
from torch.distributed.tensor import Partial

from strategies.redistribution.inputs import PLANNERS_OP, REDISTRIBUTE, SEQUENCE_OP, redistribution_cases
from verifier.core.case import MeshSpec, OpCase
from verifier.core.placement_text import BITWISE_REDUCTIONS, REDUCTIONS
from verifier.placements.alphabet import Alphabet
from verifier.planning.families import DrawContext, NarrowFamily
from verifier.programs import targets
from verifier.torch_internals.placements import strides_of

__all__ = ["FAMILY", "RedistributionFamily"]

_REDUCTIONS = (*REDUCTIONS, *BITWISE_REDUCTIONS)


@dataclass(frozen=True)
class RedistributionFamily(NarrowFamily):
    """The cases of ``DTensor.redistribute``, which is no aten operator, so ``ops`` are names of our own."""

    name: str = "redistribution"
    ops: tuple[str, ...] = (REDISTRIBUTE, SEQUENCE_OP, PLANNERS_OP)
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

    def alphabet(self, case: OpCase, mesh: MeshSpec) -> Alphabet:
        """Return the placements that the tensors of ``case`` can begin with.

        A redistribution can also begin with every shard order. It begins with other strided shards only if a target has
        some, because DTensor's planner fails on them and most cases would fail. A sequence with a Partial target begins
        with no other kind of Partial, because DTensor refuses to redistribute from one kind to another. Planners are
        asked about a replica.
        """
        if case.op == PLANNERS_OP:
            return Alphabet(shard=False, partial=())
        flat = [placement for target in targets(case) for placement in target]
        if case.op != REDISTRIBUTE:
            reductions = {placement.reduce_op for placement in flat if isinstance(placement, Partial)}
            return Alphabet(partial=tuple(reductions)) if reductions else Alphabet()
        if "strided shard" in case.tags:
            factors = {2, *(strided[1] for strided in map(strides_of, flat) if strided)}
            return Alphabet(partial=_REDUCTIONS, strided=tuple(sorted(factors)))
        suffixes = [prod(mesh.shape[first:last]) for last in range(2, mesh.ndim + 1) for first in range(1, last)]
        factors = {*suffixes, *mesh.shape[1:]} - {1}
        return Alphabet(partial=_REDUCTIONS, strided=tuple(sorted(factors)), orders_on=mesh.shape)

    def cases(self, context: DrawContext) -> SearchStrategy[OpCase]:
        """Return a generator of cases; see :func:`strategies.redistribution.inputs.redistribution_cases`."""
        return redistribution_cases(context)


FAMILY = RedistributionFamily()
