"""The family of lookups in legacy ShardedTensors: the kernels of ``torch.distributed._shard`` for ChunkShardingSpec."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from strategies.sharded_tensor.inputs import OPS, sharded_tensor_cases
from verifier.core.case import OpCase
from verifier.planning.families import DrawContext, ReplicatedFamily

__all__ = ["FAMILY", "ShardedTensorFamily"]


@dataclass(frozen=True)
class ShardedTensorFamily(ReplicatedFamily):
    """The cases of lookups in a ShardedTensor. They are no aten operators, so ``ops`` are names of our own."""

    name: str = "sharded_tensor"
    ops: tuple[str, ...] = OPS
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

    def left_out(self, context: DrawContext) -> tuple[tuple[str, str], ...]:
        """Return ops that cannot be tested: all on simulated ranks, and on several mesh dims those that kill ranks."""
        if context.mesh.backend == "simulated":
            return tuple((op, "a ShardedTensor needs real ranks: torch has no simulation of it") for op in context.ops)
        if context.mesh.ndim > 1:
            return tuple((op, "ranks die of it, as they do on one mesh dim") for op in context.ops if "unequal" in op)
        return ()

    def cases(self, context: DrawContext) -> SearchStrategy[OpCase]:
        """Return a generator of cases; see :func:`strategies.sharded_tensor.inputs.sharded_tensor_cases`."""
        skipped = {op for op, _ in self.left_out(context)}
        ops = tuple(op for op in context.ops if op not in skipped)
        return sharded_tensor_cases(replace(context, ops=ops)) if ops else st.nothing()


FAMILY = ShardedTensorFamily()
