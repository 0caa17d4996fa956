"""An all-reduce of complex numbers by product, minimum or maximum is refused in words under the remedy, whatever torch.

Torch 2.15 fails an internal assertion while it makes the message of the refusal.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Partial
from torch_versions import torch_is

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.verdict import VerdictKind
from verifier.findings.attribution import Attribution
from verifier.findings.failures import Failure
from verifier.gate.baseline import load_baseline
from verifier.meshes.pool import Pool, PoolSet
from verifier.meshes.remedied import run_remedied
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge

pytestmark = pytest.mark.ranks

BASELINE = load_baseline(Path(__file__).resolve().parents[2] / "reports" / "baseline.toml")
REMEDY = "complex-reductions-that-assert"
COMPLEX = torch.tensor([1 + 2j, 2 - 1j], dtype=torch.complex128)


@pytest.fixture(scope="module")
def pools() -> Iterator[PoolSet]:
    pools = PoolSet(Pool)
    yield pools
    pools.close()


def verdict(pools: PoolSet, values: torch.Tensor, reduction: str, *remedies: str) -> VerdictKind:
    """Return the verdict of ``exp``, before which DTensor reduces its argument."""
    case = OpCase("aten.exp.default", "torch.ops.aten.exp.default", (values,), {}, "opinfo", exact=False)
    trial = Trial(case, MeshSpec((2,)), ((Partial(reduction),),))
    return judge(run_remedied(pools, trial, remedies), make_reference(case)).kind


def test_torch_refuses_plainly_or_asserts_and_is_mended(pools: PoolSet) -> None:
    asserts = torch_is(">=2.15")
    assert verdict(pools, COMPLEX, "product") is (VerdictKind.CRASH if asserts else VerdictKind.UNSUPPORTED)
    assert verdict(pools, COMPLEX, "product", REMEDY) is VerdictKind.UNSUPPORTED


def test_what_torch_can_reduce_is_reduced(pools: PoolSet) -> None:
    assert verdict(pools, COMPLEX, "sum", REMEDY) is VerdictKind.PASS
    assert verdict(pools, COMPLEX.real.contiguous(), "product", REMEDY) is VerdictKind.PASS


def test_a_wrong_rule_of_complex_products_is_known_although_what_is_right_asserts(pools: PoolSet) -> None:
    """Without the wrong rule DTensor reduces the product first, which no collective does."""
    call = "torch.ops.aten.view_as_real.default"
    case = OpCase("aten.view_as_real.default", call, (COMPLEX,), {}, "opinfo", exact=False)
    trial = Trial(case, MeshSpec((2,)), ((Partial("product"),),), seed=1)
    observation = pools.run_alone(trial)
    failure = Failure(trial, observation, judge(observation, make_reference(case)))
    assert failure.verdict.kind is VerdictKind.WRONG_VALUE
    causes = Attribution.of(BASELINE, partial(run_remedied, pools)).explain(failure)
    asserting = [REMEDY] if torch_is(">=2.15") else []
    assert [cause.remedy for cause in causes] == ["products-of-complex-parts", *asserting]
