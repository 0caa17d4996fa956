"""Remedies for DTensor's entry points: factories, the parallel loss, parallel styles, scaled gradients, equality."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from strategies.remedies.placing import VALUES, shard_dims
from verifier.execution.remedies import Remedy
from verifier.torch_internals.amending.entry_points import (
    absent_classes,
    dims_of_factories_counted,
    factories_without_tracker,
    gradients_of_log_softmax,
    ignored_targets_of_losses,
    infinities_of_all_gradients,
    losses_end,
    losses_of_many_dims,
    styles_keep_frozen,
)
from verifier.torch_internals.amending.propagation import Decision, refused
from verifier.torch_internals.amending.registrations import handled

__all__ = ["REMEDIES"]

_CRASH = frozenset({"CRASH"})
_LOSS = ("composite.parallel_loss",)


def _equal(self: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(*(one.full_tensor() if isinstance(one, DTensor) else one for one in (self, other)))


def _shards_its_result(decision: Decision) -> bool:
    return any(output is not None and bool(shard_dims(output)) for output in decision.outputs)


REMEDIES = (
    Remedy(
        "equality-on-submeshes",
        "reduce the answer of equal over the ranks of the mesh, not over all ranks (_dispatch_fast_path_python_tail in "
        "_dispatch.py)",
        lambda: handled(torch.ops.aten.equal.default, _equal),
        ("composite.submesh", "aten.equal.default"),
    ),
    Remedy(
        "infinities-of-the-first-gradient",
        "reduce found_inf over each mesh dim on which any gradient is not replicated (found_inf_reduce_handler in "
        "_dispatch.py)",
        infinities_of_all_gradients,
        ("composite.scaled_gradients", "aten._amp_foreach_non_finite_check_and_unscale_.default"),
    ),
    Remedy(
        "negative-dims-of-factories",
        "count negative dims of shards from the end in _dtensor_init_helper (_api.py), as distribute_tensor does",
        dims_of_factories_counted,
        ("composite.factory",),
        _CRASH,
    ),
    Remedy(
        "random-factories-without-tracker",
        "draw without a tracker where the device has none, as the dispatch of random ops does, or say that it is not "
        "supported (_dtensor_init_helper in _api.py)",
        factories_without_tracker,
        ("composite.factory",),
        _CRASH,
    ),
    Remedy(
        "identities-of-shards",
        "claim no shards for eye.m_out, whose kernel sizes the local tensor as the whole (_ops/_tensor_ops.py)",
        lambda: refused(("aten.eye.m_out",), _shards_its_result, "is not supported on shards"),
        ("composite.initialiser", "aten.eye.m_out"),
        refuses=True,
    ),
    Remedy(
        "losses-that-do-not-end",
        "restore the handlers in a finally clause, and those that were there before (loss_parallel in "
        "parallel/loss.py)",
        losses_end,
        _LOSS,
    ),
    Remedy(
        "gradients-of-losses-of-images",
        "flatten the target as the scores are flattened in _nll_loss_and_log_softmax_backward (parallel/loss.py)",
        losses_of_many_dims,
        _LOSS,
        VALUES,
    ),
    Remedy(
        "weights-of-ignored-targets",
        "look up the weights of safe_target, not of target, in _nll_loss_and_log_softmax_backward (parallel/loss.py)",
        ignored_targets_of_losses,
        _LOSS,
        _CRASH,
    ),
    Remedy(
        "ranks-without-classes",
        "look up nothing in an empty shard of classes (_nll_loss_forward and its gradient in parallel/loss.py)",
        absent_classes,
        _LOSS,
    ),
    Remedy(
        "gradients-of-parallel-log-softmax",
        "give _log_softmax_backward_data its own gradient in parallel/loss.py, under which that of a loss stays as it "
        "is",
        gradients_of_log_softmax,
        _LOSS,
        VALUES,
    ),
    Remedy(
        "frozen-parameters-of-sequences",
        "pass requires_grad on in SequenceParallel._replicate_module_fn (parallel/style.py)",
        styles_keep_frozen,
        ("composite.parallel_style",),
        VALUES,
    ),
)
