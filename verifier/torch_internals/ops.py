"""Overloads, decompositions and definitions of ops."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._decompositions import DecompShardingStrategy

__all__ = [
    "definition_of",
    "has_decomposition",
    "is_composite",
    "registered_overloads",
    "selected_overload",
]


def registered_overloads() -> frozenset[OpOverload]:
    """Return the overloads that DTensor has a rule of its own for, in any of its registries."""
    dispatcher = DTensor._op_dispatcher
    propagator = dispatcher.sharding_propagator
    return frozenset(
        [
            *propagator.op_strategy_funcs,
            *propagator.op_single_dim_strategy_funcs,
            *propagator.op_to_rules,
            *dispatcher._random_ops,
        ]
    )


def selected_overload(op: object, args: Sequence[object], kwargs: Mapping[str, object]) -> OpOverload | None:
    """Return the overload that a call of ``op`` runs: of ``torch.ops.aten.sum``, or of a function made a custom op.

    None if ``op`` is neither, and if the arguments fit no overload.
    """
    if isinstance(op, CustomOpDef):
        return op._opoverload
    if not isinstance(op, OpOverloadPacket):
        return None
    names: list[str] = op.overloads()  # type: ignore[no-untyped-call]
    if len(names) > 1:
        try:
            names = [torch._C._jit_resolve_packet(op._qualified_op_name, *args, **kwargs) or "default"]
        except RuntimeError:  # it says what fits none, which the call itself will do
            return None
    overload: OpOverload = getattr(op, names[0])
    return overload


def definition_of(op: OpOverload) -> Callable[..., object] | str:
    """Return the function that was made a custom op; of an operator of a library, the file that defines it."""
    name = op._schema.name
    if (made := OPDEFS.get(name)) is not None:
        function: Callable[..., object] = made._init_fn
        return function
    found = re.search(r"^debug: registered at (.*):\d+$", torch._C._dispatch_dump(name), re.MULTILINE)
    return found[1] if found else ""


def has_decomposition(op: OpOverload) -> bool:
    """Return whether DTensor can derive the sharding of ``op`` from a decomposition."""
    return bool(DecompShardingStrategy.has_decomp(op))


def is_composite(op: OpOverload) -> bool:
    """Return whether autograd takes ``op`` apart, so that DTensor sees the op itself in inference mode only."""
    name: str = op.name()  # type: ignore[no-untyped-call]
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))
