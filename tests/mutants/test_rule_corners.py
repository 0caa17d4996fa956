"""Wrong rules that only some part of level 1 can see: how it splits, what it asks of a strategy, what it multiplies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rule_mutants import check, samples, short
from rule_strategies import AVG, SUM, R, Rule, alike, dims, for_whole_meshes, per_mesh_dim, pointwise
from torch.distributed.tensor import Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder, register_single_dim_strategy
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy, register_op_strategy
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from strategies.opinfo.source import SOURCE
from verifier.core.case import MeshSpec
from verifier.core.verdict import VerdictKind
from verifier.rules.campaign.collect import wrong_rules
from verifier.rules.campaign.request import BEYOND
from verifier.rules.check import check_sample
from verifier.rules.options import CheckOptions
from verifier.rules.samples import SampleOptions
from verifier.torch_internals.claims.reader import ClaimReader
from verifier.torch_internals.registries import replaced_strategy

aten = torch.ops.aten


def accused(op: str, most: int = 4) -> set[str]:
    return {short(wrong.rule) for report in check(op, most) for wrong in report.wrong}


@pytest.mark.parametrize("name", ["floor", "ceil", "round", "trunc"])
def test_rounding_is_linear_on_integers_alone(name: str) -> None:
    overload = getattr(aten, name).default
    with replaced_strategy(overload):
        per_mesh_dim(overload, lambda t: [*alike(2, dims(t)), [SUM, SUM]])
        assert accused(str(overload)) == {"P(sum) -> P(sum)"}


def test_rounding_misses_no_rule_for_partial_sums() -> None:
    missing = {short(rule) for report in check("aten.floor.default", 4) for rule in report.missing}
    assert not {rule for rule in missing if rule.startswith(("P(sum)", "P(avg)"))}


def test_frequencies_counted_per_rank_are_wrong_where_gradients_are_scaled_by_them() -> None:
    """The rule is torch's own, and right without the flag."""
    wrong = [w for report in check("aten.embedding_dense_backward.default", 8) for w in report.wrong]
    assert {short(w.rule) for w in wrong if "x" not in w.mesh} == {"S(0), S(0) -> P(sum)", "S(1), S(1) -> P(sum)"}
    assert all("scale_grad_by_freq=True" in w.origin for w in wrong)


def test_a_flag_is_set_beside_a_value_on_which_a_rule_branches() -> None:
    """The strategy takes padding_idx for the flag behind it, so that it shards rows where padding_idx is 0."""

    def strategy(op: object, args: Any, kwargs: object) -> list[list[Any]]:
        grad, ids, _, scaled, *_ = args
        rows = (
            [] if scaled else [[SUM, _ShardingPlaceholder(d), _ShardingPlaceholder(d)] for d in range(len(ids.shape))]
        )
        return [[_ShardingPlaceholder(1), _ShardingPlaceholder(len(grad.shape) - 1), R], *rows]

    overload = aten.embedding_dense_backward.default
    with replaced_strategy(overload):
        register_single_dim_strategy(overload, schema_info=RuntimeSchemaInfo(2))(strategy)
        (target,) = SOURCE.select([str(overload)])
        drawn = SOURCE.samples(target, SampleOptions(max_samples=8))
        options = CheckOptions((MeshSpec((2,)),), claims_only=True, samples_called_again=0)
        wrong = {short(one.rule) for sample in drawn for one in check_sample(sample, options).wrong}
    assert "S(0), S(0) -> P(sum)" in wrong


def test_a_strategy_for_whole_meshes_is_asked_for_the_rules_beyond_the_sampled_combinations() -> None:
    """Of three tensors with two dims there are 512 combinations, of which at most 256 are tried blindly."""

    def rules(*tensors: Any, **_: Any) -> list[Rule]:
        wrong: list[Rule] = [[Shard(0), SUM, Shard(1), R]] if len(tensors[0].shape) > 1 else []
        return [*pointwise(*tensors), *wrong]

    with replaced_strategy(aten.addcmul.default):
        for_whole_meshes(lambda results: results)(aten.addcmul.default, rules)
        assert "P(sum), S(1), R -> S(0)" in accused("aten.addcmul.default", 1)


