"""Where a formula rounds nobody is accused of its rounding; where nothing rounds, the smallest error is found."""

from __future__ import annotations

import pytest
import torch
from rule_mutants import check, short
from rule_strategies import R, Rule, dims, per_mesh_dim
from torch.distributed.tensor import Partial, Replicate, Shard

from strategies.opinfo.calls.call import Call
from strategies.opinfo.samples.fill_plans import _rounds, make_plan
from strategies.opinfo.source import SOURCE
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Contribution, Fate, Observation, ProcessReport, Redistribution
from verifier.core.verdict import Phase, VerdictKind
from verifier.oracle.reference import make_reference
from verifier.oracle.tolerance import case_tolerance
from verifier.oracle.verdicts import judge
from verifier.placements.algebra import reducing_rounds
from verifier.rules.check import check_sample
from verifier.rules.classify import Expected
from verifier.rules.options import CheckOptions
from verifier.rules.samples import Sample, SampleOptions
from verifier.torch_internals.placements import special_placement
from verifier.torch_internals.registries import replaced_strategy

TWO, THREE = MeshSpec((2,)), MeshSpec((3,))
NORM = special_placement("_NormP(6)")
assert NORM is not None
FOUR = torch.tensor([4.0, 3.0], dtype=torch.float64)


def test_the_root_of_a_power_is_not_what_it_was() -> None:
    """Else the tests below would show nothing."""
    assert (4.0**6) ** (1 / 6) != 4.0


@pytest.mark.parametrize("off", [0.0, 1e-9])
def test_level_1_takes_a_norm_of_norms_within_its_rounding(off: float) -> None:
    expected = Expected(FOUR, 2, exact=True, terms=4, noise=512.0)
    mismatch = expected.mismatch([FOUR + off, torch.zeros_like(FOUR)], (NORM,), TWO)
    assert (mismatch is None) is (off == 0.0)


@pytest.mark.parametrize(("off", "kind"), [(0.0, VerdictKind.PASS), (1e-9, VerdictKind.WRONG_VALUE)])
def test_level_2_takes_a_norm_of_norms_within_its_rounding(off: float, kind: VerdictKind) -> None:
    case = OpCase("aten.clone.default", "torch.ops.aten.clone.default", (FOUR,), exact=True)
    parts = [FOUR + off, torch.zeros_like(FOUR)]
    reports = tuple(
        ProcessReport((r,), Phase.DONE, contributions=(Contribution(Phase.FORWARD, "output", r, "_NormP(6)", part),))
        for r, part in enumerate(parts)
    )
    observation = Observation(Trial(case, TWO, ((Replicate(),),)), Fate.COMPLETED, reports)
    assert judge(observation, make_reference(case)).kind is kind


@pytest.mark.parametrize(
    ("placements", "mesh", "rounds"),
    [
        ((Partial("avg"),), (3,), True),
        ((Partial("avg"),), (2,), False),
        ((Partial("avg"), Partial("sum")), (2, 3), False),
        ((Partial("sum"), Partial("avg")), (2, 3), True),
        ((Partial("sum"),), (3,), False),
        ((Partial("product"),), (3,), False),
        ((Shard(0),), (3,), False),
        ((NORM,), (2,), True),
        ((special_placement("_NormP(1)"),), (2,), False),
        ((special_placement("_NormP(2)"),), (2,), True),
    ],
)
def test_what_reducing_rounds(placements, mesh, rounds) -> None:
    assert reducing_rounds(placements, mesh) is rounds


@pytest.mark.parametrize(
    ("source", "mesh", "rounds"), [("_NormP(2)", TWO, True), ("P(avg)", THREE, True), ("P(avg)", TWO, False)]
)
def test_what_dtensor_reduces_on_the_way_may_round(source: str, mesh: MeshSpec, rounds: bool) -> None:
    case = OpCase("aten.relu.default", "torch.relu", (FOUR,), exact=True)
    step = Redistribution(Phase.FORWARD, source, "R", 0, "all_reduce", 8, (source, "R"))
    allowed = case_tolerance(Trial(case, mesh, ((Replicate(),),)), make_reference(case), FOUR, [step])
    assert (allowed > 0.0) is rounds


# --------------------------------------------------------------------------------------------------- what stays exact
@pytest.mark.parametrize("relative", [1e-14, 1e-12, 1e-6])
def test_a_small_error_of_an_exact_op_stays_wrong(relative: float) -> None:
    value = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    expected = Expected(value, 2, exact=True, terms=1000, noise=512.0)
    expected.expect_parts(True)
    for placement, results in (
        (Replicate(), [value * (1 + relative)] * 2),
        (Partial("sum"), [value * (1 + relative), torch.zeros_like(value)]),
    ):
        mismatch = expected.mismatch(results, (placement,), TWO)
        assert mismatch is not None
        assert mismatch.clear


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64])
def test_an_integer_that_is_off_by_one_is_clear(dtype: torch.dtype) -> None:
    value = torch.tensor([1, 7, 100]).to(dtype)
    expected = Expected(value, 3, exact=True, terms=1000, noise=512.0)
    mismatch = expected.mismatch([value + 1] * 3, (Replicate(),), THREE)
    assert mismatch is not None
    assert mismatch.clear


