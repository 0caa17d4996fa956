"""True rules of some ops, written from what the ops mean, and the ways of telling DTensor of rules.

A strategy is a function of the arguments of a call, in which a tensor is something with a shape. It returns rules for
one mesh dim, each the placements of the results and then those of the tensor arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, OutputSharding
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy
from torch.distributed.tensor._ops.utils import (
    expand_to_full_mesh_op_strategy,
    register_op_strategy,
    register_prop_rule,
)
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

Rule = list[Placement | None]
"""None is the place of a result that is not asked for."""

Strategy = Callable[..., list[Rule]]

R = Replicate()
SUM, AVG, MAX, MIN = Partial(), Partial("avg"), Partial("max"), Partial("min")


class Meta(Protocol):
    """What a strategy sees of a tensor."""

    @property
    def shape(self) -> torch.Size: ...


def dims(tensor: Meta) -> range:
    return range(len(tensor.shape))


def tensors_among(args: Sequence[Any]) -> list[Meta]:
    return [arg for arg in args if hasattr(arg, "shape")]


def from_start(dim: int, tensor: Meta) -> int:
    return dim % max(1, len(tensor.shape))


def alike(count: int, over: Sequence[int]) -> list[Rule]:
    """Return the rules that cut ``count`` tensors in the same dim, each of ``over``."""
    return [[R] * count, *([Shard(dim)] * count for dim in over)]


# --------------------------------------------------------------------------------------------------- element by element
def pointwise(*args: Any, **kwargs: Any) -> list[Rule]:
    """Return the rules of an op that is applied to each element, with broadcasting; ``out`` is placed as the result."""
    tensors = tensors_among(args)
    ndim = max(len(tensor.shape) for tensor in tensors)
    rules: list[Rule] = [[R] * (1 + len(tensors))]
    for dim in range(ndim):
        inputs: Rule = []
        for tensor in tensors:
            own = dim - ndim + len(tensor.shape)
            inputs.append(Shard(own) if own >= 0 and tensor.shape[own] != 1 else R)
        if any(placement != R for placement in inputs):
            rules.append([Shard(dim), *inputs])
    return [[*rule, rule[0]] for rule in rules] if "out" in kwargs else rules


# ----------------------------------------------------------------------------------------------------------- reductions
def reduced_dims(tensor: Meta, dim: Sequence[int] | int | None) -> set[int]:
    given = (dim,) if isinstance(dim, int) else dim
    return {from_start(each, tensor) for each in given} if given else set(dims(tensor))


def reduction(results: int = 1, across: Placement | None = None) -> Strategy:
    """Return the rules of a reduction over ``dim``; over a dim that is cut, the results are placed ``across``."""

    def rules(
        tensor: Meta, dim: Sequence[int] | int | None = None, keepdim: bool = False, **options: object
    ) -> list[Rule]:
        gone, keep = reduced_dims(tensor, dim), bool(options.get("keepdim", keepdim))
        made: list[Rule] = [[R] * (results + 1)]
        for kept in dims(tensor):
            if kept not in gone:
                made.append([Shard(kept if keep else kept - sum(d < kept for d in gone))] * results + [Shard(kept)])
            elif across is not None:
                made.append([across] * results + [Shard(kept)])
        return made

    return rules


def along(results: int, position: int = 1, default: int = -1) -> Strategy:
    """Return the rules of an op that needs whole lines of all its tensors, along the dim at ``position``.

    Dims in which the tensors differ in size are left alone: their shards begin at different places.
    """

    def rules(*args: Any, **_: object) -> list[Rule]:
        first, *others = tensors = tensors_among(args)
        own = from_start(args[position] if len(args) > position else default, first)
        same = [d for d in dims(first) if d != own and all(other.shape[d] == first.shape[d] for other in others)]
        return alike(results + len(tensors), same)

    return rules


# ----------------------------------------------------------------------------------------------------------- single ops
def mm(left: Meta, right: Meta) -> list[Rule]:
    return [[R, R, R], [Shard(0), Shard(0), R], [Shard(1), R, Shard(1)], [SUM, Shard(1), Shard(0)]]


def transposed(tensor: Meta, first: int, second: int) -> list[Rule]:
    swapped = {from_start(first, tensor): from_start(second, tensor)}
    swapped |= {to: dim for dim, to in swapped.items()}
    return [[R, R], *([Shard(swapped.get(dim, dim)), Shard(dim)] for dim in dims(tensor))]


def flipped(tensor: Meta, over: Sequence[int]) -> list[Rule]:
    gone = reduced_dims(tensor, over)
    return alike(2, [dim for dim in dims(tensor) if dim not in gone])


def embedding(weight: Meta, indices: Meta, *_: object) -> list[Rule]:
    last = len(indices.shape)
    return [[R, R, R], [Shard(last), Shard(1), R], *([Shard(dim), R, Shard(dim)] for dim in dims(indices))]


def embedding_gradient(
    gradient: Meta, indices: Meta, rows: int, padding: int, scale_by_frequency: bool, *_: object
) -> list[Rule]:
    """Cut in the columns, or in the batch; but frequencies cannot be counted in a part of the batch."""
    last = len(indices.shape)
    batch: list[Rule] = [] if scale_by_frequency else [[SUM, Shard(d), Shard(d)] for d in dims(indices)]
    return [[R, R, R], [Shard(1), Shard(last), R], [SUM, SUM, R], *batch]


def layer_norm(
    tensor: Meta, normalized: Sequence[int], weight: object, bias: object, _: object, results: Rule | None = None
) -> list[Rule]:
    """Cut in the dims that are not normalised; ``results`` is where their three results are, all like the tensor."""
    whole: Rule = [R for each in (weight, bias) if each is not None]
    free = range(len(tensor.shape) - len(normalized))
    return [[R] * 4 + whole, *((results or [Shard(dim)] * 3) + [Shard(dim), *whole] for dim in free)]


def layer_norm_gradient(
    gradient: Meta, tensor: Meta, normalized: Sequence[int], mean: Meta, rstd: Meta, weight: object, bias: object,
    mask: Sequence[bool], parameters: Placement = SUM,
) -> list[Rule]:  # fmt: skip
    """As :func:`layer_norm`; every rank adds its part to the gradients of the ``parameters``."""
    whole: Rule = [R for each in (weight, bias) if each is not None]
    free = range(len(tensor.shape) - len(normalized))

    def rule(tensors: Placement, parameters: Placement) -> Rule:
        results = zip((tensors, parameters, parameters), mask, strict=True)
        return [placement if wanted else None for placement, wanted in results] + [tensors] * 4 + whole

    return [rule(R, R), *(rule(Shard(dim), parameters) for dim in free)]


def selected(tensor: Meta, dim: int, index: Meta) -> list[Rule]:
    """Return the rules of ``index_select``."""
    own = from_start(dim, tensor)
    rest = [other for other in dims(tensor) if other != own]
    by_index: list[Rule] = [[Shard(own), R, Shard(0)]] if dims(tensor) else []
    return [[R, R, R], *by_index, *([Shard(other), Shard(other), R] for other in rest)]


def concatenated(tensors: Sequence[Meta], dim: int = 0) -> list[Rule]:
    own = from_start(dim, tensors[0])
    return alike(1 + len(tensors), [other for other in dims(tensors[0]) if other != own])


# -------------------------------------------------------------------------------------------------- ways of registering
Register = Callable[[Any, Strategy], None]
"""Tells DTensor of the rules of an op."""


def per_mesh_dim(op: Any, rules: Strategy) -> None:
    """Register as most of torch's own are; shards may be uneven."""
    register_single_dim_strategy(op, allow_uneven_sharding=True)(lambda op, args, kwargs: rules(*args, **kwargs))


