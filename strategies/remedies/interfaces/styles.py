"""Remedies for parallel styles, local_map, rules of the user's, and what is given to meshes and files."""

from __future__ import annotations

import torch

from strategies.remedies.placing import VALUES
from verifier.execution.remedies import Remedy
from verifier.placements.algebra import shard_indices
from verifier.torch_internals.amending.distributing import placements_counted, without_handlers_beside_meshes
from verifier.torch_internals.amending.handing_over import (
    both_states_set,
    flat_states_nested,
    placements_pickled,
    state_dicts_of_strided_shards,
    states_without_tensors_loaded,
)
from verifier.torch_internals.amending.parallelism import (
    inputs_taken_by_keyword,
    layouts_asked_for,
    lists_of_outputs_kept,
    placements_in_tuples_taken,
)
from verifier.torch_internals.amending.registrations import (
    arguments_of_users_rules_keyed,
    handled,
    users_rules_asked,
)

__all__ = ["REMEDIES"]

_CRASH = frozenset({"CRASH"})
_CONVERSION = torch.ops.aten.to.dtype_layout


REMEDIES = (
    Remedy(
        "layouts-taken-for-granted",
        "redistribute a DTensor that is not placed as input_layouts or output_layouts say (_prepare_input_arg and "
        "_prepare_out_fn in parallel/style.py), or refuse it",
        layouts_asked_for,
        ("composite.other_layout",),
        VALUES | {"CRASH", "HANG", "DIED", "RANKS_DISAGREE"},
    ),
    Remedy(
        "lists-of-outputs",
        "place the results in a list or a named tuple as those in a tuple, and return them in one "
        "(PrepareModuleOutput._prepare_out_fn in parallel/style.py)",
        lists_of_outputs_kept,
        ("composite.outputs_in_lists",),
        _CRASH,
    ),
    Remedy(
        "inputs-by-keyword",
        "register the hooks of ColwiseParallel, RowwiseParallel and SequenceParallel with keyword arguments "
        "(distribute_module in _api.py)",
        inputs_taken_by_keyword,
        ("composite.called_by_keyword",),
        _CRASH,
    ),
    Remedy(
        "tuples-of-placements",
        "take a tuple of placements for those of one result in local_map (_local_map_wrapped in "
        "experimental/_func_map.py)",
        placements_in_tuples_taken,
        ("composite.mapped",),
        _CRASH,
    ),
    Remedy(
        "registered-rules-not-asked",
        "let register_op_strategy take back the strategy for one mesh dim that is asked before, and empty the caches "
        "(_sharding_prop.py)",
        users_rules_asked,
        ("composite.registered",),
        _CRASH,
    ),
    Remedy(
        "arguments-of-registered-rules-cached",
        "let the key of the cache hold all arguments that are no tensors, not only those of type int "
        "(derive_schema_info in experimental/_register_sharding.py)",
        arguments_of_users_rules_keyed,
        ("composite.registered_arguments",),
    ),
    Remedy(
        "placements-not-counted",
        "refuse as many placements as the mesh has no dims in from_local and redistribute (_api.py), as "
        "distribute_tensor does",
        placements_counted,
        ("composite.miscounted",),
        _CRASH,
    ),
    Remedy(
        "handlers-beside-the-mesh",
        "run no handler on a rank that the mesh lacks (the dispatch of DTensor), which has an empty local tensor",
        without_handlers_beside_meshes,
        ("composite.beside_the_mesh",),
        frozenset({"CRASH", "HANG", "RANKS_DISAGREE"}),
    ),
    Remedy(
        "pending-results-stored",
        "pickle all of _MaskPartial and let torch.load know it and _NormPartial, or reduce what waits for these before "
        "it is stored (placement_types.py)",
        placements_pickled,
        ("composite.stored", "composite.stored_pending"),
        _CRASH,
    ),
    Remedy(
        "state-dicts-of-strided-shards",
        "take the rows of a strided shard from a whole tensor, not neighbours (_distribute_tensors in "
        "distributed/_state_dict_utils.py)",
        lambda: state_dicts_of_strided_shards(shard_indices),
        ("composite.loaded",),
    ),
    Remedy(
        "layouts-taken-for-outputs",
        "ask the schema of an op whether it has outputs among its arguments, not whether the name of its overload "
        "contains out, as dtype_layout does (the dispatch of DTensor in C++)",
        lambda: handled(_CONVERSION, _CONVERSION.decompose),
        ("composite.inference", "composite.transformed", "aten.to.dtype_layout"),
        _CRASH,
    ),
    Remedy(
        "flat-states-of-optimisers",
        "nest a flat state dict of an optimiser before it is distributed (_load_optim_state_dict in "
        "distributed/checkpoint/state_dict.py)",
        flat_states_nested,
        ("composite.restored",),
        _CRASH,
    ),
    Remedy(
        "states-without-tensors",
        "take no device from the tensors of an optimiser's state if it has none (_load_optim_state_dict in "
        "distributed/checkpoint/state_dict.py)",
        states_without_tensors_loaded,
        ("composite.restored",),
        _CRASH,
    ),
    Remedy(
        "models-left-out-of-states",
        "set the states of model and optimiser on every rank, also where the dicts that are given are empty "
        "(set_state_dict in distributed/checkpoint/state_dict.py)",
        both_states_set,
        ("composite.restored",),
        VALUES | {"HANG", "CRASH"},
    ),
)
