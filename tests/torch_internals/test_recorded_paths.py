"""The recorder tells what a redistribution is of, who asked for it, and what DTensor merged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from verifier.torch_internals.groups import is_flattened, leave_world, mesh_of_world
from verifier.torch_internals.recording import RedistributionRecorder, Step, forget_calls
from verifier.torch_internals.simulation import start_simulated_world
from verifier.torch_internals.watching import CollectiveWatch, Issued


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh 2x2 whose collectives transfer no data: only what is recorded is of interest."""
    start_simulated_world(4)
    try:
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    finally:
        forget_calls()
        leave_world()


def tensor(mesh: DeviceMesh, *placements: Placement) -> DTensor:
    shards = [d for d, one in enumerate(placements) if isinstance(one, Shard)]
    local = torch.ones(8 // 2 ** len(shards), 4)
    return DTensor.from_local(local, mesh, placements, run_check=False)


def vector(mesh: DeviceMesh) -> DTensor:
    """Return a tensor with one dim, which a scan gathers; of a matrix, torch 2.15 shards the other dim."""
    return DTensor.from_local(torch.ones(4), mesh, (Shard(0), Replicate()), run_check=False)


def recorded(mesh: DeviceMesh, source: tuple[Placement, ...], target: tuple[Placement, ...]) -> list[Step]:
    value = tensor(mesh, *source)
    with RedistributionRecorder().recording() as recorder:
        value.redistribute(placements=target)
    return recorder.steps


def test_steps_tell_their_redistribution(mesh: DeviceMesh) -> None:
    first, second = recorded(mesh, (Shard(0), Shard(0)), (Replicate(), Replicate()))
    assert (first.tensor, first.explicit, first.begins) == ("float32[8, 4]", True, True)
    assert (second.tensor, second.explicit, second.begins) == ("float32[8, 4]", True, False)
    assert (first.path, first.target, second.target) == (("(S(0), S(0))", "(R, R)"), "(S(0), R)", "(R, R)")


def test_placements_of_another_mesh_are_not_recorded(mesh: DeviceMesh) -> None:
    """torch 2.13.0 takes more placements than the mesh has dims; a record with them could not be read back."""
    value = tensor(mesh, Shard(0), Replicate())
    with RedistributionRecorder().recording() as recorder, contextlib.suppress(Exception):
        value.redistribute(placements=[Replicate()] * 3)
    assert recorder.steps == []


def test_a_redistribution_for_an_op_is_implicit(mesh: DeviceMesh) -> None:
    one, other = tensor(mesh, Shard(0), Replicate()), tensor(mesh, Partial(), Replicate())
    with RedistributionRecorder().recording() as recorder:
        one * other
    assert recorder.steps
    assert not any(step.explicit for step in recorder.steps)
    assert recorder.steps[0].begins


def test_what_dtensor_merges_is_one_step(mesh: DeviceMesh) -> None:
    mesh["a", "b"]._flatten("a_b")
    (step,) = recorded(mesh, (Shard(0), Shard(0)), (Replicate(), Replicate()))
    assert (step.collective, step.source, step.target, step.bytes) == ("all_gather", "(S(0), S(0))", "(R, R)", 32)


def test_a_step_tells_whether_its_mesh_has_all_its_flattened_submeshes(mesh: DeviceMesh) -> None:
    moved = (Shard(0), Replicate()), (Replicate(), Replicate())
    assert {step.mesh for step in recorded(mesh, *moved)} == {"2x2"}
    assert {step.mesh for step in recorded(mesh_of_world("cpu", (2, 2), flat=True), *moved)} == {"2x2+flat"}
    assert not is_flattened(mesh)
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    cube["a", "b"]._flatten()
    assert not is_flattened(cube)
    flat = mesh_of_world("cpu", (2, 1, 2), "fake", ("x", "y", "z"), flat=True)
    assert sorted(flat._flatten_mapping) == ["x_y", "x_y_z", "x_z", "y_z"]
    assert is_flattened(flat)
    assert not is_flattened(flat["x"])


def test_what_one_op_gathers_and_the_next_shards_again_is_told(mesh: DeviceMesh) -> None:
    rows = vector(mesh)
    with RedistributionRecorder().recording() as recorder:
        torch.cumsum(rows, 0) * rows
    gather, back = recorder.steps
    assert (gather.by, gather.collective, gather.undoes) == ("aten.cumsum.default", "all_gather", "")
    assert (back.by, back.collective, back.undoes) == ("aten.mul.Tensor", None, "aten.cumsum.default")

    recorder.clear()
    with recorder.recording():
        torch.cumsum(rows, 0)
        rows.redistribute(placements=[Replicate(), Replicate()]).redistribute(placements=rows.placements)
    assert not any(step.undoes for step in recorder.steps), "the caller asked for both"


def test_a_tensor_that_is_redistributed_twice_in_the_same_way_is_told(mesh: DeviceMesh) -> None:
    rows = vector(mesh)
    with RedistributionRecorder().recording() as recorder:
        torch.cumsum(rows, 0)
        torch.cumprod(rows, 0)
        torch.cumsum(rows * 1, 0)
    first, second, other = recorder.steps
    assert (first.repeats, second.repeats, other.repeats) == ("", "aten.cumsum.default", "")

    recorder.clear()
    with recorder.recording():
        torch.cumsum(rows, 0)
        rows.add_(1)
        torch.cumsum(rows, 0)
    assert not any(step.repeats for step in recorder.steps), "it has other values now"

    recorder.clear()
    with recorder.recording():
        for _ in range(2):
            rows.redistribute(placements=[Replicate(), Replicate()])
    assert not any(step.repeats for step in recorder.steps), "the caller asked for both"


# --------------------------------------------------------------------------------------------------- what really ran
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((Shard(0), Shard(1)), (Replicate(), Replicate())),
        ((Shard(0), Replicate()), (Shard(1), Replicate())),
        ((Partial(), Partial()), (Shard(0), Replicate())),
        ((Partial(), Replicate()), (Replicate(), Shard(1))),
        ((Replicate(), Replicate()), (Shard(0), Shard(1))),
    ],
)
def test_issued_collectives_are_those_that_a_dispatch_mode_sees(
    mesh: DeviceMesh, source: tuple[Placement, ...], target: tuple[Placement, ...]
) -> None:
    packet = torch.ops._c10d_functional.all_reduce
    seen: list[str] = []
    with CollectiveWatch(lambda name, _: seen.append(name)):
        first, *others = recorded(mesh, source, target)
    assert [one.name for one in first.issued] == seen
    assert not any(step.issued or step.peak for step in others), "the first step has what the whole redistribution did"
    assert first.seconds > 0
    assert torch.ops._c10d_functional.all_reduce is packet, "the watch takes itself back"


