"""What torch's planner is asked fails as torch is, and passes where torch is mended or not concerned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import _collective_utils as costs
from torch.distributed.tensor import _redistribute as redistribute_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch_versions import torch_is

from verifier.torch_internals.groups import leave_world
from verifier.torch_internals.recording import forget_calls
from verifier.torch_internals.redistributing.probes import ASKED, planners
from verifier.torch_internals.simulation import start_simulated_world

SEEN = {
    "triangle": r"S\(0\) -> S\(1\) costs \d+\.\d+ us, by way of R \d+\.\d+ us",
    "free": r"_S\(0, 2\) -> R on mesh dim 1 costs the graph planner 0 us",
    "history": r"P\(sum\) -> R: 2 collectives; after planning for a strided shard: 3 collectives",
    "executed": r"S\(0\) -> P\(sum\) is planned in 1 step, which raises a RuntimeError",
}


@pytest.fixture
def made() -> Iterator[Callable[..., DTensor]]:
    """Makes a replica on a mesh whose collectives transfer no data."""
    start_simulated_world(4)

    def make(*shape: int, flat: bool = False) -> DTensor:
        mesh: DeviceMesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
        if flat:
            mesh._flatten()
        return DTensor.from_local(torch.ones(8, 8), mesh, [Replicate()] * len(shape), run_check=False)

    try:
        yield make
    finally:
        forget_calls()
        leave_world()


@pytest.mark.parametrize("asked", SEEN)
def test_torch_lacks_it(made: Callable[..., DTensor], asked: str) -> None:
    if asked == "executed" and torch_is(">=2.14"):  # a shard is padded to a pending sum
        assert torch.equal(planners(made(2, 2), asked), made(2, 2))
        return
    with pytest.raises(RuntimeError, match=SEEN[asked]):
        planners(made(2, 2), asked)


def test_what_is_merged_is_not_predicted(made: Callable[..., DTensor]) -> None:
    with pytest.raises(RuntimeError, match=r"1 collective is executed; the cost is that of 2, \d+\.\d+ us"):
        planners(made(2, 2, flat=True), "predicted")
    assert torch.equal(planners(made(2, 2), "predicted"), made(2, 2)), "nothing is merged on a mesh without submeshes"


def test_no_other_plan_can_be_taken_up_on_one_mesh_dim(made: Callable[..., DTensor]) -> None:
    tensor = made(4)
    assert torch.equal(planners(tensor, "history").to_local(), tensor.to_local())


def mended(before: Any, after: Any, topology: Any, mesh_dim: int, size: float) -> tuple[float, float]:
    """Torch's function with an all-to-all that sends what it sends, and with gathers of strided shards."""
    ranks = topology.mesh_dim_devices[mesh_dim]
    if before != after and before.is_shard() and after.is_shard():
        return costs.allgather_cost(size / ranks, topology, mesh_dim), size
    if isinstance(before, _StridedShard) and after.is_replicate():
        return costs.allgather_cost(size * ranks, topology, mesh_dim), size * ranks
    return TORCHS(before, after, topology, mesh_dim, size)


TORCHS = costs._compute_placement_transition_cost


@pytest.mark.parametrize("asked", ["triangle", "free", "history"])
def test_a_mended_cost_model_passes(made: Callable[..., DTensor], monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    for module in (costs, redistribute_module):
        if hasattr(module, "_compute_placement_transition_cost"):
            monkeypatch.setattr(module, "_compute_placement_transition_cost", mended)
    tensor = made(2, 2)
    assert torch.equal(planners(tensor, asked).to_local(), tensor.to_local())


def test_a_planner_that_refuses_what_is_not_executed_passes(
    made: Callable[..., DTensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = redistribute_module.redistribute_local_tensor

    def executes_all(local: torch.Tensor, current: Any, target: Any, **options: Any) -> torch.Tensor:
        pending = any(one.is_partial() for one in target.placements)
        return local if pending else execute(local, current, target, **options)

    monkeypatch.setattr(redistribute_module, "redistribute_local_tensor", executes_all)
    tensor = made(2, 2)
    assert torch.equal(planners(tensor, "executed").to_local(), tensor.to_local())


def test_a_plain_tensor_has_no_planner() -> None:
    for asked in ASKED:
        assert torch.equal(planners(torch.ones(2), asked), torch.ones(2))
