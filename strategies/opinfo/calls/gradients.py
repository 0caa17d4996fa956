"""Which gradients are wanted of a call: those that torch has, and that are finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from strategies.opinfo.samples.informative import is_finite, is_inexact
from verifier.core.case import OpCase
from verifier.oracle.reference import make_reference
from verifier.torch_internals.names import pytree

__all__ = ["differentiated"]


def differentiated(case: OpCase) -> OpCase:
    """Return the call with gradients wanted of its floating tensors; as it is if torch has none, or no finite one.

    They are wanted of all, or else of those of which there is one if it is wanted of no other: a target and running
    statistics have none, and torch refuses the call, or its gradient, where they are asked for one. What is exact on
    integers may have a gradient that is not, so that the results of such a call are compared within a tolerance.
    """
    leaves = pytree.tree_leaves((case.args, dict(case.kwargs)))
    able = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and is_inexact(leaf)]
    if _has_gradient(wanting := _wanting(case, able)):
        return wanting
    by_themselves = [number for number in able if len(able) > 1 and _has_gradient(_wanting(case, [number]))]
    fewer = (_wanting(case, numbers) for numbers in (by_themselves, by_themselves[:1]) if numbers)
    return next(filter(_has_gradient, fewer), case)


def _has_gradient(case: OpCase) -> bool:
    """Return whether torch has a gradient of what the call gives, and all of that is finite."""
    reference = make_reference(case)
    if reference.raised is not None or not reference.differentiable or not reference.wanted:
        return False
    try:
        gradients = reference.gradients(0)
    except (RuntimeError, NotImplementedError):
        return False
    some = [gradient for gradient in gradients if gradient is not None]
    return bool(some) and all(map(is_finite, (*some, *reference.outputs)))


def _wanting(case: OpCase, numbers: Sequence[int]) -> OpCase:
    """Return the call with gradients wanted of the leaves of its arguments that have these ``numbers``."""
    leaves, spec = pytree.tree_flatten((case.args, dict(case.kwargs)))
    changed = [
        leaf.detach().requires_grad_(number in numbers) if isinstance(leaf, torch.Tensor) else leaf
        for number, leaf in enumerate(leaves)
    ]
    args, kwargs = pytree.tree_unflatten(changed, spec)
    return replace(case, args=args, kwargs=kwargs, exact=False)