def test_issued_collectives_have_their_group_dtype_and_bytes_with_padding(mesh: DeviceMesh) -> None:
    """Of 5 rows rank 0 holds 3, and gathers 2 x 3. The gather of the other mesh dim has no padding."""
    rows = DTensor.from_local(
        torch.ones(3, 2), mesh, [Shard(0), Shard(1)], run_check=False, shape=torch.Size((5, 4)), stride=(4, 1)
    )
    with RedistributionRecorder().recording() as recorder:
        rows.redistribute(placements=[Replicate(), Replicate()])
    columns_first, rows_last = recorder.steps[0].issued
    assert columns_first == Issued("all_gather_into_tensor", (0, 1), "float32", 24, 48)
    assert rows_last == Issued("all_gather_into_tensor", (0, 2), "float32", 48, 96)
    assert recorder.steps[0].peak == 24 + 48 + 96, "the local tensor, and what the second gather takes and gives"


def test_a_recorder_that_does_not_measure_has_the_steps_alone(mesh: DeviceMesh) -> None:
    value = tensor(mesh, Shard(0), Replicate())
    recorder = RedistributionRecorder(measures=False)
    with recorder.recording():
        value.redistribute(placements=[Replicate(), Replicate()])
    (step,) = recorder.steps
    assert (step.issued, step.peak, step.seconds) == ((), 0, 0.0)


def test_a_redistribution_that_raises_leaves_no_watch(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    packet = torch.ops._c10d_functional.all_gather_into_tensor

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("broken")

    monkeypatch.setattr(Shard, "_to_replicate_tensor", broken)
    value = tensor(mesh, Shard(0), Replicate())
    with RedistributionRecorder().recording() as recorder, pytest.raises(RuntimeError, match="broken"):
        value.redistribute(placements=[Replicate(), Replicate()])
    assert recorder.steps[0].issued == ()
    assert torch.ops._c10d_functional.all_gather_into_tensor is packet