def test_a_strategy_that_looks_at_the_first_mesh_dim_alone_is_found_out_on_two() -> None:
    """It keeps the dim of a softmax whole on the first mesh dim, and takes what comes on the second."""

    def strategy(schema: OpSchema) -> OpStrategy:
        given = schema.args_schema[0]
        assert isinstance(given, OpStrategy)
        dim = int(schema.args_schema[1]) % max(1, given.ndim)  # type: ignore[call-overload]
        spec = given.strategies[0].output_spec
        first: Placement = spec.placements[0]
        whole = R if first == Shard(dim) or first.is_partial() else first
        rest = [R if placement.is_partial() else placement for placement in spec.placements[1:]]
        target = DTensorSpec(spec.mesh, (whole, *rest), tensor_meta=spec.tensor_meta)
        return OpStrategy([OpSpec(target, input_specs=(target,), redistribute_cost=[[0.0]])])

    with replaced_strategy(aten._softmax.default):
        register_op_strategy(aten._softmax.default)(strategy)
        found = accused("aten._softmax.default", 8)
    assert found
    assert all(rule.startswith("(") for rule in found)


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_rule_for_one_number_of_ranks_alone_is_found_out_there(ranks: int) -> None:
    def strategy(schema: OpSchema) -> OpStrategy:
        given, mesh = schema.args_schema[0], schema.get_mesh_from_args()
        wrong: list[Rule] = [[SUM, SUM]] if mesh.shape == (ranks,) else []
        return expand_to_full_mesh_op_strategy(mesh, schema, [*alike(2, dims(given)), *wrong])  # type: ignore[arg-type]

    def found(beyond: tuple[MeshSpec, ...]) -> set[tuple[str, str]]:
        options = CheckOptions(
            (MeshSpec((2,)), MeshSpec((3,))), claims_only=True, samples_called_again=0, beyond=beyond
        )
        reports = [check_sample(sample, options) for sample in samples("aten.exp.default", 2)]
        return {(short(wrong.rule), wrong.mesh) for report in reports for wrong in report.wrong}

    with replaced_strategy(aten.exp.default):
        register_op_strategy(aten.exp.default)(strategy)
        assert found(()) == set()
        assert found(BEYOND) == {("P(sum) -> P(sum)", str(ranks))}


@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (2, 2, 2)])
def test_a_rule_for_a_mesh_of_other_dims_is_found_out_there(shape: tuple[int, ...]) -> None:
    def strategy(schema: OpSchema) -> OpStrategy:
        given, mesh = schema.args_schema[0], schema.get_mesh_from_args()
        wrong: list[Rule] = [[SUM, SUM]] if mesh.shape == shape else []
        return expand_to_full_mesh_op_strategy(mesh, schema, [*alike(2, dims(given)), *wrong])  # type: ignore[arg-type]

    def found(beyond: tuple[MeshSpec, ...]) -> set[str]:
        options = CheckOptions(
            (MeshSpec((2,)), MeshSpec((3,)), MeshSpec((2, 2))), claims_only=True, samples_called_again=0, beyond=beyond
        )
        reports = [check_sample(sample, options) for sample in samples("aten.exp.default", 2)]
        return {wrong.mesh for report in reports for wrong in report.wrong}

    with replaced_strategy(aten.exp.default):
        register_op_strategy(aten.exp.default)(strategy)
        assert found(()) == set()
        assert found(BEYOND) == {"x".join(map(str, shape))}


def test_a_strategy_that_is_not_told_the_mesh_is_not_asked_about_other_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(beyond: tuple[MeshSpec, ...]) -> int:
        calls.clear()
        options = CheckOptions(
            (MeshSpec((2,)), MeshSpec((3,))), claims_only=True, samples_called_again=0, beyond=beyond
        )
        check_sample(samples("aten.exp.default", 1)[0], options)
        return len(calls)

    calls: list[object] = []
    read = ClaimReader.at
    monkeypatch.setattr(ClaimReader, "at", lambda *args, **kwargs: calls.append(args) or read(*args, **kwargs))
    with replaced_strategy(aten.exp.default, lambda op, args, kwargs: [[Shard(d)] * 2 for d in dims(args[0])]):
        assert asked(BEYOND) == asked(())


def test_a_rule_for_mesh_dims_of_one_name_is_found_out_where_a_mesh_has_it() -> None:
    def strategy(schema: OpSchema) -> OpStrategy:
        given, mesh = schema.args_schema[0], schema.get_mesh_from_args()
        wrong: list[Rule] = [[SUM, SUM]] if TENSOR_PARALLEL in (mesh.mesh_dim_names or ()) else []
        return expand_to_full_mesh_op_strategy(mesh, schema, [*alike(2, dims(given)), *wrong])  # type: ignore[arg-type]

    with replaced_strategy(aten.exp.default):
        register_op_strategy(aten.exp.default)(strategy)
        options = CheckOptions(
            (MeshSpec((2,)),), sizes=1, claims_only=True, samples_called_again=0, beyond=(MeshSpec((4,)),)
        )
        reports = [check_sample(sample, options) for sample in samples("aten.exp.default", 1)]
    found = {wrong.mesh for report in reports for wrong in report.wrong}
    assert "2+tensor_parallel" in found
    assert all(TENSOR_PARALLEL in mesh for mesh in found)


