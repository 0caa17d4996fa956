"""The placements that are tried on each mesh dim."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from verifier.core.placement_text import BITWISE_REDUCTIONS, REDUCTIONS
from verifier.placements.algebra import is_shard_order
from verifier.placements.partials import bitwise_reductions, partial_reductions
from verifier.torch_internals.placements import Placements, strided_shard, strides_of

__all__ = [
    "Alphabet",
]


@dataclass(frozen=True)
class Alphabet:
    """Which placements to try: a policy for enumeration.

    Parameters
    ----------
    shard
        Try Shard of every tensor dim, even if it does not divide evenly.
    partial
        The reductions to try, where the dtype allows them.
    strided
        Split factors with which to try a strided shard of every tensor dim.
    orders_on
        If not empty, the shape of a mesh on which strided shards must be a shard order, see :func:`is_shard_order`.
    """

    shard: bool = True
    partial: tuple[str, ...] = REDUCTIONS
    strided: tuple[int, ...] = ()
    orders_on: tuple[int, ...] = ()

    def placements(self, ndim: int, dtype: torch.dtype) -> tuple[Placement, ...]:
        """Return the placements on one mesh dim that a tensor of ``ndim`` dims can have.

        >>> Alphabet().placements(2, torch.int64)
        (Replicate(), Shard(dim=0), Shard(dim=1), Partial(sum), Partial(product), Partial(min), Partial(max))
        """
        shards: list[Placement] = [Shard(dim) for dim in range(ndim)] if self.shard else []
        shards += [strided_shard(dim, factor) for factor in self.strided for dim in range(ndim)]
        allowed = (*partial_reductions(dtype), *bitwise_reductions(dtype))
        return (Replicate(), *shards, *(Partial(r) for r in allowed if r in self.partial))

    @staticmethod
    def admits(placement: Placement, ndim: int, dtype: torch.dtype) -> bool:
        """Return whether a tensor of ``ndim`` dims can have ``placement`` on one mesh dim, under any policy.

        >>> Alphabet.admits(Shard(1), 1, torch.int64), Alphabet.admits(strided_shard(0, 3), 1, torch.int64)
        (False, True)
        """
        strided = strides_of(placement)
        if strided is not None:
            return strided[0] < ndim
        if placement == Partial("sum") and dtype == torch.bool:
            return True
        everything = Alphabet(partial=(*REDUCTIONS, *BITWISE_REDUCTIONS))
        return placement in everything.placements(ndim, dtype)

    def allows(self, placements: Placements) -> bool:
        """Return whether one tensor can have these ``placements``, one on each mesh dim."""
        return self.legal(placements) and (not self.orders_on or is_shard_order(placements, self.orders_on))

    @staticmethod
    def legal(placements: Placements) -> bool:
        """Return False for mixed reductions: their order is not defined. DTensor refuses all but sum with avg."""
        reductions = {placement.reduce_op for placement in placements if isinstance(placement, Partial)}
        return len(reductions) <= 1 or reductions == {"sum", "avg"}
