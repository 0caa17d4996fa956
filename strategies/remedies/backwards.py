"""Remedies for backward passes that DTensor refuses although it has accepted the forward one."""

from __future__ import annotations

from strategies.remedies.placing import VALUES
from verifier.execution.remedies import Remedy
from verifier.torch_internals.amending.backwards import (
    cotangents_of_averages,
    gradients_of_group_norms,
    gradients_without_strategies,
    penalties_through_from_local,
    pending_gradients_reduced,
    plain_tensors_taken,
    views_of_gradients_reshard,
)

__all__ = ["REMEDIES"]

_CRASH = frozenset({"CRASH"})

REMEDIES = (
    Remedy(
        "plain-tensors-of-gradients",
        "take a plain tensor that a formula of autograd has made for a replicated one, or make a DTensor there "
        "(FunctionsManual.cpp)",
        plain_tensors_taken,
        verdicts=_CRASH,
    ),
    Remedy(
        "views-of-gradients",
        "redistribute a gradient before a view that DTensor refuses: who trains a model cannot do it there "
        "(_ops/_view_ops.py)",
        views_of_gradients_reshard,
        verdicts=_CRASH,
    ),
    Remedy(
        "pending-gradients-written-to",
        "reduce a gradient before a formula of autograd writes to it, if there is no rule for its placements "
        "(_ops/utils.py)",
        pending_gradients_reduced,
        verdicts=_CRASH,
    ),
    Remedy(
        "gradients-without-strategies",
        "register a strategy for the op that computes the gradient, where the op itself has one (_ops)",
        gradients_without_strategies,
        verdicts=_CRASH,
        refuses=True,
    ),
    Remedy(
        "gradients-of-group-norms",
        "register a strategy for native_group_norm_backward, with its sizes adjusted as those of native_group_norm are "
        "(_ops/_math_ops.py)",
        gradients_of_group_norms,
        ("aten.native_group_norm*", "composite.normalised"),
        _CRASH,
    ),
    Remedy(
        "cotangents-of-averages",
        "replicate a cotangent that is pending in another way than the input was (_redistribute_backward in "
        "_redistribute.py)",
        cotangents_of_averages,
        verdicts=_CRASH,
    ),
    Remedy(
        "penalties-through-from-local",
        "redistribute the gradient by an op that is differentiable in _FromTorchTensor.backward (_api.py), as the "
        "backward of redistribute does",
        penalties_through_from_local,
        ("composite.gradient_penalty",),
        VALUES | _CRASH,
    ),
)
