"""Defects of torch's planners of redistributions and its cost model, shown with torch alone on gloo ranks.

``python benchmarks/planner_defects.py NAME`` ends with status 1 if the defect was seen, 0 if not, 2 for anything else.
"""

import argparse
import logging
import os
import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._collective_utils import redistribute_cost
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import (
    _gen_transform_infos,
    clear_redistribute_planner_cache,
    use_min_cost_redistribution_plan,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.multiprocessing import spawn

SIZE = 8


def spec_of(mesh, placements):
    meta = TensorMeta(torch.Size((SIZE, SIZE)), (SIZE, 1), torch.float32)
    # a strided shard that a view op makes is no shard order either
    return DTensorSpec(mesh, placements, meta, use_strided_shard_as_shard_order=False)


def free_strided_gather(mesh):
    """The graph planner takes the all-gather of a strided shard for free, so its path has one collective too many.

    It has it only after the planner has planned a redistribution to a strided shard: plans depend on history.
    """
    summands = DTensor.from_local(torch.ones(SIZE, SIZE), mesh, [Partial(), Partial()], run_check=False)
    counts = []
    with use_min_cost_redistribution_plan():
        for planned_before in (False, True):
            clear_redistribute_planner_cache()
            _gen_transform_infos.cache_clear()
            if planned_before:
                _gen_transform_infos(
                    spec_of(mesh, (Replicate(), Replicate())),
                    spec_of(mesh, (_StridedShard(0, split_factor=2), Shard(1))),
                )
            with CommDebugMode() as counted:
                whole = summands.redistribute(placements=[Replicate(), Replicate()])
            assert torch.equal(whole.to_local(), torch.full((SIZE, SIZE), float(mesh.size())))
            counts.append(counted.get_total_counts())
    return counts[0] != counts[1], f"collectives of the same redistribution: {counts[0]}, later {counts[1]}"


def triangle(mesh):
    """The cost of a redistribution is higher than that of a detour."""
    sharded, rows, whole = (spec_of(mesh, (Replicate(), p)) for p in (Shard(0), Shard(1), Replicate()))
    direct = redistribute_cost(sharded, rows)
    detour = redistribute_cost(sharded, whole) + redistribute_cost(whole, rows)
    seen = f"(R, S(0)) -> (R, S(1)) costs {direct:.4f} us, by way of (R, R) {detour:.4f} us"
    return direct > detour, f"{seen}, with tensors of {SIZE}x{SIZE}"


def merged_not_predicted(mesh):
    """The cost of a redistribution is that of two collectives, but one is executed."""
    mesh["a", "b"]._flatten("a_b")
    tensor = distribute_tensor(torch.arange(float(SIZE * SIZE)).view(SIZE, SIZE), mesh, [Shard(0), Shard(0)])
    ends = spec_of(mesh, (Shard(0), Shard(0))), spec_of(mesh, (Replicate(), Replicate()))
    half = spec_of(mesh, (Shard(0), Replicate()))
    predicted = redistribute_cost(*ends)
    summed = redistribute_cost(ends[0], half) + redistribute_cost(half, ends[1])
    with CommDebugMode() as counted:
        tensor.redistribute(placements=[Replicate(), Replicate()])
    executed = counted.get_total_counts()
    seen = f"predicted {predicted:.4f} us, the sum of two gathers is {summed:.4f} us; {executed} is executed"
    return executed == 1 and abs(predicted - summed) < 1e-9, seen


def planned_but_refused(mesh):
    """The greedy planner plans S -> P as one step, which redistribute_local_tensor refuses to execute."""
    from torch.distributed.tensor._redistribute import redistribute_local_tensor

    ends = spec_of(mesh, (Replicate(), Shard(0))), spec_of(mesh, (Replicate(), Partial()))
    planned = _gen_transform_infos(*ends, False)
    try:
        redistribute_local_tensor(torch.ones(SIZE // mesh.size(1), SIZE), *ends)
    except RuntimeError as error:
        return True, f"{len(planned)} step planned, then: {error}"
    return False, "executed"


DEFECTS = {one.__name__: one for one in (free_strided_gather, triangle, merged_not_predicted, planned_but_refused)}


def on_a_rank(rank, name, store, results):
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", rank=rank, world_size=8, store=dist.FileStore(store, 8))
    seen, text = DEFECTS[name](init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b")))
    everywhere = [None] * 8
    dist.all_gather_object(everywhere, seen)
    if rank == 0:
        with open(results, "w") as file:
            file.write(f"{int(all(everywhere))} {text}")
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=DEFECTS)
    name = parser.parse_args().name
    with tempfile.TemporaryDirectory() as folder:
        results = os.path.join(folder, "results")
        try:
            spawn(on_a_rank, (name, os.path.join(folder, "store"), results), nprocs=8)
            with open(results) as file:
                seen, _, text = file.read().partition(" ")
        except Exception:  # noqa: BLE001 - anything else is no defect that was seen
            traceback.print_exc()
            return 2
    print(f"torch {torch.__version__}, 8 gloo ranks, mesh 2x4: {text}")
    return int(seen)


if __name__ == "__main__":
    sys.exit(main())
