"""An all-reduce of complex numbers by product, minimum or maximum is refused in words under the remedy, whatever torch.

Torch 2.15 fails an internal assertion while it makes the message of the refusal.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.tensor import Partial
from torch_versions import torch_is

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.verdict import VerdictKind
from verifier.meshes.pool import Pool, PoolSet
from verifier.meshes.remedied import run_remedied
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge

pytestmark = pytest.mark.ranks

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