def test_a_result_in_the_last_place_of_an_exact_op_accuses_nobody() -> None:
    off = FOUR * (1 - 2.0**-52)
    expected = Expected(FOUR, 2, exact=True, terms=4, noise=0.0)
    mismatch = expected.mismatch([off, off], (Replicate(),), TWO)
    assert mismatch is not None
    assert not mismatch.clear


# ------------------------------------------------------------------------------------------------- which ops are exact
def exact(name: str, op: str) -> list[bool]:
    (target,) = SOURCE.select([name])
    found = []
    for sample in SOURCE.samples(target, SampleOptions(max_samples=None, rare=False)):
        if sample.op == op:
            cases = [sample.draw(size, 0) for size in range(2)]
            found += [case.exact for case in cases if case is not None]
    assert found
    return found


@pytest.mark.parametrize(
    ("name", "op"),
    [("addcdiv", "aten.addcdiv.default"), ("nn.functional.huber_loss", "aten.huber_loss_backward.default")],
)
def test_an_op_that_divides_is_not_exact(name: str, op: str) -> None:
    assert not any(exact(name, op))


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("mm", "aten.mm.default"),
        ("sum", "aten.sum.dim_IntList"),
        ("cumsum", "aten.cumsum.default"),
        ("nn.functional.relu", "aten.relu.default"),
    ],
)
def test_an_op_that_adds_multiplies_or_selects_is_exact(name: str, op: str) -> None:
    assert all(exact(name, op))


@pytest.mark.parametrize(
    ("op", "arguments", "rounds"),
    [
        (torch.ops.aten.pow.Tensor_Scalar, (torch.tensor([1.0, 2.0, 3.0]), 2), False),
        (torch.ops.aten.linalg_vector_norm.default, (torch.tensor([[1.0, 2.0], [2.0, 4.0]]), 6), True),
        (torch.ops.aten.sqrt.default, (torch.tensor([1.0, 4.0, 9.0]),), True),
        (torch.ops.aten.div.Tensor, (torch.tensor([2.0, 4.0]), torch.tensor([1.0, 2.0])), True),
        (torch.ops.aten.mean.default, (torch.tensor([1.0, 2.0, 3.0]),), True),
        (torch.ops.aten.mean.default, (torch.tensor([1.0, 2.0]),), False),
        (torch.ops.aten.mul.Tensor, (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])), False),
    ],
)
def test_which_calls_round_quarters(op, arguments, rounds: bool) -> None:
    call = Call(op, arguments, {})
    plan = make_plan(call, lambda _: None, torch.Generator())
    assert plan is not None
    assert _rounds(call, plan, lambda _: None, torch.Generator().manual_seed(0)) is rounds


# ------------------------------------------------------------------------------------------------------------- as used
def test_no_rule_of_a_norm_is_accused_for_the_last_place() -> None:
    """As ``rules linalg.vector_norm --max-samples 60 --world-size 2 --claims-only`` did."""
    (target,) = SOURCE.select(["linalg.vector_norm"])
    samples = SOURCE.samples(target, SampleOptions(max_samples=60))
    sixth = [sample for sample in samples if sample.op == "aten.linalg_vector_norm.default" and _order(sample) == 6]
    reports = [check_sample(sample, CheckOptions((TWO,), claims_only=True, samples_called_again=0)) for sample in sixth]
    claimed = {short(rule) for report in reports for rule in report.confirmed}
    assert any("_NormP(6)" in rule for rule in claimed)
    assert not [wrong for report in reports for wrong in report.wrong if "NormP" in short(wrong.rule)]


def _order(sample: Sample) -> object:
    case = sample.draw(0, 0)
    return case.args[1] if case is not None and len(case.args) > 1 else None


def test_a_norm_of_norms_that_is_a_plain_sum_stays_accused() -> None:
    """A rule that is wrong by more than rounding, of the same op."""
    overload = torch.ops.aten.linalg_vector_norm.default

    def rules(values: torch.Tensor, *_: object, **__: object) -> list[Rule]:
        return [[R, R], *([Partial("sum"), Shard(dim)] for dim in dims(values))]

    with replaced_strategy(overload):
        per_mesh_dim(overload, rules)
        wrong = {short(w.rule) for report in check(str(overload), 4, True) for w in report.wrong}
    assert any(rule.endswith("-> P(sum)") for rule in wrong)
