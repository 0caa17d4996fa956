"""Decisions that DTensor's cache hands to another call: which arguments a key leaves out, and which calls show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy, register_op_strategy
from torch.distributed.tensor.experimental import register_sharding

from strategies.opinfo.calls.call import Call
from strategies.opinfo.programs import called_both_ways
from strategies.opinfo.second_calls import other_arguments
from strategies.opinfo.source import SOURCE
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Fate, Observation, ProcessReport, Raised
from verifier.core.verdict import Phase, Verdict, VerdictKind
from verifier.gate.baseline import Baseline
from verifier.programs import needs_fresh_caches, second_calls
from verifier.records.schema import FAILS
from verifier.rules.campaign import confirm
from verifier.rules.campaign.collect import op_record, stale_decisions
from verifier.rules.campaign.confirm import Confirmer
from verifier.rules.campaign.work import WorkItem, check_target
from verifier.rules.campaign.worker_process import InFlight
from verifier.rules.check import check_sample
from verifier.rules.options import CheckOptions
from verifier.rules.results import SampleReport, WrongRule
from verifier.rules.samples import SampleOptions, Values
from verifier.torch_internals.registries import replaced_strategy

aten = torch.ops.aten
TWO = MeshSpec((2,))
NUMBERS = torch.arange(24.0, dtype=torch.float64).view(4, 6)


class Called:
    """A sample that is always the same call."""

    not_testable = claims_only = ""

    def __init__(self, op: str, *args: object, **kwargs: object) -> None:
        self.op, self.origin = op, "by hand"
        self.case = OpCase(op, f"torch.ops.{op}", args, kwargs, family="opinfo")

    def draw(self, size: int, draw: int, values: Values = Values.USUAL) -> OpCase | None:
        return self.case if size == 0 and values is Values.USUAL else None


def unflipped_dims(op: object, args: Any, kwargs: object) -> list[list[Any]]:
    """Return the true rules of a flip, which depend on its dims."""
    ndim = len(args[0].shape)
    flipped = {dim % ndim for dim in args[1]}
    return [[Shard(dim), Shard(dim)] for dim in range(ndim) if dim not in flipped]


def checked(info: RuntimeSchemaInfo) -> SampleReport:
    with replaced_strategy(aten.flip.default):
        register_single_dim_strategy(aten.flip.default, schema_info=info, allow_uneven_sharding=True)(unflipped_dims)
        return check_sample(Called("aten.flip.default", NUMBERS, [0]), CheckOptions((TWO,), claims_only=True))


def test_an_argument_that_the_key_leaves_out_is_named_and_the_rules_stay_true() -> None:
    report = checked(RuntimeSchemaInfo())
    assert {stale.left_out for stale in report.stale} == {"dims"}
    assert {stale.verdict for stale in report.stale} == {VerdictKind.STALE_CACHE}
    assert report.wrong == []
    assert {str(rule) for rule in report.confirmed} == {"aten.flip.default: R -> R", "aten.flip.default: S(1) -> S(1)"}


def test_what_a_kernel_need_not_check_is_changed_as_well() -> None:
    op = aten.native_layer_norm.default
    with replaced_strategy(op):
        register_single_dim_strategy(op, schema_info=RuntimeSchemaInfo(), allow_uneven_sharding=True)(
            lambda op, args, kwargs: [[Shard(0)] * 4] if len(args[1]) == 1 else []
        )
        called = Called("aten.native_layer_norm.default", NUMBERS, [6], None, None, 1e-5)
        report = check_sample(called, CheckOptions((TWO,), claims_only=True))
    assert {stale.left_out for stale in report.stale} == {"normalized_shape"}
    assert report.wrong == []


@pytest.mark.parametrize(
    ("op", "args", "branch", "left_out"),
    [
        (
            aten.embedding_dense_backward.default,
            (NUMBERS, torch.tensor([1, 1, 1, 0]), 3, -1, False),
            lambda args: [] if args[4] else [[Partial(), Shard(0), Shard(0)]],
            "scale_grad_by_freq",
        ),
        (
            aten.embedding_dense_backward.default,
            (NUMBERS, torch.tensor([1, 1, 1, 0]), 3, -1, False),
            lambda args: [[Partial(), Shard(0), Shard(0)]] if args[3] < 0 else [],
            "padding_idx",
        ),
        (
            aten.mse_loss_backward.default,
            (NUMBERS[0, 0], NUMBERS, NUMBERS + 1, 2),
            lambda args: [[Shard(0), Replicate(), Shard(0), Shard(0)]] if args[3] == 2 else [],
            "reduction",
        ),
        (
            aten.leaky_relu_backward.default,
            (NUMBERS, NUMBERS - 9, 0.5, False),
            lambda args: [[Partial("max"), Partial("max"), Replicate()]] if args[2] >= 0 else [],
            "negative_slope",
        ),
    ],
)
def test_of_a_backward_flags_factors_and_choices_are_changed(
    op: Any, args: Any, branch: Callable[[Any], list[list[Any]]], left_out: str
) -> None:
    with replaced_strategy(op):
        register_single_dim_strategy(op, schema_info=RuntimeSchemaInfo())(lambda op, args, kwargs: branch(args))
        report = check_sample(Called(str(op), *args), CheckOptions((TWO,), claims_only=True))
    assert {stale.left_out for stale in report.stale} == {left_out}
    assert report.wrong == []


def test_a_number_is_asked_about_with_both_signs() -> None:
    def largest_of_positive(op: object, args: Any, kwargs: object) -> list[list[Any]]:
        return [[Partial("max"), Partial("max")]] if args[1] >= 0 else []

    op = aten.mul.Scalar
    with replaced_strategy(op):
        register_single_dim_strategy(op, schema_info=RuntimeSchemaInfo())(largest_of_positive)
        report = check_sample(Called("aten.mul.Scalar", NUMBERS, 2.0), CheckOptions((TWO,), claims_only=True))
    assert {stale.left_out for stale in report.stale} == {"other"}


def test_with_all_arguments_in_the_key_nothing_is_stale() -> None:
    assert checked(RuntimeSchemaInfo(static_argnum=1)).stale == []


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "changed"),
    [
        ("aten.add.Tensor", (NUMBERS, NUMBERS), {}, {"alpha"}),
        ("aten.clamp.Tensor", (NUMBERS, None, NUMBERS), {}, {"min"}),
        ("aten.index.Tensor", (NUMBERS, [torch.tensor([0, 2])]), {}, {"indices"}),
        ("aten.sum.dim_IntList", (NUMBERS, [0]), {}, {"dim", "keepdim", "dtype"}),
        ("aten.div.Tensor_mode", (NUMBERS, NUMBERS + 1), {"rounding_mode": None}, {"rounding_mode"}),
        ("aten.topk.default", (NUMBERS, 2), {}, {"k", "dim", "largest", "sorted"}),
        ("aten.fill_.Scalar", (NUMBERS, 2), {}, {"value"}),
        ("aten._softmax.default", (NUMBERS, 1, False), {}, {"dim"}),
        ("aten.native_layer_norm.default", (NUMBERS, [6], None, None, 1e-5), {}, {"normalized_shape"}),
        ("aten.linalg_qr.default", (NUMBERS,), {}, {"mode"}),
        ("aten._fft_c2c.default", (NUMBERS + 0j, [1], 0, True), {}, {"dim"}),
    ],
)
def test_arguments_of_each_kind_are_changed(op: str, args: Any, kwargs: Any, changed: set[str]) -> None:
    case = OpCase(op, f"torch.ops.{op}", args, kwargs, family="opinfo")
    pairs = list(second_calls(case))
    assert {pair.changed for pair in pairs} == changed
    for pair in pairs:
        assert needs_fresh_caches(pair.program)
        begins_like_it = [one.args[: len(case.args)] == case.args for one in (pair.first, pair.second)]
        assert any(begins_like_it)  # a default that it leaves out may be written out


def test_two_values_of_an_argument_make_a_pair_where_torch_leaves_out_its_default() -> None:
    """A rule of the user's is right for the default, which is no argument of what DTensor sees."""
    op = aten.linalg_qr.default
    case = OpCase("aten.linalg_qr.default", f"torch.ops.{op}", (NUMBERS,), {}, family="opinfo")
    with replaced_strategy(op):
        register_sharding(op)(lambda x, mode="reduced": [([Replicate(), Replicate()], [Replicate(), None])])
        pairs = [(pair.first.args[1:], pair.second.args[1:]) for pair in second_calls(case)]
    assert (("complete",), ("r",)) in pairs
    assert (("r",), ("complete",)) in pairs
    assert (("reduced",), ("r",)) not in pairs


