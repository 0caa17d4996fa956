"""Amendments to torch's handlers, which run in the place of single ops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Replicate, Shard, _tp_conv
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from verifier.torch_internals.amending.propagation import is_torchs
from verifier.torch_internals.placements import Placements

__all__ = ["HandledCall", "as_rules_ask", "borders_returned", "unasked_left_out"]


@dataclass(frozen=True)
class HandledCall:
    """The arguments of a call whose tensors are DTensors, and the placements of these in order."""

    args: tuple[Any, ...]
    placements: tuple[Placements, ...]

    @property
    def on_whole_world(self) -> bool:
        """Whether the mesh has one dim, with every rank of the world in order."""
        first = next(arg for arg in self.args if isinstance(arg, DTensor))
        return first.device_mesh.mesh.tolist() == list(range(dist.get_world_size()))


@contextlib.contextmanager
def as_rules_ask(op: OpOverload, by_prop_rule: Callable[[HandledCall], bool]) -> Iterator[None]:
    """Redistribute the arguments of ``op`` as its rules ask before torch's handler runs, which does not do so.

    Where ``by_prop_rule`` says so, the handler asks the op's prop rule instead of its strategy for one mesh dim, and
    nothing is redistributed. A rule of the user's is never passed over.
    """
    handlers: dict[OpOverload, Any] = DTensor._op_dispatcher._custom_op_handlers
    own: Any = handlers.get(op)
    if not str(getattr(own, "__module__", "")).startswith("torch."):
        yield
        return

    def handle(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        call = HandledCall(args, tuple(arg.placements for arg in args if isinstance(arg, DTensor)))
        if is_torchs(op) and by_prop_rule(call):
            with _prop_rule_alone(op):
                return own(op, args, kwargs)
        return own(op, _redistributed(op, args, kwargs), kwargs)

    handlers[op] = handle
    try:
        yield
    finally:
        handlers[op] = own


@contextlib.contextmanager
def _prop_rule_alone(op: OpOverload) -> Iterator[None]:
    """Let DTensor decide by the prop rule of ``op``, if there is one, and not by its strategy for one mesh dim."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    passed_over = None
    if op in propagator.op_to_rules:
        passed_over = propagator.op_single_dim_strategy_funcs.pop(op, None)
    try:
        yield
    finally:
        if passed_over is not None:
            propagator.op_single_dim_strategy_funcs[op] = passed_over


def _redistributed(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return ``args`` on the placements on which DTensor's rules have the op run."""
    dispatcher: Any = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    dispatcher.sharding_propagator.propagate(info)
    decided = info.output_sharding
    if decided is None or not decided.needs_redistribute:
        return args
    wanted = iter([leaf for leaf in pytree.tree_leaves(decided.redistribute_schema.args_schema) if _is_spec(leaf)])
    return tuple(
        arg.redistribute(arg.device_mesh, _cut_once(next(wanted).placements)) if isinstance(arg, DTensor) else arg
        for arg in args
    )


def _cut_once(placements: Placements) -> Placements:
    """Return ``placements`` with no tensor dim cut by two mesh dims, which handlers refuse that ask for a dim map."""
    cut: set[int] = set()
    made: list[Placement] = []
    for placement in placements:
        again = isinstance(placement, Shard) and placement.dim in cut
        made.append(Replicate() if again else placement)
        cut |= {placement.dim} if isinstance(placement, Shard) else set()
    return tuple(made)


def _is_spec(leaf: object) -> bool:
    return isinstance(leaf, DTensorSpec)


@contextlib.contextmanager
def borders_returned() -> Iterator[None]:
    """Let the gradient of a convolution's input have the sums at the borders that torch works out and drops."""
    module: Any = _tp_conv
    own = module._ring_send_recv_aggregate

    def aggregate(gradient: torch.Tensor, d1: int, d2: int, left: int, right: int, rank: int, size: int) -> object:
        made = own(gradient, d1, d2, left, right, rank, size)
        if made is not None:
            return made
        # it has written the sums into views of what it was given
        first, last = (0 if rank == 0 else d1), (0 if rank == size - 1 else d2)
        return gradient[..., first : gradient.shape[-1] - last]

    module._ring_send_recv_aggregate = aggregate
    try:
        yield
    finally:
        module._ring_send_recv_aggregate = own


@contextlib.contextmanager
def unasked_left_out() -> Iterator[None]:
    """Let DTensor leave out the results of a local kernel that the call has not asked for, as a masked gradient."""
    wrap: Any = OpDispatcher.wrap

    def asked_for(results: Any, specs: Any) -> object:
        if isinstance(results, tuple | list) and isinstance(specs, tuple | list) and len(results) == len(specs):
            pairs = zip(results, specs, strict=True)
            left = [None if spec is None and _has_dims(one) else one for one, spec in pairs]
            results = tuple(left) if isinstance(results, tuple) else left
        return wrap(results, specs)

    with mock.patch.object(OpDispatcher, "wrap", staticmethod(asked_for)):
        yield


def _has_dims(result: object) -> bool:
    return isinstance(result, torch.Tensor) and result.ndim > 0
