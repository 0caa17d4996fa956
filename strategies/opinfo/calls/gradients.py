"""Chooses the gradients that a call requires: those that torch has and that are finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from strategies.opinfo.samples.informative import is_finite, is_inexact
from verifier.core.case import OpCase
from verifier.oracle.reference import make_reference
from verifier.torch_internals.names import pytree

__all__ = ["differentiated", "requiring"]


def differentiated(case: OpCase) -> OpCase:
    """Return the call with floating tensors that require a gradient, or unchanged if torch has no finite gradient.

    If torch refuses gradients for all floating tensors together, each tensor is tried alone: a target and running
    statistics have no gradient, and torch refuses the call or its backward if they require one. A call that is exact on
    integers may have an inexact gradient, so its results are compared within a tolerance.
    """
    leaves = pytree.tree_leaves((case.args, dict(case.kwargs)))
    able = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and is_inexact(leaf)]
    if _has_gradient(every := requiring(case, able)):
        return every
    alone = [number for number in able if len(able) > 1 and _has_gradient(requiring(case, [number]))]
    fewer = (requiring(case, numbers) for numbers in (alone, alone[:1]) if numbers)
    return next(filter(_has_gradient, fewer), case)


def _has_gradient(case: OpCase) -> bool:
    """Return whether torch has a gradient of the call's results, and all of it is finite."""
    reference = make_reference(case)
    if reference.raised is not None or not reference.differentiable or not reference.wanted:
        return False
    try:
        gradients = reference.gradients(0)
    except (RuntimeError, NotImplementedError):
        return False
    some = [gradient for gradient in gradients if gradient is not None]
    return bool(some) and all(map(is_finite, (*some, *reference.outputs)))


def requiring(case: OpCase, numbers: Sequence[int]) -> OpCase:
    """Return the call with gradients required for the leaves of its arguments at ``numbers``."""
    leaves, spec = pytree.tree_flatten((case.args, dict(case.kwargs)))
    changed = [
        leaf.detach().requires_grad_(number in numbers) if isinstance(leaf, torch.Tensor) else leaf
        for number, leaf in enumerate(leaves)
    ]
    args, kwargs = pytree.tree_unflatten(changed, spec)
    return replace(case, args=args, kwargs=kwargs, exact=False)