def test_texts_and_numbers_in_the_code_of_a_rule_are_asked_about() -> None:
    def many_add_up(op: object, args: Any, kwargs: Any) -> list[list[Any]]:
        return [[Partial("sum"), Partial("sum")]] if len(args) > 1 and args[1] > 40 else []

    op = aten.mul.Scalar
    with replaced_strategy(op):
        register_single_dim_strategy(op, schema_info=RuntimeSchemaInfo())(many_add_up)
        report = check_sample(Called("aten.mul.Scalar", NUMBERS, 2.0), CheckOptions((TWO,), claims_only=True))
    assert {stale.left_out for stale in report.stale} == {"other"}


def test_what_register_sharding_leaves_out_of_the_key_is_said() -> None:
    op = aten.flip.default
    with replaced_strategy(op):
        register_sharding(op)(
            lambda x, dims: [([s], [s, None]) for s in map(Shard, range(x.ndim)) if s.dim not in dims]
        )
        found = check_sample(Called(str(op), NUMBERS, [0]), CheckOptions((TWO,), claims_only=True)).stale
    assert found
    assert all(
        "leaves out dims, as register_sharding lets only single integers into it" in one.message for one in found
    )
    assert not any("register_sharding" in one.message for one in checked(RuntimeSchemaInfo()).stale)


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (1.0, True), (0.5, False)])
def test_no_second_call_draws_random_numbers(p: float, train: bool) -> None:
    """Its result would differ from that of the local call, whatever the rules are."""
    op = "aten.native_dropout.default"
    pairs = list(second_calls(OpCase(op, f"torch.ops.{op}", (NUMBERS, p, train), {}, family="opinfo")))
    made: list[Any] = [call.args[1:] for pair in pairs for call in (pair.first, pair.second)]
    assert len(made) > 4
    assert all(trains is False or drop in (0, 1) for drop, trains in made)


