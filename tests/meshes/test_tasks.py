"""Functions that every rank calls: what comes back, and which exception counts as the cause."""

from __future__ import annotations

import pytest

from verifier.core.case import MeshSpec
from verifier.core.observation import Fate, Raised
from verifier.core.verdict import Phase
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool, PoolSet
from verifier.meshes.tasks import Task, TaskOutcome

pytestmark = pytest.mark.ranks

MESH = MeshSpec((2,))


def test_what_each_rank_returns_comes_back_in_order(mesh_pools: PoolSet) -> None:
    outcome = mesh_pools.of(MESH).call(Task("torch.distributed.device_mesh.DeviceMesh.get_rank", (), MESH))
    assert outcome.ok
    assert outcome.returned == (0, 1)
    assert outcome.failure() is None


def test_meshes_of_one_world_have_the_names_that_a_task_asks_for(mesh_pools: PoolSet) -> None:
    pool = mesh_pools.of(MESH)
    for names in (("left",), ("right",), ("left",)):
        task = Task("torch.distributed.device_mesh.DeviceMesh.get_local_rank", (names[0],), MESH, names)
        assert pool.call(task).returned == (0, 1)
    wrong = pool.call(Task("torch.distributed.device_mesh.DeviceMesh.get_local_rank", ("up",), MESH, ("left",)))
    assert wrong.fate in (Fate.COMPLETED, Fate.STUCK)
    assert not wrong.ok
    assert pool.call(Task("torch.distributed.device_mesh.DeviceMesh.get_rank", (), MESH)).ok


def test_function_that_does_not_exist(mesh_pools: PoolSet) -> None:
    outcome = mesh_pools.of(MESH).call(Task("torch.nothing_there", (), MESH))
    found = outcome.failure()
    assert found is not None
    assert found[1].type == "ValueError"
    assert "torch.nothing_there" in found[1].message


@pytest.mark.parametrize(
    ("mesh", "message"),
    [(MeshSpec((4,)), "mesh 4 does not fit a pool of "), (MeshSpec((2,), "nccl", "cuda"), "does not fit a pool of ")],
)
def test_mesh_that_does_not_fit(mesh: MeshSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pool(PoolKey.of(MESH)).call(Task("torch.nothing", (), mesh))


def test_simulated_ranks_call_nothing() -> None:
    mesh = MeshSpec((2,), "simulated")
    with pytest.raises(ValueError, match="needs a process for each of them"):
        Pool(PoolKey.of(mesh)).call(Task("torch.nothing", (), mesh))


def test_lost_connections_are_no_cause() -> None:
    lost = Raised(Phase.FORWARD, "RuntimeError", "[...] Connection closed by peer [127.0.0.1]:1", cut_off=True)
    cause = Raised(Phase.FORWARD, "IndexError", "out of range")
    assert TaskOutcome(Fate.STUCK, (None, None), (lost, cause)).failure() == (1, cause)
    assert TaskOutcome(Fate.STUCK, (None, None), (lost, None)).failure() == (0, lost)
    assert not TaskOutcome(Fate.STUCK, (None, None), (lost, cause)).ok
