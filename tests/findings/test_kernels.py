"""What torch does by itself is no mistake of a rule: a dtype of empty tensors, and a gradient of zeros."""

from __future__ import annotations

import pytest
import torch
from run_factory import make_finding
from torch.distributed.tensor import Replicate, Shard

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.findings.grouping import ZEROS_OF_AUTOGRAD
from verifier.findings.kernels import is_dtype_of_empty_shards, is_zeros_of_autograd
from verifier.records.schema import FindingRecord
from verifier.records.values import trial_record


def finding(op: str, *args: object, dim: int | None = 1, verdict: str = "WRONG_DTYPE") -> FindingRecord:
    case = OpCase(op=op, call=f"torch.ops.{op}", args=args, kwargs={}, family="opinfo")
    placement = Replicate() if dim is None else Shard(dim)
    trial = Trial(case, MeshSpec.parse("3"), ((placement,),))
    return make_finding(op=op, verdict=verdict, trial=trial_record(trial))


def test_the_mask_of_an_empty_shard_is_made_by_the_kernel() -> None:
    assert is_dtype_of_empty_shards(finding("aten.native_dropout.default", torch.ones(6, 4), 0.0, True))


@pytest.mark.parametrize(
    "one",
    [
        finding("aten.native_dropout.default", torch.ones(6, 6), 0.0, True),
        finding("aten.native_dropout.default", torch.ones(6, 4), 0.0, True, dim=None),
        finding("aten.native_dropout.default", torch.ones(6, 4), 0.0, True, verdict="WRONG_SHAPE"),
        finding("aten.exp.default", torch.ones(6, 4)),
    ],
    ids=["no empty shard", "replicated", "another verdict", "a kernel that keeps the dtype"],
)
def test_any_other_dtype_stays_a_mistake(one: FindingRecord) -> None:
    assert not is_dtype_of_empty_shards(one)


def zeros(op: str, *groups: str) -> FindingRecord:
    return make_finding(op=op, verdict="WRONG_GRADIENT", groups=[*groups])


def test_zeros_that_autograd_makes_are_torchs_for_an_op_of_torch() -> None:
    group = str(ZEROS_OF_AUTOGRAD)
    assert is_zeros_of_autograd(zeros("aten.avg_pool2d_backward.default", group))
    assert not is_zeros_of_autograd(zeros("mine.scale.default", group))  # whose formula is the user's
    assert not is_zeros_of_autograd(zeros("aten.eq_.Scalar", "aten.eq_.Scalar | WRONG_GRADIENT | backward | self.grad"))
