"""The caller's generators of random numbers, where DTensor has no tracker of its own."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, _random

from verifier.torch_internals.amending.registrations import layered

__all__ = ["generators_heeded"]


def generators_heeded() -> contextlib.AbstractContextManager[None]:
    """Let a random op draw from the generator that it is given, also on a device for which there is no tracker."""

    def heeding(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        given = kwargs.get("generator")
        if given is None or given.device.type != "cpu" or _random._rng_tracker is not None:
            return op(*args, **kwargs)
        default = torch.default_generator
        state = default.get_state()
        default.set_state(given.get_state())
        try:
            return op(*args, **{name: value for name, value in kwargs.items() if name != "generator"})
        finally:
            given.set_state(default.get_state())
            default.set_state(state)

    return layered(DTensor._op_dispatcher._random_ops, heeding)