def publicly(op: Any, rules: Strategy) -> None:
    """Register by torch's public function, with None in the place of what is no tensor; for ops with one result."""

    def acceptable(*args: Any) -> Sequence[object]:
        made = []
        for result, *inputs in rules(*args):
            placements = iter(inputs)
            made.append(([result], [next(placements) if hasattr(arg, "shape") else None for arg in args]))
        return made

    register_sharding(op)(acceptable)


def for_whole_meshes(results: Callable[[tuple[Placement, ...]], tuple[Placement, ...]]) -> Register:
    """Return a way to register an op strategy, one that sees the whole mesh.

    ``results`` changes where the only result of a rule is placed, all mesh dims at once.
    """

    def register(op: Any, rules: Strategy) -> None:
        def strategy(schema: OpSchema) -> OpStrategy:
            metas = [
                arg.strategies[0].output_spec if isinstance(arg, OpStrategy) else arg for arg in schema.args_schema
            ]
            made = expand_to_full_mesh_op_strategy(schema.get_mesh_from_args(), schema, rules(*metas))
            for one in made.strategies:
                placed = results(one.output_spec.placements)
                one.output_specs = DTensorSpec(one.output_spec.mesh, placed)
            return made

        register_op_strategy(op)(strategy)

    return register


def as_propagation(op: Any, rules: Strategy) -> None:
    """Register in the oldest way: a function of the call's placements that may ask for others; for one result."""

    def propagate(schema: OpSchema) -> OutputSharding:
        specs = schema.args_spec
        known = {tuple(inputs): result for result, *inputs in rules(*schema.args_schema)}
        found = [known.get(inputs) for inputs in zip(*(spec.placements for spec in specs), strict=True)]
        mesh = specs[0].mesh
        if None not in found:
            return OutputSharding(DTensorSpec(mesh, tuple(found)))
        whole = [DTensorSpec(mesh, (R,) * mesh.ndim, tensor_meta=spec.tensor_meta) for spec in specs]
        tensors = iter(whole)
        args = tuple(next(tensors) if isinstance(arg, DTensorSpec) else arg for arg in schema.args_schema)
        return OutputSharding(None, OpSchema(schema.op, args, schema.kwargs_schema))

    register_prop_rule(op)(propagate)
