"""The family of chains: what it draws is legal, covers both tables, and is tried as its single calls."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch.distributed.tensor import Partial, Replicate, Shard

from strategies.chains import FAMILY
from strategies.chains.building import STRIDED, Building
from strategies.chains.composites import COMPOSITES
from strategies.chains.consumers import CONSUMERS
from strategies.chains.inputs import OPS, chain_cases, composite_case, produced_case
from strategies.chains.producers import PRODUCERS
from strategies.chains.programs import CHAIN, chain
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import vacuous
from verifier.planning.boundary import refusal
from verifier.planning.families import DrawContext, Family, budget_of
from verifier.programs import simpler_calls
from verifier.records.values import case_record, load_case
from verifier.torch_internals.placements import Placements, strided_shard, strides_of

MESH = MeshSpec((2,))
F64 = torch.float64
QUICK = settings(
    max_examples=60,
    database=None,
    derandomize=True,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def context(*ops: str) -> DrawContext:
    return DrawContext(MESH, FAMILY.dtypes, ops or OPS)


def replicated(case: OpCase) -> Trial:
    return Trial(case, MESH, ((Replicate(),),) * len(case.kwargs))


def test_the_family_satisfies_the_interface_and_spends_less_than_others() -> None:
    assert isinstance(FAMILY, Family)
    assert budget_of(FAMILY, 30, 32) == (60, 4)
    with pytest.raises(ValueError, match="must each have an entry"):
        chain_cases(DrawContext(MESH, (F64,), ()))


@given(FAMILY.cases(context()))
@QUICK
def test_cases_run_locally_may_be_stored_and_are_allowed_from_a_file(case: OpCase) -> None:
    reference = make_reference(case)
    assert reference.raised is None
    assert not reference.no_gradient
    again = load_case(case_record(case))
    outputs = make_reference(again).outputs
    assert len(outputs) == len(reference.outputs)
    assert all(map(torch.equal, outputs, reference.outputs))
    assert refusal(replicated(again)) == ""


def test_some_chains_begin_with_strided_shards_and_on_several_mesh_dims_with_shard_orders() -> None:
    drawn = [produced_case(MESH, F64, "chain.sum", "view", None, False, seed) for seed in range(40)]
    strided = [case for case in drawn if case is not None and STRIDED in case.tags]
    assert 0 < len(strided) < 20
    alphabet = FAMILY.alphabet(strided[0], MESH)
    assert strided_shard(0, 2) in alphabet.placements(2, F64)
    many = FAMILY.alphabet(strided[0], MeshSpec((2, 2)))
    assert many.allows((strided_shard(0, 2), Shard(0)))
    assert not many.allows((strided_shard(0, 2), Replicate()))


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_every_consumer_takes_most_pending_results(consumer: str) -> None:
    producers = [name for name in PRODUCERS if name not in ("any", "any_of_numbers", "compared", "given", "count")]
    fits = Counter(produced_case(MESH, F64, f"chain.{one}", consumer, None, False, 3) is not None for one in producers)
    assert fits[True] >= len(producers) // 2


@pytest.mark.parametrize("producer", PRODUCERS)
def test_every_producer_is_followed_by_a_consumer(producer: str) -> None:
    case = produced_case(MESH, F64, f"chain.{producer}", "with_itself", "view", True, 1)
    assert case is not None
    assert case.op == f"chain.{producer}"
    assert len(make_reference(case).outputs) == 2


@pytest.mark.parametrize("name", COMPOSITES)
def test_every_composite_is_drawn_with_results_that_show_something(name: str) -> None:
    drawn = [composite_case(MESH, F64, f"composite.{name}", seed) for seed in range(4)]
    cases = [case for case in drawn if case is not None]
    assert len(cases) >= 3
    assert any(not vacuous(make_reference(case)) for case in cases)


def composites(name: str, mesh: MeshSpec = MESH, count: int = 60) -> list[OpCase]:
    drawn = [composite_case(mesh, F64, f"composite.{name}", seed) for seed in range(count)]
    return [case for case in drawn if case is not None]


def test_strided_shards_are_distributed_of_tensors_that_they_do_not_divide() -> None:
    found = Counter[bool]()
    for case in composites("distributed", count=120):
        (placement,) = case.args[2]  # type: ignore[misc]
        strides = strides_of(placement)
        if strides is not None:
            found[bool(make_reference(case).outputs[0].shape[0] % (2 * strides[1]))] += 1
    assert min(found[True], found[False]) > 0


def test_norms_have_any_number_of_spatial_dims() -> None:
    norms = {
        (str(path), case.kwargs["x"].ndim)  # type: ignore[union-attr]
        for case in composites("normalised", count=200)
        for _, path, *_ in case.args[0]  # type: ignore[union-attr, misc]
    }
    assert {("torch.nn.functional.group_norm", 4), ("torch.nn.functional.batch_norm", 5)} <= norms


def test_layers_are_partly_frozen_in_every_way() -> None:
    ways = {tuple(case.kwargs[name].requires_grad for name in "xyz") for case in composites("partly_frozen")}  # type: ignore[attr-defined]
    assert {(False, False, True), (False, True, False), (True, False, False), (True, False, True)} <= ways
    assert not ways & {(True, True, True), (False, False, False)}


def test_a_chain_returns_what_no_step_takes_and_a_written_tensor_once() -> None:
    base = torch.arange(6.0).reshape(2, 3)
    steps = [
        ["step1", "torch.ops.aten.clone.default", ["x"], {}],
        ["step2", "torch.ops.aten.split.Tensor", ["step1", 1, 0], {}],
        ["step3", "torch.ops.aten.mul_.Scalar", ["step2.0", 10], {}],
        ["step4", "torch.Tensor.__getitem__", ["step1", (["slice", 0, None, 2], 1)], {}],
    ]
    untouched, written, column = chain(steps, x=base)
    assert (untouched.tolist(), written.tolist()) == ([[3.0, 4.0, 5.0]], [[0.0, 10.0, 20.0]])
    assert column.tolist() == [10.0]
    assert base.tolist() == [[0, 1, 2], [3, 4, 5]]


_NORM = ("torch.nn.functional.batch_norm", ["y", "step1", "step1"], {"training": True})


@pytest.mark.parametrize(
    ("calls", "read"),
    [
        ([("split.Tensor", ["step1", 2], {}), ("mul_.Scalar", ["step2.0", 5], {})], True),  # the base of a view
        ([_NORM], True),  # the kernel writes, and no schema says so
        ([("add_.Scalar", ["step1", 3], {})], False),  # it returns what it has written to
        ([("add_.Scalar", ["step1", 3], {}), ("mul.Scalar", ["step1", 2], {})], False),  # read by a later step
        ([("add_.Scalar", ["step1", 3], {}), ("mul.Scalar", ["step2", 2], {})], True),
        ([("add.Scalar", ["step1", 3], {})], False),
    ],
)
def test_what_a_step_writes_to_and_nothing_returns_is_read(calls: list[tuple[str, list[str], Any]], read: bool) -> None:
    b = Building(MESH, F64, seed=1)
    for name in (b.positive(3), b.floats(4, 3)):
        b.tensors[name].requires_grad_(False)
    b.call("torch.clone", "x")
    for path, arguments, options in calls:
        b.call(path, *arguments, **options)
    steps: Any = b.case("composite.normalised").args[0]
    assert [step[1:3] for step in steps[len(calls) + 1 :]] == ([["torch.clone", ["step1"]]] if read else [])


def test_a_chain_is_tried_as_its_single_calls_where_placements_are_unknown_on_each() -> None:
    steps = [
        ["step1", "torch.ops.aten.sum.dim_IntList", ["x", [0]], {}],
        ["step2", "torch.ops.aten.neg.default", ["step1"], {}],
        ["step3", "torch.ops.aten.exp.default", ["step1"], {}],
    ]
    case = OpCase("chain.sum", CHAIN, (steps,), {"x": torch.ones(2, 3, dtype=F64)}, "chains", False)
    calls = simpler_calls(Trial(case, MESH, ((Shard(0),),)), {})
    tried: dict[str, list[Placements]] = {}
    for call in calls:
        tried.setdefault(call.case.op, []).append(call.combination[0])
    assert tried["aten.sum.dim_IntList"] == [(Shard(0),)]
    assert {(Replicate(),), (Shard(0),), (Partial(),), (Partial("max"),)} <= {*tried["aten.neg.default"]}
    branches = [call.case.args[0] for call in calls if call.case.call == CHAIN]
    assert branches == [steps[:2], [steps[0], steps[2]]]
