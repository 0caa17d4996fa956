"""The family of all ops: what it draws, what it wants gradients of, and what it leaves out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import find
from opinfo_cases import context, drawn, tensors

from strategies.opinfo.calls.gradients import differentiated
from strategies.opinfo.composing import WRITTEN_COPY
from strategies.opinfo.family import FAMILY
from strategies.opinfo.random_ops import RANDOM
from strategies.opinfo.samples.informative import more_telling
from verifier.core.case import OpCase
from verifier.core.ops import written_arguments
from verifier.oracle.reference import make_reference
from verifier.planning.families import Family
from verifier.programs import is_composed


def test_the_family_of_all_ops_is_a_family() -> None:
    assert isinstance(FAMILY, Family)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("mul", {"mul"}),
        ("nn.functional.relu*", {"nn.functional.relu", "nn.functional.relu6"}),
        ("aten.mm.*", {"aten.mm.default", "aten.mm.out"}),
        ("no such op", set()),
    ],
)
def test_ops_are_selected_by_the_names_of_opinfos_and_of_overloads(pattern: str, expected: set[str]) -> None:
    assert set(FAMILY.select(pattern)) == expected


def test_all_overloads_of_an_op_are_drawn_and_every_case_is_legal() -> None:
    cases = drawn(context("mul"))
    assert {case.op for case in cases} >= {"aten.mul.Tensor", "aten.mul.Scalar", "aten.mul_.Tensor", "aten.mul.out"}
    assert all(case.op.startswith("aten.mul") for case in cases)
    for case in cases:
        assert case.family == FAMILY.name
        assert make_reference(case).raised is None


def test_gradients_are_wanted_where_torch_has_them() -> None:
    for case in drawn(context("mul", "argmax", "nn.functional.embedding")):
        if is_composed(case):
            continue  # the results of other ops are among its own
        floating = [tensor for tensor in tensors(case) if tensor.is_floating_point()]
        if case.op.startswith("aten.argmax") or written_arguments(case):
            assert not any(tensor.requires_grad for tensor in floating), case.op
        elif any(tensor.numel() for tensor in floating):
            assert all(tensor.requires_grad for tensor in floating), case.op
            reference = make_reference(case)
            assert any(gradient is not None for gradient in reference.gradients(3))
            assert not case.exact  # the gradient of what is exact need not be


X = torch.tensor([[3.0, -1.0, 2.0], [-5.0, 4.0, 1.0]], dtype=torch.float64)
STATISTICS = torch.ones(3, dtype=torch.float64)
NORMALISED = (X, STATISTICS + 1, STATISTICS, STATISTICS * 0, STATISTICS * 2)


@pytest.mark.parametrize(
    ("op", "args", "wanted"),
    [
        ("_native_batch_norm_legit_functional.default", (*NORMALISED, True, 0.1, 1e-5), [0, 1, 2]),
        ("native_batch_norm.default", (*NORMALISED, True, 0.1, 1e-5), [0, 1, 2]),
        ("soft_margin_loss.default", (X, X.sign()), [0]),
        ("nll_loss_forward.default", (X, torch.tensor([2, 0]), STATISTICS, 1, -100), [0]),
        ("pow.Tensor_Tensor", (X, X.abs()), [0]),  # that of the exponent is a logarithm, of negative numbers
        ("mul.Tensor", (X, X), [0, 1]),
        ("floor_divide.default", (X, X), []),
        ("log.default", (X,), []),
    ],
)
def test_a_gradient_is_wanted_of_each_argument_that_has_a_finite_one(
    op: str, args: tuple[object, ...], wanted: list[int]
) -> None:
    case = differentiated(OpCase(f"aten.{op}", f"torch.ops.aten.{op}", args, family="opinfo"))
    assert [number for number, leaf in enumerate(tensors(case)) if leaf.requires_grad] == wanted
    assert case.exact == (not wanted)
    if wanted:
        gradients = make_reference(case).gradients(1)
        assert len(gradients) == len(wanted)
        assert all(gradient is not None and bool(torch.isfinite(gradient).all()) for gradient in gradients)


def test_training_batch_norm_is_differentiated_though_it_writes_its_statistics() -> None:
    found = [case for case in drawn(context("aten._native_batch_norm_legit.default"), 200) if WRITTEN_COPY in case.tags]
    assert found
    for case in found:
        wanting = {name for name, value in case.kwargs.items() if getattr(value, "requires_grad", False)}
        assert {"input"} <= wanting <= {"input", "weight", "bias"}


@pytest.mark.parametrize(
    ("op", "inside"),
    [
        ("log.default", (0.25, 0.75)),
        ("acos.default", (0.25, 0.75)),
        ("atanh_.default", (0.25, 0.75)),
        ("acosh.default", (2.5, 6.5)),
        ("frac.default", (0.25, 0.75)),
        ("relu.default", None),
        ("isnan.default", None),
        ("zero_.default", None),
    ],
)
def test_a_call_gets_values_for_which_it_tells_something(op: str, inside: tuple[float, float] | None) -> None:
    case = more_telling(OpCase(f"aten.{op}", f"torch.ops.aten.{op}", (X,), family="opinfo"))
    (values,) = tensors(case)
    if inside is None:
        assert values is X
        assert case.exact
    else:
        assert (values.min(), values.max()) == inside
        assert len(values.unique()) == len(X.abs().unique())
        (result,) = make_reference(case).outputs
        assert bool(torch.isfinite(result).all())
        assert len(result.unique()) > 1


def test_values_that_belong_together_are_kept() -> None:
    numbers, boundaries = (
        torch.tensor(values, dtype=torch.float64) for values in ([4.5, -0.75, 0.5], [-5.5, -1.5, 6.0])
    )
    case = OpCase("aten.bucketize.Tensor", "torch.ops.aten.bucketize.Tensor", (numbers, boundaries), family="opinfo")
    assert more_telling(case) is case  # all the same, but other boundaries would no longer be sorted


def test_an_op_that_divides_by_0_is_drawn_without_gradients_that_are_not_finite() -> None:
    for case in drawn(context("div")):
        reference = make_reference(case)
        for gradient in reference.gradients(0) if reference.differentiable else ():
            assert gradient is None or bool(torch.isfinite(gradient).all())


def test_what_is_random_is_checked_by_what_it_promises_or_named() -> None:
    left_out = dict(FAMILY.left_out(context("bernoulli", "cauchy", "multinomial", "mul")))
    assert left_out == {
        "aten.bernoulli.float_out": "random, and DTensor promises nothing of its numbers",
        "aten.cauchy_.default": "random",
        "aten.multinomial.out": "random",
    }
    checked = drawn(context("bernoulli"), 20)
    assert {case.op for case in checked} == {
        "aten.bernoulli.default",
        "aten.bernoulli.out",
        "aten.bernoulli_.float",
    }
    assert all(RANDOM in case.tags for case in checked)
    assert not {case.op for case in checked} & set(left_out)
    assert FAMILY.cases(context("empty_like")).is_empty


def test_the_family_of_all_ops_covers_the_overloads_of_selected_ops() -> None:
    assert FAMILY.covers(("mul",), "aten.mul_.Tensor")
    assert FAMILY.covers(("aten.mm.default",), "aten.mm.default")
    assert not FAMILY.covers(("mul", "mm"), "aten.add.Tensor")


def test_dtypes_are_those_asked_for() -> None:
    cases = drawn(context("mul", dtypes=(torch.float32, torch.bfloat16)), 20)
    assert {t.dtype for case in cases for t in tensors(case) if t.is_floating_point()} == {torch.float32}


def test_the_smallest_example_is_small() -> None:
    smallest = find(FAMILY.cases(context("mm")), lambda case: True)
    assert sum(tensor.numel() for tensor in tensors(smallest)) < 100
