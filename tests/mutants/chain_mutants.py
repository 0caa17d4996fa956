"""Rules that are right in every single call that can be placed, and wrong in a chain; each function registers one.

No tensor can be given a norm's or a mask's partial placement, and no single call writes to what another has returned.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import generate_redistribute_costs, register_op_strategy
from torch.distributed.tensor.placement_types import Placement

aten = torch.ops.aten


def _let_through(op: OpOverload, passes: Callable[[Placement], bool]) -> None:
    """Have ``op`` keep the placements of its tensor for which ``passes`` holds, and replicate all others."""

    def rules(schema: OpSchema) -> OpStrategy:
        given = schema.args_schema[0]
        assert isinstance(given, OpStrategy)
        found = OpStrategy([])
        for spec in given.strategies:
            before = spec.output_spec
            placements = tuple(one if passes(one) else Replicate() for one in before.placements)
            wanted = DTensorSpec(before.mesh, placements, tensor_meta=before.tensor_meta)
            costs = [generate_redistribute_costs(given, wanted)]
            found.strategies.append(OpSpec(DTensorSpec(before.mesh, placements), (wanted,), costs))
        return found

    register_op_strategy([op], RuntimeSchemaInfo(1))(rules)


def norms_negated() -> None:
    """A pending norm stays pending where its sign is turned, which the last root takes back."""
    _let_through(aten.neg.default, lambda placement: type(placement).__name__ == "_NormPartial")


def masks_left_behind() -> None:
    """A masked result stays masked where its rows change places, and its mask does not."""
    _let_through(aten.flip.default, lambda placement: type(placement).__name__ == "_MaskPartial")


def slices_of_copies() -> None:
    """A slice is taken of a replicated copy, to which a write is lost."""
    _let_through(aten.slice.Tensor, lambda placement: False)


def _shards_become(op: OpOverload, reduction: str) -> None:
    """Have the result of shards of a reduction over the first dim wait for ``reduction``."""

    def rules(schema: OpSchema) -> OpStrategy:
        given = schema.args_schema[0]
        assert isinstance(given, OpStrategy)
        mesh = given.strategies[0].output_spec.mesh
        wanted = DTensorSpec(mesh, (Shard(0),), tensor_meta=given.strategies[0].output_spec.tensor_meta)
        costs = [generate_redistribute_costs(given, wanted)]
        return OpStrategy([OpSpec(DTensorSpec(mesh, (Partial(reduction),)), (wanted,), costs)])

    register_op_strategy([op], RuntimeSchemaInfo(1))(rules)


def largest_is_smallest() -> None:
    """The largest elements of shards are taken for parts of a minimum."""
    _shards_become(aten.amax.default, "min")


def norms_are_added() -> None:
    """The norms of shards are added."""
    _shards_become(aten.linalg_vector_norm.default, "sum")
