"""Remedies mend torch's own rules, are taken back, and hide no rule that someone else has registered."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rule_mutants import MUTANTS, RuleMutant, check, short
from torch._decomp import decomposition_table, meta_table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch_versions import needs_torch, torch_is

from verifier.execution.imports import registered_by, run_imports
from verifier.execution.remedies import installed_remedies, remedied
from verifier.gate.baseline import load_baseline
from verifier.torch_internals.amending.propagation import is_torchs
from verifier.torch_internals.claims.reader import ClaimReader
from verifier.torch_internals.claims.values import Propagation
from verifier.torch_internals.ops import registered_overloads
from verifier.torch_internals.placements import Placements
from verifier.torch_internals.registries import keys_of_rules, registries_of_rules, replaced_strategy
from verifier.torch_internals.simulation import start_simulated_world

BASELINE = Path(__file__).resolve().parents[2] / "reports" / "baseline.toml"
REMEDIES = installed_remedies()
aten = torch.ops.aten


def decided(op: object, args: tuple[object, ...], result: object, *given: Placements) -> Propagation | None:
    mesh = (2,) * len(given[0])
    return ClaimReader(op, args, {}, result).at(given, mesh)  # type: ignore[arg-type]


def scan(dim: int) -> tuple[Placements, ...]:
    """Return the placements on which DTensor runs a cumsum along ``dim`` of a tensor of two dims, the last one cut."""
    tensor = torch.ones(4, 6)
    found = decided(aten.cumsum.default, (tensor, dim), tensor, (Shard(1),))
    assert found is not None
    return found.inputs


TORCHS = scan(-1)
"""What torch does without a remedy: from 2.14 on, a scan along a negative dim gathers it."""


def state() -> list[object]:
    propagator = DTensor._op_dispatcher.sharding_propagator
    held = [*registries_of_rules(), propagator.op_to_schema_info, propagator.op_to_shape_and_stride_idx]
    return [dict(one) for one in held]  # type: ignore[call-overload]


def test_every_cause_has_a_remedy_and_every_remedy_a_cause() -> None:
    assert sorted(cause.remedy for cause in load_baseline(BASELINE).causes) == sorted(REMEDIES)


@pytest.mark.parametrize("name", REMEDIES)
def test_a_remedy_is_taken_back(name: str) -> None:
    before = state()
    with remedied([name]):
        pass
    assert state() == before
    assert "propagate_op_sharding_non_cached" not in vars(DTensor._op_dispatcher.sharding_propagator)
    assert scan(-1) == TORCHS


def test_a_remedied_tensor_split_is_torch_s_for_plain_tensors_and_is_taken_back() -> None:
    before, value = torch.tensor_split, torch.arange(5)
    with remedied(["indices-of-tensor-split"]):
        assert torch.tensor_split is not before
        for where in (torch.tensor([1, 3]), torch.tensor(2), [1, 3], 2):
            parts = zip(torch.tensor_split(value, where), before(value, where), strict=True)
            assert all(torch.equal(found, expected) for found, expected in parts)
    assert torch.tensor_split is before


def test_an_unknown_remedy_is_named() -> None:
    unknown = pytest.raises(ValueError, match="remedy 'negative-dim-of-scan' is not installed; did you mean")
    with unknown, remedied(["negative-dim-of-scan"]):
        pass


NEGATIVE = needs_torch("<2.14", "a later one gathers the dim of a scan however it is counted")


@NEGATIVE
def test_a_negative_dim_of_a_scan_is_mended_and_nothing_else_changes() -> None:
    assert (scan(-1), scan(1)) == (((Shard(1),),), ((Replicate(),),))
    with remedied(["negative-dim-of-scans"]):
        assert (scan(-1), scan(1), scan(0)) == (((Replicate(),),), ((Replicate(),),), ((Shard(1),),))


def everything(*args: object) -> list[list[Placement | None]]:
    """Return rules of a scan that leave every dim cut, whichever is summed over."""
    return [[Replicate(), Replicate()], [Shard(0), Shard(0)], [Shard(1), Shard(1)]]


def test_a_user_s_scan_that_leaves_its_dim_cut_stays_wrong_under_all_remedies() -> None:
    with replaced_strategy(aten.cumsum.default, everything), remedied(REMEDIES):
        assert (scan(1), scan(-1)) == (((Shard(1),),), ((Shard(1),),))


def weight_gradient() -> Placements | None:
    """Return how DTensor places the gradient of the weight, if the batch of a convolution is cut."""
    images, weight, cotangent = torch.ones(4, 1, 5, 5), torch.ones(2, 1, 3, 3), torch.ones(4, 2, 3, 3)
    args = (cotangent, images, weight, [2], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True])
    result = (images, weight, torch.ones(2))
    found = decided(aten.convolution_backward.default, args, result, (Shard(0),), (Shard(0),), (Replicate(),))
    assert found is not None
    assert found.outputs is not None
    return found.outputs[1]


def replicated_gradient(op: object, args: tuple[object, ...], kwargs: object) -> list[list[Placement | None]]:
    bias = None if args[3] is None else Replicate()
    return [[Shard(0), Replicate(), bias, Shard(0), Shard(0), Replicate()]]


def test_a_convolution_whose_gradient_is_called_replicated_stays_wrong_under_all_remedies() -> None:
    with remedied(REMEDIES):
        assert weight_gradient() == (Partial("sum"),)
    with replaced_strategy(aten.convolution_backward.default, replicated_gradient), remedied(REMEDIES):
        assert weight_gradient() == (Replicate(),)


DISGUISED = """
import functools
import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

