"""Remedies for DTensor's entry points: factories, the parallel loss, parallel styles, scaled gradients, equality."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from strategies.remedies.placing import VALUES, shard_dims
from verifier.execution.remedies import Remedy
from verifier.placements.algebra import shard_indices
from verifier.torch_internals.amending.buffers import (
    outputs_resized,
    outputs_shared,
    sequences_counted,
    sequences_in_front_restored,
    views_of_sequences_kept,
)
from verifier.torch_internals.amending.distributing import (
    norms_of_several_meshes,
    orders_in_memory_kept,
    orders_of_arguments_kept,
    strided_shards_scattered,
)
from verifier.torch_internals.amending.entry_points import (
    callers_tensors_kept,
    copies_of_views,
    data_exchanged,
    dims_of_factories_counted,
    factories_without_tracker,
    fresh_tensors_returned,
    gradients_of_gather_dense,
    implicit_replication_lasts,
    infinities_of_all_gradients,
    parts_differentiated,
    plain_results_refused,
    splits_read_indices,
    styles_keep_frozen,
    styles_of_nested_modules,
    ties_kept,
    tuples_of_one_kept,
    unsorted_meshes_refused,
)
from verifier.torch_internals.amending.handing_over import (
    chunks_of_strided_shards,
    memory_of_locals,
    meshes_kept,
    scalars_formatted,
    unfinished_results_awaited,
)
from verifier.torch_internals.amending.inference import composites_decomposed, views_count_versions
from verifier.torch_internals.amending.losses import (
    absent_classes,
    gradients_of_log_softmax,
    ignored_targets_of_losses,
    losses_end,
    losses_of_many_dims,
)
from verifier.torch_internals.amending.parallelism import (
    checks_ask_the_mesh,
    dims_of_gradients_counted,
    own_tensors_kept,
    saved_sizes_kept,
    sources_passed_on,
)
from verifier.torch_internals.amending.propagation import Decision, refused
from verifier.torch_internals.amending.registrations import generators_heeded, handled

__all__ = ["REMEDIES"]

_CRASH = frozenset({"CRASH"})
_LOSS = ("composite.parallel_loss",)


def _equal(self: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(*(one.full_tensor() if isinstance(one, DTensor) else one for one in (self, other)))


def _shards_its_result(decision: Decision) -> bool:
    return any(output is not None and bool(shard_dims(output)) for output in decision.outputs)


REMEDIES = (
    Remedy(
        "plain-tensors-written-to",
        "refuse a call that writes to plain tensors alone, also to one of a single element, which is taken for a "
        "replica (OpDispatcher._unwrap_to_op_info_impl in _dispatch.py)",
        plain_results_refused,
        ("composite.written_to_plain",),
        VALUES | {"CRASH"},
        refuses=True,
    ),
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
        "look up nothing in an empty shard of classes (_nll_loss_forward and its gradient in parallel/loss.py), and "
        "take part in the maximum of _log_softmax there, for which the other ranks wait",
        absent_classes,
        _LOSS,
    ),
    Remedy(
        "gradients-of-parallel-log-softmax",
        "give _log_softmax_backward_data and nll_loss_backward their own gradients in parallel/loss.py, which autograd "
        "then differentiates again",
        gradients_of_log_softmax,
        (*_LOSS, "composite.second_gradients_in_parallel"),
        VALUES,
    ),
    Remedy(
        "frozen-parameters-of-sequences",
        "pass requires_grad on in SequenceParallel._replicate_module_fn (parallel/style.py)",
        styles_keep_frozen,
        ("composite.parallel_style",),
        VALUES,
    ),
    Remedy(
        "styles-of-nested-modules",
        "replicate or shard a module's own parameters alone in SequenceParallel._replicate_module_fn and in "
        "_partition_linear_fn and _partition_embedding_fn of other styles (parallel/style.py), which distribute_module "
        "calls for each child as well",
        styles_of_nested_modules,
        ("composite.parallel_style",),
        _CRASH,
    ),
    Remedy(
        "ties-that-come-apart",
        "give modules that share a parameter the same DTensor (parallelize_module in parallel/api.py, and "
        "distribute_module in _api.py)",
        ties_kept,
        ("composite.parallel_style", "composite.distributed_module"),
        VALUES,
    ),
    Remedy(
        "tuples-of-one-output",
        "return a tuple where the module does, also of one output (PrepareModuleOutput._prepare_out_fn in "
        "parallel/style.py)",
        tuples_of_one_kept,
        ("composite.prepared_output",),
    ),
    Remedy(
        "implicit-replication-that-ends",
        "restore what was allowed before at the end of implicit_replication (experimental/__init__.py)",
        implicit_replication_lasts,
        ("composite.implicit_replication",),
        _CRASH,
    ),
    Remedy(
        "data-that-stay",
        "exchange the local tensor and the spec where the data of a DTensor are set, or refuse (_api.py)",
        data_exchanged,
        ("composite.data",),
    ),
    Remedy(  # before the next one, whose ops it decomposes
        "composites-in-inference-mode",
        "run the kernel that decomposes a composite op without a rule, instead of deriving a rule for the whole op "
        "from its decomposition (DecompShardingStrategy in _decompositions.py)",
        composites_decomposed,
        ("composite.inference", "aten.*"),
        refuses=True,  # as one of the ops that it consists of
    ),
    Remedy(
        "views-in-inference-mode",
        "make the results of views of a DTensor from outside inference mode tensors that count versions, as those of "
        "plain tensors are (_dispatch.py)",
        views_count_versions,
        ("composite.inference", "aten.*"),
        _CRASH,
    ),
    Remedy(
        "fresh-tensors-that-are-others",
        "return the DTensor itself from lift_fresh, or another that autograd knows for a view (the dispatch of "
        "DTensor, and derivatives.yaml of autograd)",
        fresh_tensors_returned,
        ("aten.lift_fresh.default",),
        VALUES,
    ),
    Remedy(
        "sparse-gradients-of-gather",
        "take the dense formula in gather_backward where a tensor is a subclass, which no sparse tensor is made of "
        "(derivatives.yaml of autograd)",
        gradients_of_gather_dense,
        ("aten.gather.default",),
        _CRASH,
    ),
    Remedy(
        "copies-of-views",
        "clone a DTensor in Tensor.__deepcopy__ and __reduce_ex__ (_tensor.py), whose data no pointer reaches, also if "
        "it begins behind its storage: its data_ptr is its offset, not 0",
        copies_of_views,
        ("composite.copied", "composite.stored"),
        _CRASH,
    ),
    Remedy(
        "callers-tensors-overwritten",
        "broadcast a copy of the tensor that the caller has given (_FromTorchTensor.forward in _api.py, and "
        "Replicate._make_replicate_tensor in placement_types.py)",
        callers_tensors_kept,
        ("composite.taken",),
        VALUES,
    ),
    Remedy(
        "gradients-of-averaged-parts",
        "divide the gradient of local tensors of P(avg) by the ranks, and refuse that of other reductions than a sum "
        "(_FromTorchTensor.backward in _api.py)",
        parts_differentiated,
        ("composite.unwrapped",),
        VALUES,
        refuses=True,
    ),
    Remedy(
        "indices-of-tensor-split",
        "read the indices of tensor_split through an op that DTensor dispatches: the composite kernel takes the data "
        "pointer of the wrapper, which has none (tensor_split in ATen/native/TensorShape.cpp)",
        splits_read_indices,
        ("composite.split_where", "aten.tensor_split.*"),
        _CRASH,
    ),
    Remedy(
        "ranks-that-do-not-ascend",
        "refuse a mesh whose ranks do not ascend, or make its groups in the order of the mesh (device_mesh.py): "
        "new_group sorts ranks, so that collectives give a rank the shard of another",
        unsorted_meshes_refused,
        ("composite.reordered_mesh",),
        refuses=True,
    ),
    Remedy(
        "strided-shards-that-are-uneven",
        "pad the pieces of an uneven strided shard to one size before they are scattered (_StridedShard._shard_tensor "
        "in placement_types.py), as Shard does",
        strided_shards_scattered,
        ("composite.distributed",),
        _CRASH,
    ),
    Remedy(
        "norms-of-several-meshes",
        "reduce the norms of gradients before they are stacked, if these are on different meshes, and scale by a "
        "number (_get_total_norm and _clip_grads_with_norm_ in nn/utils/clip_grad.py)",
        norms_of_several_meshes,
        ("composite.two_meshes",),
        _CRASH,
    ),
    Remedy(
        "unfinished-results-stored",
        "wait for the collective when an AsyncCollectiveTensor is copied or pickled (__deepcopy__ and __reduce_ex__ in "
        "_functional_collectives.py)",
        unfinished_results_awaited,
        ("composite.stored",),
        VALUES | {"CRASH"},
    ),
    Remedy(
        "memory-of-wrappers",
        "share the local tensor's memory in share_memory_, take scalars in lists for numbers in torch.tensor, and "
        "refuse apply_ and from_dlpack, instead of reading the memory of a DTensor, which has none",
        memory_of_locals,
        ("composite.handed_over",),
        frozenset({"CRASH", "DIED", "HANG", "RANKS_DISAGREE"}) | VALUES,
        refuses=True,
    ),
    Remedy(
        "formats-of-scalars",
        "format a DTensor without dims as its number in Tensor.__format__ (_tensor.py), which asks for the type Tensor "
        "itself",
        scalars_formatted,
        ("composite.handed_over",),
        _CRASH,
    ),
    Remedy(
        "meshes-ignored",
        "refuse a redistribution to another mesh also where the placements stay (DTensor.redistribute in _api.py)",
        meshes_kept,
        ("composite.to_another_mesh",),
        _CRASH,
        refuses=True,
    ),
    Remedy(
        "saved-tensors-of-other-sizes",
        "note in _pack_hook_tp the size of what was saved, and whether a shard of it was kept, instead of guessing it "
        "in _unpack_hook_tp from the shard's elements (parallel/input_reshard.py)",
        saved_sizes_kept,
        ("composite.resharded_input",),
        frozenset({"CRASH", "DIED", "HANG", "RANKS_DISAGREE"}) | VALUES,
    ),
    Remedy(
        "activations-taken-for-replicas",
        "keep a shard only of what all ranks hold alike, such as a module's input, and all of a rank's own activation "
        "(_pack_hook_tp in parallel/input_reshard.py)",
        own_tensors_kept,
        ("composite.resharded_input",),
        VALUES,
    ),
    Remedy(
        "sources-of-plans-for-the-module-itself",
        "pass src_data_rank on for the empty key of a plan, too (parallelize_module in parallel/api.py)",
        sources_passed_on,
        ("composite.own_weights",),
        VALUES,
    ),
    Remedy(
        "checks-of-the-whole-world",
        "gather what check_tensor_meta compares over the mesh, not over the default group (_collective_utils.py)",
        checks_ask_the_mesh,
        ("composite.checked_submesh",),
        frozenset({"CRASH", "HANG"}),
    ),
    Remedy(
        "negative-dims-of-gradients",
        "count negative dims of grad_placements from the end in to_local and from_local (_api.py), as those of "
        "placements are",
        dims_of_gradients_counted,
        ("composite.placed_gradients",),
        _CRASH,
    ),
    Remedy(
        "outputs-that-keep-their-shape",
        "give the wrapper of a tensor given as out the shape of what was written to it, as its local tensor has it, or "
        "refuse to resize it (_dispatch_fast_path_python_tail in _dispatch.py)",
        outputs_resized,
        ("composite.resized_output", "aten.*out"),
        frozenset({"WRONG_SHAPE", "CRASH"}),
    ),
    Remedy(
        "outputs-that-share-memory",
        "redistribute the result to the placements of a tensor given as out, and copy it into its memory, where a view "
        "or its base shares that (_dispatch_fast_path_python_tail in _dispatch.py)",
        outputs_shared,
        ("composite.written_to_views", "aten.*out"),
        refuses=True,
    ),
    Remedy(
        "checkpoints-of-strided-shards",
        "list a strided shard as a chunk for each run of neighbours (_create_chunk_from_dtensor and "
        "_create_write_items_for_dtensor in distributed/checkpoint/planner_helpers.py)",
        lambda: chunks_of_strided_shards(shard_indices),
        ("composite.checkpointed",),
    ),
    Remedy(
        "sequences-in-front",
        "put a whole buffer into order along its sequence, whether or not a dim of a batch is in front of it "
        "(context_parallel_unshard in experimental/_context_parallel/_attention.py)",
        sequences_in_front_restored,
        ("composite.context_parallel",),
        VALUES | {"CRASH"},
    ),
    Remedy(
        "sequences-counted-from-the-end",
        "count negative dims of sequences from the end (context_parallel_unshard and _context_parallel_buffers in "
        "experimental/_context_parallel/_attention.py)",
        sequences_counted,
        ("composite.context_parallel",),
        VALUES | {"CRASH"},
    ),
    Remedy(
        "sequences-that-are-views",
        "exchange the data of a buffer that is a view, instead of writing its shard to the memory that it shares "
        "(context_parallel in experimental/_context_parallel/_attention.py)",
        views_of_sequences_kept,
        ("composite.context_parallel",),
        VALUES,
    ),
    Remedy(
        "generators-ignored",
        "draw from the generator that the caller has given where there is no tracker, too "
        "(_dispatch_get_local_results_slow_path in _dispatch.py)",
        generators_heeded,
        ("composite.drawn",),
        VALUES,
    ),
    Remedy(
        "orders-in-memory",
        "lay out the tensors that distribute_tensor and from_local (_api.py), Redistribute.forward and "
        "_redistribute_backward (_redistribute.py) receive as the strides of the spec say, or give the spec those of a "
        "contiguous tensor",
        orders_in_memory_kept,
        ("composite.laid_out", "composite.moved_between"),
        _CRASH,
    ),
    Remedy(
        "orders-of-arguments",
        "lay out an argument that is redistributed for an op as its strides say, from which those of the result are "
        "computed (OpDispatcher.redistribute_local_args in _dispatch.py)",
        orders_of_arguments_kept,
        verdicts=_CRASH | VALUES,
    ),
)
