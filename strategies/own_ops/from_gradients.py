"""Calls of an op of one's own that run in the gradients of others, of which examples were declared."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import torch

from strategies.opinfo.calls.call import REFUSALS, Call, quiet
from strategies.opinfo.calls.capture import run_backward
from strategies.opinfo.calls.running import copied
from verifier.torch_internals.names import OpOverload
from verifier.torch_internals.opinfo import capture_calls

__all__ = ["OfGradient", "calls_in_gradients"]

_LARGEST = 1 << 16
"""Calls with a tensor of more elements are not taken."""


@dataclass(frozen=True)
class OfGradient:
    """A call that runs in the gradient of ``other``, the name of an overload."""

    call: Call
    other: str


def calls_in_gradients(op: OpOverload, calls: Iterable[Call]) -> list[OfGradient]:
    """Return the calls of ``op`` that run in the backward pass of ``calls``, one for each signature."""
    found: dict[str, OfGradient] = {}
    for call in calls:
        with quiet(), torch.enable_grad(), suppress(*REFUSALS):
            leaves = [
                leaf.detach().requires_grad_(leaf.is_floating_point() or leaf.is_complex())
                if isinstance(leaf, torch.Tensor) else leaf
                for leaf in copied(call).leaves
            ]  # fmt: skip
            differentiable = call.with_leaves(leaves)
            result = call.op(*differentiable.args, **differentiable.kwargs)
            with capture_calls(lambda one: one is op, _LARGEST) as captured:
                run_backward(result)
            for of, args, kwargs in captured:
                one = Call(of, args, kwargs)
                found.setdefault(one.signature(), OfGradient(one, str(call.op)))
    return list(found.values())