TENSOR_PARALLEL = "tensor_parallel"


def test_a_strided_shard_that_a_rule_takes_for_a_plain_one_is_found_out() -> None:
    def strategy(schema: OpSchema) -> OpStrategy:
        given = schema.args_schema[0]
        assert isinstance(given, OpStrategy)
        spec = given.strategies[0].output_spec
        wanted = tuple(R if one.is_partial() else one for one in spec.placements)
        plain = tuple(Shard(one.dim) if isinstance(one, _StridedShard) else one for one in wanted)
        target = DTensorSpec(spec.mesh, wanted, tensor_meta=spec.tensor_meta)
        made = DTensorSpec(spec.mesh, plain, tensor_meta=spec.tensor_meta)
        return OpStrategy([OpSpec(made, input_specs=(target,), redistribute_cost=[[0.0]])])

    with replaced_strategy(aten.exp.default):
        register_op_strategy(aten.exp.default)(strategy)
        found = accused("aten.exp.default")
    assert found
    assert all(rule.startswith("(_S(") for rule in found)


def test_a_strategy_that_is_not_told_the_mesh_is_not_tried_on_meshes_of_other_dims() -> None:
    def combinations(beyond: tuple[MeshSpec, ...]) -> int:
        options = CheckOptions(
            (MeshSpec((2,)), MeshSpec((2, 2))), claims_only=True, samples_called_again=0, beyond=beyond
        )
        return sum(check_sample(sample, options).runs for sample in samples("aten.exp.default", 2))

    with replaced_strategy(aten.exp.default, lambda op, args, kwargs: [[Shard(d)] * 2 for d in dims(args[0])]):
        assert combinations(BEYOND) == combinations(())


def test_a_rule_for_several_mesh_dims_alone_is_found_out_though_no_product_of_rules_is_the_same() -> None:
    def strategy(schema: OpSchema) -> OpStrategy:
        given, mesh = schema.args_schema[0], schema.get_mesh_from_args()
        assert isinstance(given, OpStrategy)
        made = expand_to_full_mesh_op_strategy(mesh, schema, alike(2, dims(given)))
        if mesh.ndim == 2 and given.ndim > 1:
            spec = DTensorSpec(mesh, (Shard(0), SUM), tensor_meta=given.strategies[0].output_spec.tensor_meta)
            costs = [[0.0] * len(given.strategies)]
            made.strategies.append(OpSpec(spec, input_specs=(spec,), redistribute_cost=costs))
        return made

    with replaced_strategy(aten.relu.default):
        register_op_strategy(aten.relu.default)(strategy)
        assert accused("aten.relu.default") == {"(S(0), P(sum)) -> (S(0), P(sum))"}


def test_channels_are_cut_where_a_sample_has_one_and_each_way_to_fail_is_told() -> None:
    """Torch's own calls of the op have one channel. The wrong rules, one for rows and one for channels, read alike."""
    (target,) = SOURCE.select(["nn.functional.pixel_unshuffle"])
    found = [one for one in SOURCE.samples(target, SampleOptions()) if one.op == "aten.pixel_unshuffle.default"]
    reports = [
        check_sample(one, CheckOptions((MeshSpec((2,)), MeshSpec((3,))), claims_only=True, samples_called_again=0))
        for one in found
    ]
    told = {(short(one.rule), one.verdict) for one in wrong_rules(reports)}
    assert {("S(1) -> S(1)", VerdictKind.CRASH), ("S(1) -> S(1)", VerdictKind.WRONG_SHAPE)} <= told


def test_means_of_means_are_wrong_of_uneven_rows_where_a_pool_makes_one_of_all() -> None:
    """Torch's own calls of the op make more than one."""

    def rules(tensor: Any, size: list[int]) -> list[Rule]:
        return [[AVG, Shard(len(tensor.shape) - 2)]] if list(size) == [1, 1] else []

    overload = aten._adaptive_avg_pool2d.default
    with replaced_strategy(overload):
        per_mesh_dim(overload, rules)
        found = [one for target in SOURCE.select([str(overload)]) for one in SOURCE.samples(target, SampleOptions())]
        reports = [
            check_sample(one, CheckOptions((MeshSpec((3,)),), claims_only=True, samples_called_again=0))
            for one in found
        ]
        wrong = {short(one.rule) for report in reports for one in report.wrong}
    assert wrong
    assert wrong <= {"S(1) -> P(avg)", "S(2) -> P(avg)"}
