"""A dtype that torch's local kernel gives to empty tensors is not a mistake of a rule."""

from __future__ import annotations

import pytest
import torch
from run_factory import make_finding
from torch.distributed.tensor import Replicate, Shard

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.findings.kernels import is_dtype_of_empty_shards
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
