"""Rules that raise or do not come back are accused; rules that refuse, or that are slow, are not."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSpec, OpStrategy
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy
from torch.distributed.tensor._ops.utils import register_op_strategy

from strategies.opinfo.source import SOURCE
from verifier.core.case import MeshSpec
from verifier.core.verdict import VerdictKind
from verifier.gate.baseline import Baseline
from verifier.rules import handled
from verifier.rules.campaign import recorded
from verifier.rules.campaign.recorded import record_rules
from verifier.rules.campaign.request import RulesRequest, make_rules_plan
from verifier.rules.check import check_sample
from verifier.rules.claims import GROWS
from verifier.rules.options import CheckOptions
from verifier.rules.results import WrongRule
from verifier.rules.samples import SampleOptions
from verifier.runs.store import RunStore
from verifier.torch_internals import watching
from verifier.torch_internals.registries import replaced_handler, replaced_strategy
from verifier.torch_internals.watching import EndlessRuleError, SlowRulesError, ended_rules

Rules = Callable[..., list[list[Any]]]
RIGHT: list[list[Any]] = [[Replicate(), Replicate()], [Shard(0), Shard(0)]]


def raises_for_empty_tensors(_op: Any, args: Any, _kwargs: Any) -> list[list[Any]]:
    sizes = [size for size in args[0].shape if size]
    assert len(sizes) == len(args[0].shape), "no such size"
    return RIGHT


def never_ends(_op: Any, args: Any, _kwargs: Any) -> list[list[Any]]:
    elements = 0
    while 0 in args[0].shape and elements == 0:
        elements *= 2
    return RIGHT


def refuses_empty_tensors(_op: Any, args: Any, _kwargs: Any) -> list[list[Any]]:
    if 0 in args[0].shape:
        raise NotImplementedError("empty tensors are not supported")
    return RIGHT


def wrong_for(rules: Rules, *meshes: MeshSpec) -> list[WrongRule]:
    """Return what is wrong about ``rules`` for exp of tensors of which some are empty."""
    (target,) = SOURCE.select(["aten.exp.default"])
    options = CheckOptions(meshes or (MeshSpec((2,)),), sizes=1, claims_only=True, samples_called_again=0)
    samples = [one for one in SOURCE.samples(target, SampleOptions(max_samples=2)) if "empty" in one.origin][:2]
    with replaced_strategy(torch.ops.aten.exp.default, rules):
        return [wrong for sample in samples for wrong in check_sample(sample, options).wrong]


def test_a_strategy_that_lists_more_rules_each_time_is_left_to_level_2() -> None:
    """To ask about every combination of every sample would take longer and longer."""
    kept, asked = [*RIGHT], []

    def grows(_op: Any, args: Any, _kwargs: Any) -> list[list[Any]]:
        asked.append(args)
        kept.append([Shard(0), Shard(0)])
        return list(kept)

    (target,) = SOURCE.select(["aten.exp.default"])
    options = CheckOptions((MeshSpec((2,)), MeshSpec((2, 2))), claims_only=True, samples_called_again=0)
    with replaced_strategy(torch.ops.aten.exp.default, grows):
        samples = list(SOURCE.samples(target, SampleOptions(max_samples=3)))
        reports = [check_sample(sample, options) for sample in samples]
    assert all(report.untested[GROWS] and not report.wrong and not report.combinations for report in reports)
    assert len(asked) <= len(samples) + 3


def test_a_rule_that_raises_is_accused_where_it_raises() -> None:
    found = wrong_for(raises_for_empty_tensors)
    assert {(one.verdict, one.fails, one.raised) for one in found} == {(VerdictKind.CRASH, True, "AssertionError")}
    assert all("the rule raised AssertionError: no such size" in one.message for one in found)
    assert all(any(0 in shape for shape in one.shapes) for one in found)


def test_a_rule_that_does_not_come_back_is_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_TICK", 0.2)
    found = wrong_for(never_ends)
    assert {(one.verdict, one.fails) for one in found} == {(VerdictKind.HANG, True)}
    assert all("never_ends (test_failing_rules.py) does not come back" in one.message for one in found)


def test_a_rule_that_does_not_come_back_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_TICK", 0.2)
    asked: list[Any] = []

    def counted(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
        if 0 in args[0].shape:
            asked.append(args[0].shape)
        return never_ends(op, args, kwargs)

    (found,) = wrong_for(counted, MeshSpec((2,)), MeshSpec((3,)), MeshSpec((2, 2)))
    assert found.verdict is VerdictKind.HANG
    assert len(asked) == 1
    assert wrong_for(counted), "a rule that is registered later is asked again"


def drops_partial_placements(schema: Any) -> OpStrategy:
    """Return rules whose specs have no placement for a mesh dim on which the tensor is pending."""
    given = schema.args_schema[0]
    rules = []
    for spec in (one.output_spec for one in given.strategies):
        kept = tuple(placement for placement in spec.placements if not placement.is_partial())
        short = DTensorSpec(spec.mesh, kept, tensor_meta=spec.tensor_meta)
        rules.append(OpSpec(short, (short,), redistribute_cost=[[0.0] * len(given.strategies)]))
    return OpStrategy(rules)


def test_a_rule_without_a_placement_for_each_mesh_dim_is_accused() -> None:
    (target,) = SOURCE.select(["aten.tanh.default"])
    options = CheckOptions((MeshSpec((2,)), MeshSpec((2, 2))), sizes=1, claims_only=True, samples_called_again=0)
    sample = next(iter(SOURCE.samples(target, SampleOptions(max_samples=1))))
    with replaced_strategy(torch.ops.aten.tanh.default):
        register_op_strategy(torch.ops.aten.tanh.default)(drops_partial_placements)
        report = check_sample(sample, options)
    assert {(one.verdict, one.message) for one in report.wrong if one.mesh == "2"} == {
        (VerdictKind.CRASH, "the rule raised ValueError: a rule has 0 placements for a mesh of 1 dims")
    }
    assert {str(rule) for rule in report.confirmed} >= {"aten.tanh.default: S(0) -> S(0)"}


@pytest.mark.parametrize("strange", [None, "S(0)"])
def test_a_rule_with_something_else_than_a_placement_is_accused(strange: object) -> None:
    (target,) = SOURCE.select(["aten.tanh.default"])
    sample = next(iter(SOURCE.samples(target, SampleOptions(max_samples=1))))
    options = CheckOptions((MeshSpec((2,)),), sizes=1, claims_only=True, samples_called_again=0)
    with replaced_strategy(torch.ops.aten.tanh.default):
        register_single_dim_strategy(torch.ops.aten.tanh.default)(lambda op, args, kwargs: [[strange, Shard(0)]])
        report = check_sample(sample, options)
    assert {one.verdict for one in report.wrong} == {VerdictKind.CRASH}
    assert {repr(strange) in one.message or "rule raised" in one.message for one in report.wrong} == {True}


def lists_placements(schema: Any) -> OpStrategy:
    """Return rules that have a list in the place of each placement."""
    rules = []
    for spec in (one.output_spec for one in schema.args_schema[0].strategies):
        listed: Any = tuple([placement] for placement in spec.placements)
        whole = DTensorSpec(spec.mesh, listed, tensor_meta=spec.tensor_meta)
        rules.append(OpSpec(whole, (whole,), redistribute_cost=[[0.0]]))
    return OpStrategy(rules)


def test_a_rule_with_lists_of_placements_is_accused_on_two_mesh_dims_too() -> None:
    (target,) = SOURCE.select(["aten.tanh.default"])
    sample = next(iter(SOURCE.samples(target, SampleOptions(max_samples=1))))
    options = CheckOptions((MeshSpec((2,)), MeshSpec((2, 2))), sizes=1, claims_only=True, samples_called_again=0)
    with replaced_strategy(torch.ops.aten.tanh.default):
        register_op_strategy(torch.ops.aten.tanh.default)(lists_placements)
        report = check_sample(sample, options)
    assert {one.verdict for one in report.wrong} == {VerdictKind.CRASH}


def test_a_strategy_that_returns_nothing_is_accused() -> None:
    (target,) = SOURCE.select(["aten.tanh.default"])
    sample = next(iter(SOURCE.samples(target, SampleOptions(max_samples=1))))
    with replaced_strategy(torch.ops.aten.tanh.default):
        register_op_strategy(torch.ops.aten.tanh.default)(lambda schema: None)
        report = check_sample(
            sample, CheckOptions((MeshSpec((2,)),), sizes=1, claims_only=True, samples_called_again=0)
        )
    assert {(one.verdict, one.message) for one in report.wrong} == {
        (VerdictKind.CRASH, "the rule raised NotImplementedError: the op's strategy returns None")
    }


class Halves(Partial):
    """A kind of pending result of the user's: only their own code knows what it promises."""


