"""A difference that rounding explains accuses nobody; one that it does not explain still does."""

from __future__ import annotations

import pytest
import torch

from verifier.core.case import OpCase
from verifier.core.verdict import Phase
from verifier.oracle.comparison import Spot
from verifier.oracle.conditioning import rounding_explains
from verifier.oracle.reference import expected_value, make_reference

OUTPUT = Spot(Phase.FORWARD, "output")


def explained(op: str, *args: object, exact: bool = False, noise: float = 0.0, spot: Spot = OUTPUT) -> float:
    case = OpCase(f"aten.{op}", f"torch.ops.aten.{op}", args, exact=exact)
    return rounding_explains(make_reference(case), spot, 0, noise)


def test_the_gradient_of_a_loss_at_its_edge_is_ill_conditioned() -> None:
    probabilities = torch.ones(3)  # the gradient divides by 1e-12 here
    target = torch.full((3,), 0.5)
    cotangent = torch.full((3,), 3.0)
    result = torch.ops.aten.binary_cross_entropy_backward(cotangent, probabilities, target, None, 0)
    assert explained("binary_cross_entropy_backward.default", cotangent, probabilities, target, None, 0) > (
        1e-6 * float(result.abs().max())
    )


def test_a_well_conditioned_result_explains_no_more_than_a_few_units_in_the_last_place() -> None:
    values = torch.linspace(1, 2, 5, dtype=torch.float64)
    assert 0 < explained("exp.default", values) < 1e-13


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_cancels_on_the_way_to_a_small_result_is_as_exact_as_the_inputs(dtype: torch.dtype) -> None:
    scores = torch.tensor([-6.0, 2.0, -3.0, 6.0], dtype=dtype)
    by_hand = scores[3] - scores.exp().sum().log()
    difference = abs(float(torch.log_softmax(scores, 0)[3] - by_hand))
    explains = explained("logsumexp.default", scores - 6, [0])  # of which by_hand is the negative
    assert difference < explains < 1e-3 * abs(float(by_hand))


def test_the_parts_of_a_partial_widen_what_is_explained() -> None:
    values = torch.linspace(1, 2, 5, dtype=torch.float64)
    assert explained("exp.default", values, noise=512.0) > 50 * explained("exp.default", values)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_step_explains_nothing(dtype: torch.dtype) -> None:
    assert explained("floor.default", torch.tensor([1.0, 2.0, 3.0], dtype=dtype), noise=512.0) < 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_exact_call_explains_its_last_places_and_no_other_result(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, 60.0], dtype=dtype)
    explains = explained("add.Tensor", values, values, exact=True, noise=512.0)
    assert 0 < explains < 1e-4 * 120
    assert explains < 2**-11  # small integers and quarters differ by more


def test_integers_explain_nothing() -> None:
    assert explained("argmax.default", torch.tensor([1.0, 1.0]), noise=512.0) == 0


def test_gradients_are_looked_at_as_gradients() -> None:
    values = torch.tensor([1e-6, 1.0], dtype=torch.float64, requires_grad=True)
    case = OpCase("aten.log.default", "torch.ops.aten.log.default", (values,), exact=False)
    reference = make_reference(case)
    spot = Spot(Phase.BACKWARD, "self.grad", 0)
    expected = expected_value(reference, spot, 0)
    assert expected is not None
    bound = rounding_explains(reference, spot, 0, 0.0)
    assert 0 < bound < 1e-13 * float(expected.abs().max())


def test_what_is_explained_follows_the_error_of_the_local_call_itself() -> None:
    # the reflectors are not orthogonal, and the formula of the gradient divides by what is nearly 0
    reflectors = torch.tensor([
        [-1.6953, 1.5083, -1.6942, 1.1135, 1.5198],
        [0.4751, -1.0797, 1.0892, -0.3446, -1.2549],
        [1.1381, -0.5841, -1.8820, 1.4798, -1.2677],
        [0.3562, -1.2870, 0.9091, -0.1014, 1.1353],
        [-0.0486, -1.0071, 0.9050, -0.0648, -1.3993],
    ])  # fmt: skip
    factors = torch.tensor([-0.1843, 0.2494, 0.3837, 1.0857, 1.6447])
    spot = Spot(Phase.BACKWARD, "tau.grad", 0)

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        args = [tensor.to(dtype).requires_grad_() for tensor in (reflectors, factors)]
        case = OpCase(
            "aten.linalg_householder_product.default", "torch.ops.aten.linalg_householder_product.default", (*args,)
        )
        value = expected_value(make_reference(case), spot, 0)
        assert value is not None
        return value

    single, double = gradient(torch.float32), gradient(torch.float64)
    wrong, largest = float((single - double).abs().max()), float(double.abs().max())
    args = [tensor.clone().requires_grad_() for tensor in (reflectors, factors)]
    found = explained("linalg_householder_product.default", *args, spot=spot)
    assert largest * torch.finfo(torch.float32).eps ** 0.5 < wrong
    assert found <= 4.01 * wrong
    assert found > largest * torch.finfo(torch.float32).eps ** 0.5
    assert found < largest / 20, "a gradient that is wrong is not explained"