aten = torch.ops.aten
propagator = DTensor._op_dispatcher.sharding_propagator
given = propagator.op_strategy_funcs[aten.{wrapped}.default]


@functools.wraps(given)
def wrapped(schema):
    return given(schema)


propagator.register_op_strategy(aten.{wrapped}.default, wrapped)
propagator.op_to_schema_info[aten.{keyed}.default] = RuntimeSchemaInfo(2)
"""


@pytest.mark.parametrize(("wrapped", "keyed"), [("stack", "view"), pytest.param("cumsum", "logsumexp", marks=NEGATIVE)])
def test_what_an_import_registers_is_no_rule_of_torch_s_whatever_it_looks_like(
    wrapped: str, keyed: str, tmp_path: Path
) -> None:
    disguised, other = (getattr(aten, name).default for name in (wrapped, keyed))
    file = tmp_path / "disguised.py"
    file.write_text(DISGUISED.format(wrapped=wrapped, keyed=keyed))
    keys, strategies = keys_of_rules()[0], dict(registries_of_rules()[2])
    with ExitStack() as stack:
        for op in (disguised, other):
            stack.enter_context(replaced_strategy(op))
            registries_of_rules()[2][op] = strategies[op]
        assert is_torchs(disguised)
        before = keys[other]
        run_imports([str(file)])
        assert registered_by([str(file)]) == (f"aten.{wrapped}.default", f"aten.{keyed}.default")
        assert not is_torchs(disguised)
        assert not is_torchs(other)
        if wrapped == "cumsum":
            with remedied(["negative-dim-of-scans"]):
                assert scan(-1) == ((Shard(1),),), "the remedy mends torch's rule alone"
    assert keys[other] is before
    assert is_torchs(disguised)
    assert is_torchs(other)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_no_remedy_concerns_the_rules_of_a_mutant(mutant: RuleMutant) -> None:
    """A remedy asks whose rules they are before it changes anything, so the mutant is wrong under all of them."""
    with mutant.registered():
        assert not is_torchs(mutant.overload)
        rules = [registry.get(mutant.overload) for registry in registries_of_rules()]
        with remedied(REMEDIES):
            assert [registry.get(mutant.overload) for registry in registries_of_rules()] == rules


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_level_1_accuses_every_mutant_under_all_remedies(mutant: RuleMutant) -> None:
    with mutant.registered(), remedied(REMEDIES):
        reports = check(mutant.op, mutant.most, mutant.claims_only)
    assert mutant.wrong <= {short(wrong.rule) for report in reports for wrong in report.wrong}


def test_each_op_whose_function_for_fake_tensors_takes_fewer_arguments_has_a_remedy() -> None:
    """Ops that only a test of values shows, normal.out for one, are not told by their signatures."""
    remedy = REMEDIES["metas-of-out-variants"]
    found = set()
    for op in registered_overloads():
        function = meta_table.get(op) or decomposition_table.get(op)
        if function is None:
            continue
        parameters = signature(function).parameters.values()
        kinds, names = [one.kind for one in parameters], {one.name for one in parameters}
        by_name = {one.name for one in op._schema.arguments if one.kwarg_only}
        positions = sum(kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
        too_few = Parameter.VAR_POSITIONAL not in kinds and positions < len(op._schema.arguments) - len(by_name)
        unknown = Parameter.VAR_KEYWORD not in kinds and not by_name <= names
        if too_few or unknown:
            found.add(str(op))
    assert {"aten.add.Scalar_out", "aten.embedding_dense_backward.out"} <= found
    assert found <= {*remedy.ops}


def looked_up(index: torch.Tensor, *given: Placement) -> Placements:
    """Return the placements on which DTensor runs a gather of rows by a replicated ``index`` on a mesh of 2x2."""
    found = decided(
        aten.gather.default, (torch.ones(8, 5), 0, index), torch.ones(index.shape), given, (Replicate(),) * 2
    )
    assert found is not None
    return found.inputs[0]


def test_rows_stay_sharded_by_one_mesh_dim_where_gather_masks_its_ids() -> None:
    ids, whole = torch.zeros(1, 5, dtype=torch.int64), (Replicate(),) * 2
    once, twice = (Shard(0), Replicate()), (Shard(0), Shard(0))
    assert [looked_up(ids, *given) for given in (once, twice)] == [once, twice]
    with remedied(["rows-cut-twice"]):
        assert [looked_up(ids, *given) for given in (once, twice)] == [once, whole]


@pytest.mark.parametrize(
    ("op", "remedy", "others"),
    [
        (
            aten.gather.default,
            "sparse-gradients-of-gather",
            {"dim": 0, "index": torch.tensor([1]), "sparse_grad": True},
        ),
        (aten.lift_fresh.default, "fresh-tensors-that-are-others", {}),
    ],
)
def test_an_overload_that_calls_something_else_is_still_found_in_tables(
    op: Any, remedy: str, others: dict[str, Any]
) -> None:
    table, before = {op: "found"}, op._op
    with remedied([remedy]):
        assert op._op is not before
        assert table[op] == "found"
        assert op(self=torch.arange(2), **others)[-1] == 1
        with replaced_strategy(op, everything):
            assert not is_torchs(op), "the remedy would act on a rule of the user's"
    assert op._op is before


@pytest.mark.parametrize("empty", [Replicate(), Shard(0)])
def test_cat_replicates_beside_an_empty_vector_what_is_sharded_in_another_dim(empty: Placement) -> None:
    tensors = [torch.zeros(0), torch.ones(4, 3)]
    with remedied(REMEDIES):  # not one of them may ask for the size of a dim that the vector lacks
        found = decided(aten.cat.default, (tensors, 0), tensors[1], (empty,), (Shard(1),))
    assert found is not None
    assert found.inputs == ((Replicate(),), (Replicate(),))


def test_cat_replicates_parts_of_unlike_reductions_and_no_others() -> None:
    tensors = [torch.ones(4, 3)] * 2
    average, total, whole = (Partial("avg"),), (Partial("sum"),), (Replicate(),)
    with remedied(["parts-turned-into-others"]):
        pairs = [(average, total), (average, whole), (total, total)]
        found = [decided(aten.cat.default, (tensors, 0), torch.ones(8, 3), *pair) for pair in pairs]
    assert [one and one.inputs for one in found] == [(whole, whole), (average, average), (total, total)]


def test_cat_replicates_parts_beside_shards_on_both_mesh_dims_and_not_on_one() -> None:
    tensors = [torch.ones(4, 3)] * 2
    parts, replica, shard = Partial("sum"), Replicate(), Shard(0)
    pairs = [((parts, shard), (shard, parts)), ((parts, shard), (replica, shard))]
    with remedied(["parts-turned-into-others"]):
        found = [decided(aten.cat.default, (tensors, 0), torch.ones(8, 3), *pair) for pair in pairs]
    last = replica if torch_is("<2.14") else Shard(1)  # a later one may choose a shard of another dim, as cheap
    assert [one and one.inputs for one in found] == [((replica, last),) * 2, ((parts, replica),) * 2]


def test_a_dtensor_that_begins_behind_its_storage_is_copied_without_the_other_ranks() -> None:
    """Only some ranks have such a local tensor, so that a clone by DTensor's dispatch would wait for the others."""
    start_simulated_world(4)
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        placements = (Partial(), Shard(0))
        local = torch.arange(12.0).view(4, 3)[2:]
        given = DTensor.from_local(local, mesh, placements, run_check=False).requires_grad_()
        with remedied(["copies-of-views"]):
            copies = [copy.copy(given), copy.deepcopy(given)]
        for one in copies:
            assert one.requires_grad
            assert one.placements == placements
            assert torch.equal(one._local_tensor, local)
    finally:
        dist.destroy_process_group()
