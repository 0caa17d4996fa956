"""An op that communicates by itself has no results of one process to be judged by."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fault_trials import MESH
from torch.distributed.tensor import Shard

from verifier.core.case import OpCase, Trial
from verifier.core.observation import Raised
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool

pytestmark = pytest.mark.ranks

OPS = """
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding


def total(x: torch.Tensor, among: bool) -> torch.Tensor:
    total = x.sum(0)
    if among and dist.is_initialized():
        dist.all_reduce(total)
    return total


torch.library.custom_op("communicating::total", total, mutates_args=())
torch.library.register_fake("communicating::total", lambda x, among: x.new_empty(x.shape[1:]))


@register_sharding(torch.ops.communicating.total.default)
def rules(x, among):
    return [([Replicate()], [Shard(0), None])]
"""


def test_an_op_that_communicates_is_not_judged(tmp_path: Path) -> None:
    file = tmp_path / "communicating.py"
    file.write_text(OPS)
    name = "communicating.total.default"
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64)
    with Pool(PoolKey.of(MESH), [str(file)]) as pool:

        def raised(among: bool) -> list[Raised | None]:
            case = OpCase(name, f"torch.ops.{name}", (x, among))
            (observation,) = pool.run([Trial(case, MESH, ((Shard(0),),))])
            return [report.raised for report in observation.reports if report is not None]

        for one in raised(True):
            assert one is not None
            assert one.refusal
            assert f"{name} communicates by itself" in one.message
        assert raised(False) == [None, None]
