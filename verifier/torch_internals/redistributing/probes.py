"""A program that asks torch's planner and cost model for a property that they should have, on ranks that are real.

Each function imports what it needs, so that its source can stand in a reproduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["ASKED", "PROGRAM", "planners"]

PROGRAM = "verifier.torch_internals.redistributing.probes.planners"

ASKED = ("triangle", "free", "history", "executed", "predicted")
"""The properties that :func:`planners` asks for, as ``graph --properties`` names them."""


def planners(input: torch.Tensor, asked: str) -> torch.Tensor:
    """Return a copy of ``input``; raise a RuntimeError if torch's planner lacks the property ``asked`` on its mesh.

    On a plain tensor there is no planner to ask.
    """
    if isinstance(input, DTensor):
        if asked == "triangle":
            no_detour_is_cheaper(input)
        elif asked == "free":
            no_gather_is_free(input)
        elif asked == "history":
            no_plan_depends_on_history(input)
        elif asked == "executed":
            each_plan_is_executed(input)
        elif asked == "predicted":
            predicted_is_executed(input)
        else:
            raise ValueError(f"{asked!r} is no property of planners")
    return input.clone()


def spec_like(input: DTensor, placements: Sequence[Placement]) -> DTensorSpec:
    """Return the spec of a tensor like ``input`` with other placements."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    mesh, meta = input.device_mesh, input._spec.tensor_meta
    # a strided shard that a view op makes is no shard order either
    return DTensorSpec(mesh, tuple(placements), meta, use_strided_shard_as_shard_order=False)


def forget_plans() -> None:
    """Let torch plan as if it had planned nothing before."""
    from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache

    clear_redistribute_planner_cache()
    _gen_transform_infos.cache_clear()


def no_detour_is_cheaper(input: DTensor) -> None:
    """No redistribution on the last mesh dim is dearer than one by way of another placement."""
    from torch.distributed.tensor._collective_utils import redistribute_cost

    forget_plans()
    before = [Replicate()] * (input.device_mesh.ndim - 1)
    ends = [Replicate(), *(Shard(dim) for dim in range(input.ndim))]
    cost = {
        (a, b): redistribute_cost(spec_like(input, [*before, a]), spec_like(input, [*before, b]))
        for a in ends
        for b in ends
        if a != b
    }
    for a, b in cost:
        for via in ends:
            if via not in (a, b) and cost[a, b] > cost[a, via] + cost[via, b] + 1e-9:
                raise RuntimeError(
                    f"{a} -> {b} costs {cost[a, b]:.2f} us, by way of {via} {cost[a, via] + cost[via, b]:.2f} us"
                )


def no_gather_is_free(input: DTensor) -> None:
    """No step of the graph planner from a shard to a replica costs nothing."""
    from torch.distributed.tensor._redistribute import DTensorRedistributePlanner
    from torch.distributed.tensor.placement_types import _StridedShard

    meta = input._spec.tensor_meta
    assert meta is not None
    planner = DTensorRedistributePlanner(input.device_mesh, meta)
    others = [Replicate()] * (input.device_mesh.ndim - 1)
    for shard in [Shard(0), _StridedShard(0, split_factor=2)] if input.ndim else []:
        if isinstance(shard, _StridedShard):
            planner.strided_shard_placements_in_target.add(shard)
        spec = spec_like(input, [*others, shard])
        for state, cost in planner.get_next_state(spec.placements, spec.shard_order).items():
            if all(one.is_replicate() for one in state.placements) and cost == 0:
                raise RuntimeError(f"{shard} -> R on mesh dim {len(others)} costs the graph planner 0 us")


def no_plan_depends_on_history(input: DTensor) -> None:
    """The graph planner takes the same collectives whether it has planned for a strided shard before or not."""
    from torch.distributed.tensor._redistribute import _gen_transform_infos, use_min_cost_redistribution_plan
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh, seen = input.device_mesh, list[str]()
    whole = [Replicate()] * mesh.ndim
    if not input.ndim:
        return
    summands = DTensor.from_local(input.to_local().clone(), mesh, [Partial()] * mesh.ndim, run_check=False)
    with use_min_cost_redistribution_plan():
        for planned_before in (False, True):
            forget_plans()
            if planned_before:
                strided = [_StridedShard(0, split_factor=2), *whole[1:]]
                _gen_transform_infos(spec_like(input, whole), spec_like(input, strided))
            try:
                with CommDebugMode() as counted:  # type: ignore[no-untyped-call]
                    summands.redistribute(placements=whole)
                seen.append(f"{counted.get_total_counts()} collectives")
            except AssertionError as error:
                seen.append(f"AssertionError: {error}")
    forget_plans()
    if seen[0] != seen[1]:
        raise RuntimeError(f"P(sum) -> R: {seen[0]}; after planning for a strided shard: {seen[1]}")


def each_plan_is_executed(input: DTensor) -> None:
    """What the greedy planner plans as steps with or without communication, redistribute_local_tensor executes."""
    from torch.distributed.tensor._redistribute import _gen_transform_infos, redistribute_local_tensor

    mesh = input.device_mesh
    if not input.ndim:
        return
    before = [Replicate()] * (mesh.ndim - 1)
    sharded = input.redistribute(placements=[*before, Shard(0)])
    for target in (Replicate(), Partial()):
        ends = spec_like(input, [*before, Shard(0)]), spec_like(input, [*before, target])
        forget_plans()
        planned = _gen_transform_infos(*ends, False)
        try:
            redistribute_local_tensor(sharded.to_local(), *ends)
        except RuntimeError as error:
            kind = type(error).__name__
            raise RuntimeError(f"S(0) -> {target} is planned in {len(planned)} step, which raises a {kind}") from None


def predicted_is_executed(input: DTensor) -> None:
    """The cost of a gather over all mesh dims is not the sum of more collectives than are executed."""
    from torch.distributed.tensor._collective_utils import redistribute_cost
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = input.device_mesh
    if not input.ndim:
        return
    layouts = [[Shard(0)] * (mesh.ndim - gathered) + [Replicate()] * gathered for gathered in range(mesh.ndim + 1)]
    forget_plans()
    predicted = redistribute_cost(spec_like(input, layouts[0]), spec_like(input, layouts[-1]))
    steps = [
        redistribute_cost(spec_like(input, layouts[mesh_dim]), spec_like(input, layouts[mesh_dim + 1]))
        for mesh_dim in range(mesh.ndim)
    ]
    sharded = input.redistribute(placements=layouts[0])
    with CommDebugMode() as counted:  # type: ignore[no-untyped-call]
        sharded.redistribute(placements=layouts[-1])
    executed = counted.get_total_counts()
    if executed < len(steps) and abs(predicted - sum(steps)) < 1e-9:
        raise RuntimeError(f"{executed} collective is executed; the cost is that of {len(steps)}, {predicted:.2f} us")
