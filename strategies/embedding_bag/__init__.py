"""The family of ``aten._embedding_bag`` and its gradients: lookups of rows, pooled by bags."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis.strategies import SearchStrategy

from strategies.embedding_bag.inputs import FORWARD_ONLY, TRAINED, bag_cases
from verifier.core.case import OpCase
from verifier.planning.families import DrawContext, NarrowFamily

__all__ = ["FAMILY", "EmbeddingBagFamily"]


@dataclass(frozen=True)
class EmbeddingBagFamily(NarrowFamily):
    """The cases of ``aten._embedding_bag.default`` and ``aten._embedding_bag_forward_only.default``."""

    name: str = "embedding_bag"
    ops: tuple[str, ...] = (TRAINED, FORWARD_ONLY)
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

    @property
    def broad(self) -> bool:
        """Return True: an op is drawn only if a pattern names it, because DTensor alone refuses all of them."""
        return True

    def cases(self, context: DrawContext) -> SearchStrategy[OpCase]:
        """Return a generator of cases; see :func:`strategies.embedding_bag.inputs.bag_cases`."""
        return bag_cases(context)


FAMILY = EmbeddingBagFamily()