def test_level_1_leaves_placements_of_the_users_own_to_ranks() -> None:
    (target,) = SOURCE.select(["aten.sum.default"])
    sample = next(iter(SOURCE.samples(target, SampleOptions(max_samples=1))))
    with replaced_strategy(torch.ops.aten.sum.default, lambda op, args, kwargs: [[Halves(), Shard(0)]]):
        report = check_sample(
            sample, CheckOptions((MeshSpec((2,)),), sizes=1, claims_only=True, samples_called_again=0)
        )
    assert not report.wrong
    assert report.untested["a placement of a class that is not torch's: level 2 only"]


def test_a_handler_that_does_not_come_back_is_called_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def waits_for_a_rank(op: Any, given: Any) -> torch.Tensor:
        calls.append(given)
        if given.device_mesh.get_coordinate()[0] == 0:
            funcol.all_reduce(given.to_local(), "max", (given.device_mesh, 0)).clone()
        return given.clone()

    monkeypatch.setattr(handled, "_LIMIT", 0.5)
    monkeypatch.setattr(handled, "_hangs", Counter())
    (target,) = SOURCE.select(["aten.tanh.default"])
    samples = list(SOURCE.samples(target, SampleOptions(max_samples=3)))[:3]
    with replaced_handler(torch.ops.aten.tanh.default, waits_for_a_rank):
        reports = [
            check_sample(one, CheckOptions((MeshSpec((2,)),), sizes=2, claims_only=True, samples_called_again=0))
            for one in samples
        ]
    assert {wrong.raised for report in reports for wrong in report.wrong} == {"TimeoutError"}
    assert len(calls) <= 4, "two calls on two ranks"
    assert sum(count for report in reports for why, count in report.untested.items() if "not come back" in why)


