"""Where exact values stop being exact: on the way from Replicate to a Partial."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Replicate

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Redistribution
from verifier.core.verdict import Phase
from verifier.oracle.reference import make_reference
from verifier.oracle.tolerance import case_tolerance

DIVIDED = Redistribution(Phase.FORWARD, "R", "P(sum)", 0, None, 8, ("R", "P(sum)"))
REDUCED = replace(DIVIDED, source="P(sum)", target="R", collective="all_reduce")


@pytest.mark.parametrize(
    ("dtype", "ranks", "step", "exact"),
    [
        (torch.bfloat16, 8, DIVIDED, False),  # 101 + 5/8 takes 10 digits, bfloat16 has 8
        (torch.float16, 2, DIVIDED, False),
        (torch.float32, 8, DIVIDED, True),
        (torch.float64, 3, DIVIDED, False),
        (torch.bfloat16, 8, REDUCED, True),
    ],
)
def test_a_share_of_a_value_may_round(dtype: torch.dtype, ranks: int, step: Redistribution, exact: bool) -> None:
    case = OpCase("aten.relu.default", "torch.relu", (torch.ones(3, dtype=dtype),), {}, exact=True)
    trial = Trial(case, MeshSpec((ranks,)), ((Replicate(),),), (), 0)
    allowed = case_tolerance(trial, make_reference(case), torch.ones(3, dtype=dtype), [step])
    assert (allowed == 0.0) is exact


def test_a_gradient_has_the_rounding_of_a_narrower_result_that_it_came_through() -> None:
    values = torch.arange(3, dtype=torch.float64, requires_grad=True)
    third = torch.full((3,), 1 / 3, dtype=torch.float64)

    def allowed(dtype: torch.dtype) -> float:
        case = OpCase(
            "aten._to_copy.default", "torch.ops.aten._to_copy.default", (values,), {"dtype": dtype}, "", False
        )
        trial = Trial(case, MeshSpec((2,)), ((Replicate(),),))
        return case_tolerance(trial, make_reference(case), third, [])

    assert allowed(torch.float64) < 1e-14
    assert 1e-7 < allowed(torch.float32) < 1e-5