def test_tensors_are_made_square_for_a_call_along_another_dim_that_they_do_not_allow() -> None:
    vectors = torch.arange(15.0, dtype=torch.float64).reshape(5, 3)
    case = OpCase(
        "aten.linalg_cross.default", "torch.ops.aten.linalg_cross.default", (vectors, vectors + 1), {}, "opinfo"
    )
    pairs = [pair for pair in second_calls(case) if pair.changed == "dim"]
    shapes = {tuple(each.args[0].shape) for pair in pairs for each in (pair.first, pair.second)}  # type: ignore[attr-defined]
    assert shapes == {(5, 3), (3, 3)}


def test_a_program_returns_the_results_of_both_calls_in_order() -> None:
    case = OpCase("aten.index.Tensor", "torch.ops.aten.index.Tensor", (NUMBERS, [torch.tensor([2, 0])]), {}, "opinfo")
    (pair,) = second_calls(case)
    arguments: Any = pair.program.args
    rows, columns = called_both_ways(*arguments, **pair.program.kwargs)
    assert torch.equal(rows, NUMBERS[[2, 0]])
    assert torch.equal(columns, NUMBERS[:, [2, 0]])


# ---------------------------------------------------------------------------------------------------- on real processes
def stale_of_flip() -> list[WrongRule]:
    return stale_decisions([checked(RuntimeSchemaInfo())])


def test_decisions_to_replicate_everything_leave_room_for_others() -> None:
    stale = checked(RuntimeSchemaInfo()).stale
    whole, cut = (next(one for one in stale if ("R" in one.rule.inputs) is wanted) for wanted in (True, False))
    small = [replace(whole, elements=number) for number in range(8, 48)]
    kept = stale_decisions([replace(checked(RuntimeSchemaInfo()), stale=[*small, replace(cut, elements=100)])])
    assert len(kept) < len(small)
    assert kept[-1].rule == cut.rule