def test_a_rule_that_refuses_is_not_accused() -> None:
    assert not wrong_for(refuses_empty_tensors)


def busy(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(20_000))


def propagate_op_sharding_non_cached(calls: int, seconds: float) -> None:
    """Stand for DTensor's function of this name, which calls rules: so many calls, of so many seconds each."""
    for _ in range(calls):
        busy(seconds)


def test_many_calls_of_rules_are_slow_and_not_endless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_TICK", 0.1)
    with ended_rules():
        propagate_op_sharding_non_cached(12, 0.05)
    with pytest.raises(SlowRulesError, match=r"more than 0\.3 s"), ended_rules(3):
        propagate_op_sharding_non_cached(12, 0.05)
    with pytest.raises(EndlessRuleError, match="busy"), ended_rules(3):
        propagate_op_sharding_non_cached(1, 5.0)


IMPORTED = """
import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy

@register_single_dim_strategy(torch.ops.aten.exp.default, schema_info=RuntimeSchemaInfo(1), allow_uneven_sharding=True)
def rules(op, args, kwargs):
    sizes = {size: dim for dim, size in enumerate(args[0].shape) if size}
    return [[Shard(sizes[size])] * 2 for size in args[0].shape]
"""


@pytest.mark.ranks
@pytest.mark.processes
def test_ranks_confirm_a_rule_that_raises(tmp_path: Path) -> None:
    (tmp_path / "my_rules.py").write_text(IMPORTED)
    request = RulesRequest(
        ("aten.exp.default",), world_sizes="2", sizes=1, max_samples=2, jobs=1, claims_only=True,
        imports=(str(tmp_path / "my_rules.py"),),
    )  # fmt: skip
    with replaced_strategy(torch.ops.aten.exp.default):  # takes back what the file registers in this process
        record = record_rules(make_rules_plan(request, Baseline()), RunStore(tmp_path))
    assert record.rules is not None
    (op,) = record.rules.ops.values()
    failing = [wrong for wrong in op.wrong if wrong.fails]
    assert {(one.verdict, one.confirmed.status, tuple(one.output_placements)) for one in failing} == {
        ("CRASH", "confirmed", ())
    }
    (finding,) = [one for one in record.findings if one.fingerprint == failing[0].fingerprint]
    assert finding.verdict == "CRASH"
    assert "my_rules.py:" in finding.message


def test_a_rule_is_shown_though_the_check_ended_before_ranks_were_asked(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    plan = make_rules_plan(RulesRequest(("aten.exp.default",), world_sizes="2", claims_only=True), Baseline())
    options = CheckOptions((MeshSpec((2,)),), sizes=1, claims_only=True, samples_called_again=0)
    samples = [one for one in SOURCE.samples(plan.targets[0], SampleOptions(max_samples=2)) if "empty" in one.origin]
    with replaced_strategy(torch.ops.aten.exp.default, raises_for_empty_tensors), store.open_run(plan.header) as writer:
        run = recorded._RulesRun(plan, writer, lambda *_: None, store)
        run.ops[0].by_number[0] = check_sample(samples[0], options)
        record = run.finish(complete=False, seconds=0.0)
    assert record.rules is not None
    (op,) = record.rules.ops.values()
    assert {(one.verdict, one.confirmed.why) for one in op.unconfirmed} == {("CRASH", recorded.ENDED)}


@pytest.mark.ranks
@pytest.mark.processes
def test_an_overload_that_never_runs_has_one_record_in_the_place_of_its_wrong_rules(tmp_path: Path) -> None:
    (overload,) = names = ("aten.embedding_dense_backward.out",)  # its function for fake tensors does not take `out`
    request = RulesRequest(names, world_sizes="2", sizes=1, jobs=1, claims_only=True)
    record = record_rules(make_rules_plan(request, Baseline()), RunStore(tmp_path))
    assert record.rules is not None
    op = record.rules.ops[overload]
    assert not op.unconfirmed
    assert [(one.verdict, one.input_placements, one.output_placements, one.fails) for one in op.wrong] == [
        ("CRASH", ["R", "R", "R"], [], True)
    ]
    assert not any(text.endswith(": S(0), S(0), P(sum) -> P(sum)") for text in op.confirmed), "it is refuted"
    assert [finding.verdict for finding in record.findings] == ["CRASH"]
