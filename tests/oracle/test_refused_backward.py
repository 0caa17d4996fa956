"""A wrong result of real ranks is told of, though the backward pass of the same trial is refused or raises."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.tensor import DTensor

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.verdict import Phase, Verdict, VerdictKind
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.placements.parsing import parse_placements

MESH = MeshSpec((2,))


class _Refusing(torch.autograd.Function):
    """Multiplies DTensors by a number; their backward pass is refused."""

    @staticmethod
    def forward(ctx, values, factor):
        return values * (factor if isinstance(values, DTensor) else 2.0)

    @staticmethod
    def backward(ctx, gradient):
        if isinstance(gradient, DTensor):
            raise NotImplementedError("no gradient of DTensors here")
        return 2.0 * gradient, None


def refused_after_a_right_result(values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` twice."""
    return _Refusing.apply(values, 2.0)


def refused_after_a_wrong_result(values: torch.Tensor) -> torch.Tensor:
    """Return DTensors three times: wrong on purpose."""
    return _Refusing.apply(values, 3.0)


def refused_after_a_write(values: torch.Tensor) -> torch.Tensor:
    """Write to a DTensor: wrong on purpose."""
    result = _Refusing.apply(values, 2.0)
    if isinstance(values, DTensor):
        with torch.no_grad():
            values.mul_(2.0)
    return result


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(PoolKey.of(MESH)) as started:
        yield started


def verdict_of(pool: Pool, case: OpCase, placements: tuple[str, ...], gradients: bool = True) -> Verdict:
    passes = ((parse_placements("R"),),) if gradients else ()
    trial = Trial(case, MESH, tuple(map(parse_placements, placements)), passes)
    [observation] = pool.run([trial])
    return judge(observation, make_reference(case))


def program(function: object) -> OpCase:
    values = torch.arange(1.0, 6.0, dtype=torch.float64, requires_grad=True)
    return OpCase("test.refused", f"{__name__}.{function.__name__}", (values,))  # type: ignore[attr-defined]


@pytest.mark.parametrize("placements", ["R", "S(0)", "P(sum)"])
@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (refused_after_a_right_result, VerdictKind.UNSUPPORTED),
        (refused_after_a_wrong_result, VerdictKind.WRONG_VALUE),
        (refused_after_a_write, VerdictKind.MUTATED_INPUT),
    ],
)
def test_a_refused_backward_pass_hides_nothing(pool: Pool, function, kind: VerdictKind, placements: str) -> None:
    verdict = verdict_of(pool, program(function), (placements,))
    assert verdict.kind is kind, verdict
    assert "no gradient of DTensors here" in verdict.message
    if kind.bad:
        first, second = verdict.message.splitlines()
        assert "no gradient" not in first
        assert second.startswith("then, in the phase backward: ")


@pytest.mark.parametrize("gradients", [False, True])
def test_a_convolution_of_a_pending_sum_adds_its_bias_on_each_rank(pool: Pool, gradients: bool) -> None:
    tensors = (
        torch.arange(1.0, 13.0, dtype=torch.float64).view(1, 2, 6),
        torch.arange(1.0, 13.0, dtype=torch.float64).view(2, 2, 3),
        torch.tensor([1.0, 2.0], dtype=torch.float64),
    )
    made = tuple(tensor.requires_grad_(gradients) for tensor in tensors)
    case = OpCase("aten.convolution.default", "torch.nn.functional.conv1d", made)
    verdict = verdict_of(pool, case, ("P(sum)", "R", "R"), gradients)
    assert (verdict.kind, verdict.phase) == (VerdictKind.WRONG_VALUE, Phase.FORWARD), verdict
    assert ("then, in the phase backward" in verdict.message) is gradients