def test_second_calls_follow_where_a_rule_branches_on_an_argument() -> None:
    """The key leaves out a flag that the strategy reads only where the reduction is a maximum."""

    def strategy(schema: OpSchema) -> OpStrategy:
        x, dim, *_, reduction = schema.args_schema
        rules: list[list[Any]] = [[Replicate()] * 4]
        if x.ndim and reduction == "amax" and schema.kwargs_schema.get("include_self", True):  # type: ignore[union-attr]
            rules.append([Partial("max"), Replicate(), Shard(dim % x.ndim), Shard(dim % x.ndim)])  # type: ignore
        mesh = schema.get_mesh_from_args()
        return expand_to_full_mesh_op_strategy(mesh, schema, rules)

    (target,) = SOURCE.select(["aten.scatter_reduce.two"])
    item = WorkItem(target, SampleOptions(max_samples=8), CheckOptions((TWO,), claims_only=True, sizes=1))
    with replaced_strategy(aten.scatter_reduce.two):
        register_op_strategy(aten.scatter_reduce.two, schema_info=RuntimeSchemaInfo(1))(strategy)
        reports = [*check_target(item, InFlight(bytearray(InFlight.SIZE)), frozenset(), 0)]
    assert {stale.left_out for report in reports for stale in report.stale} >= {"include_self"}


def observed(trial: Trial, raises: bool) -> Observation:
    raised = Raised(Phase.FORWARD, "RuntimeError", "no") if raises else None
    reports = (ProcessReport((rank,), Phase.FORWARD if raises else Phase.DONE, raised) for rank in range(2))
    return Observation(trial, Fate.COMPLETED, tuple(reports))


@pytest.mark.parametrize("twice_fails", [False, True])
def test_only_calls_that_pass_when_made_twice_blame_the_cache(
    twice_fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confirm, "run_script", lambda source: (FAILS, ""))

    def run(trial: Trial) -> Observation:
        changes: Any = trial.case.args[1]
        return observed(trial, raises=bool(changes) or twice_fails)

    confirmer = Confirmer(run, Baseline(), ["opinfo"])
    records = confirmer.confirm_stale(stale_of_flip(), "opinfo")
    confirmer.settle()
    assert len(records) == len(confirmer.findings) == (0 if twice_fails else 1)
    for finding in confirmer.findings:
        assert finding.verdict == VerdictKind.STALE_CACHE
        assert "the key of DTensor's cache leaves out dims" in finding.message
    record = op_record([checked(RuntimeSchemaInfo())], records, [], [], [])
    assert "aten.flip.default: S(1) -> S(1)" in record.confirmed, "a stale decision refuted a true rule"


@pytest.mark.parametrize(
    ("kinds", "blamed"),
    [
        ((VerdictKind.PASS, VerdictKind.PASS), True),
        ((VerdictKind.INCONCLUSIVE, VerdictKind.PASS), True),
        ((VerdictKind.INCONCLUSIVE, VerdictKind.INCONCLUSIVE), False),
        ((VerdictKind.PASS, VerdictKind.UNSUPPORTED), False),
    ],
)
def test_one_of_two_calls_may_show_nothing_when_made_twice(
    kinds: tuple[VerdictKind, ...], blamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confirm, "run_script", lambda source: (FAILS, ""))
    alone: list[VerdictKind] = []

    def judge(observation: Observation, reference: object) -> Verdict:
        if observation.trial.case.args[1]:  # type: ignore[index]
            alone[:] = kinds
            return Verdict(VerdictKind.WRONG_VALUE, "it is stale", Phase.FORWARD, "output 1")
        return Verdict(alone.pop(0))

    monkeypatch.setattr(confirm, "judge", judge)
    confirmer = Confirmer(lambda trial: observed(trial, raises=False), Baseline(), ["opinfo"])
    assert bool(confirmer.confirm_stale(stale_of_flip()[:1], "opinfo")) == blamed


def test_decisions_that_do_no_harm_are_no_accusation() -> None:
    confirmer = Confirmer(lambda trial: observed(trial, raises=False), Baseline(), ["opinfo"])
    assert confirmer.confirm_stale(stale_of_flip(), "opinfo") == []


def test_no_number_in_the_code_of_a_rule_is_a_memory_format() -> None:
    """Kernels read memory that is not theirs under a format that does not exist."""
    clone = torch.ops.aten.clone.default
    with replaced_strategy(clone):

        @register_single_dim_strategy(clone)
        def strategy(_op: Any, args: Any, _kwargs: Any) -> list[list[Shard]]:
            return [[Shard(dim), Shard(dim)] for dim in range(len(args[0].shape)) if dim != 4]

        call = Call(clone, (torch.ones(2, 2, 2, 5, 3),), {})
        given = [other.values.get(name) for name, other in other_arguments(call)]
    assert not any(type(value) is int for value in given)
