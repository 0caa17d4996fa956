"""Remedies for fully_shard: the gradients that it reduces, and the weights that it gathers."""

from __future__ import annotations

from strategies.remedies.placing import VALUES
from verifier.execution.remedies import Remedy
from verifier.torch_internals.amending.sharding.gradients import (
    deferred_gradients_kept_apart,
    divided_once,
    dtypes_of_frozen_parameters_noted,
    dtypes_of_gradients_kept,
    gathered_parameters_outside_inference,
    gradients_reduced_alike,
    hooks_of_shards_run,
    ungathered_parameters_passed_over,
    waiting_gradients_taken_back,
)
from verifier.torch_internals.amending.sharding.weights import (
    dtypes_renewed,
    empty_gradients_left_out,
    rows_after_the_forward_pass,
    shards_of_fewer_ranks_gathered,
    stale_weights_gathered_again,
    written_weights_kept,
)

__all__ = ["REMEDIES"]

_CRASH = frozenset({"CRASH"})
_CHANGED = ("composite.changed_weights",)


REMEDIES = (
    Remedy(
        "gradients-of-two-dtypes",
        "cast each gradient to reduce_dtype before it is reduced, as those that were added up without a reduction are "
        "(FSDPParam._get_grad_inner_tensor in fsdp/_fully_shard/_fsdp_param.py)",
        gradients_reduced_alike,
        ("composite.fully_sharded", "composite.shared_and_sharded"),
        VALUES | _CRASH,
    ),
    Remedy(
        "gradients-between-all-reduces",
        "reduce-scatter zeros for parameters without a gradient while gradients wait for their all-reduce, or keep "
        "those by parameter (FSDPParamGroup.post_backward in fsdp/_fully_shard/_fsdp_param_group.py)",
        deferred_gradients_kept_apart,
        ("composite.sharded_in_turns",),
        VALUES | _CRASH,
    ),
    Remedy(
        "dtypes-of-frozen-parameters",
        "take the dtypes of all parameters where none wants a gradient yet (FSDPParamGroup._init_mp_dtypes in "
        "fsdp/_fully_shard/_fsdp_param_group.py)",
        dtypes_of_frozen_parameters_noted,
        ("composite.sharded_in_turns",),
        _CRASH,
    ),
    Remedy(
        "parameters-gathered-in-inference",
        "make the tensors of gathered parameters outside of inference mode (FSDPParam.init_all_gather_outputs and "
        "init_unsharded_param in fsdp/_fully_shard/_fsdp_param.py)",
        gathered_parameters_outside_inference,
        ("composite.sharded_in_turns",),
        _CRASH,
    ),
    Remedy(
        "parameters-never-gathered",
        "cast the gradients of those parameters alone that have ever been gathered (to_accumulated_grad_if_needed in "
        "distributed/fsdp/_fully_shard/_fsdp_param.py)",
        ungathered_parameters_passed_over,
        ("composite.sharded_in_turns", "composite.fully_sharded"),
        _CRASH,
    ),
    Remedy(
        "gradients-that-are-not-taken-back",
        "take back gradients that wait for their reduction in zero_grad, too (FSDPModule in "
        "distributed/fsdp/_fully_shard/_fully_shard.py)",
        waiting_gradients_taken_back,
        _CHANGED,
        VALUES,
    ),
    Remedy(
        "gradients-divided-twice",
        "divide a gradient once by the given divisor if one rank has all shards (foreach_reduce and "
        "_get_gradient_divide_factors in distributed/fsdp/_fully_shard/_fsdp_collectives.py)",
        divided_once,
        _CHANGED,
        VALUES,
    ),
    Remedy(
        "hooks-of-sharded-parameters",
        "run the hooks of a sharded parameter, as those after the accumulation of gradients are (foreach_reduce in "
        "distributed/fsdp/_fully_shard/_fsdp_collectives.py)",
        hooks_of_shards_run,
        _CHANGED,
        VALUES,
    ),
    Remedy(
        "dtypes-of-gradients-lost",
        "give the sharded and the gathered parameter the grad_dtype of the parameter "
        "(FSDPParam._init_sharded_param and to_unsharded in distributed/fsdp/_fully_shard/_fsdp_param.py)",
        dtypes_of_gradients_kept,
        _CHANGED,
        VALUES | _CRASH | {"WRONG_DTYPE"},
    ),
    Remedy(
        "weights-written-in-the-forward-pass",
        "copy what was written to a gathered weight to the shards before it is freed (FSDPParam.to_sharded in "
        "distributed/fsdp/_fully_shard/_fsdp_param.py)",
        written_weights_kept,
        _CHANGED,
        VALUES,
    ),
    Remedy(
        "gathered-weights-of-another-dtype",
        "make the tensors into which weights are gathered anew if the weights have another dtype "
        "(FSDPParam.reset_sharded_param in distributed/fsdp/_fully_shard/_fsdp_param.py)",
        dtypes_renewed,
        _CHANGED,
        _CRASH,
    ),
    Remedy(
        "rows-after-the-forward-pass",
        "take the rows of a weight, not of the padded one, for the shards of fewer ranks "
        "(FSDPParam.to_sharded_post_forward in distributed/fsdp/_fully_shard/_fsdp_param.py)",
        rows_after_the_forward_pass,
        _CHANGED,
        VALUES | _CRASH,
    ),
    Remedy(
        "columns-of-fewer-ranks",
        "gather what fewer ranks have sharded along the first dim, along which they have sharded it "
        "(foreach_all_gather_copy_out in distributed/fsdp/_fully_shard/_fsdp_collectives.py)",
        shards_of_fewer_ranks_gathered,
        _CHANGED,
        VALUES | _CRASH,
    ),
    Remedy(
        "gradients-without-elements",
        "leave gradients without elements out of those that are copied together (foreach_reduce_scatter_copy_in in "
        "distributed/fsdp/_fully_shard/_fsdp_collectives.py)",
        empty_gradients_left_out,
        _CHANGED,
        _CRASH,
    ),
    Remedy(
        "weights-gathered-before-a-step",
        "gather weights again before a forward pass if their shards have changed, or shard them after a forward pass "
        "without gradients (FSDPParamGroup.pre_forward in distributed/fsdp/_fully_shard/_fsdp_param_group.py)",
        stale_weights_gathered_again,
        _CHANGED,
        VALUES,
    ),
)
