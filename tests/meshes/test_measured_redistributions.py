"""What ranks really do in a redistribution is recorded beside torch's plan, on ranks that are processes."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Issued
from verifier.core.verdict import Phase
from verifier.meshes.pool import PoolSet


def exchanged(mesh: MeshSpec) -> Trial:
    """Return the redistribution of the rows of a matrix to its columns."""
    tensor = torch.arange(12.0).view(3, 4)
    case = OpCase("dtensor.redistribute", "strategies.redistribution.programs.chain", (tensor, [[Shard(1)]]))
    return Trial(case, mesh, ((Shard(0),),), (((Replicate(),),),))


@pytest.mark.ranks
def test_an_all_to_all_is_issued_as_an_all_gather_on_gloo(mesh_pools: PoolSet) -> None:
    """Rank 0 holds 2 of 3 rows, and gathers 2 x 2 with padding. Rank 1 measures nothing; nor are gathers measured."""
    zeroth, first = mesh_pools.run_alone(exchanged(MeshSpec((2,)))).reports
    assert zeroth is not None
    assert first is not None
    (there,) = [one for one in zeroth.redistributions if one.phase is Phase.FORWARD]
    assert there.collective == "all_to_all"
    assert there.issued == (Issued("all_gather_into_tensor", (0, 1), "float32", 32, 64),)
    assert there.peak == 32 + 64 + 24, "the local tensor, what is gathered, and the columns that are kept"
    assert there.seconds > 0
    for one in (*first.redistributions, *zeroth.redistributions):
        if one is not there:
            assert (one.issued, one.peak, one.seconds) == ((), 0, 0.0)


@pytest.mark.ranks
def test_simulated_ranks_issue_nothing(mesh_pools: PoolSet) -> None:
    (report,) = mesh_pools.run_alone(exchanged(MeshSpec.parse("simulated:2"))).reports
    assert report is not None
    steps = [one for one in report.redistributions if one.phase is Phase.FORWARD]
    assert steps
    assert not any(one.issued or one.peak or one.seconds for one in steps)
