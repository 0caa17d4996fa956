"""Torch's planners and cost model, on a mesh that has no process group."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed._mesh_layout import _MeshLayout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _redistribute as redistribute_module
from torch.distributed.tensor._collective_utils import (
    MeshTopoInfo,
    _compute_placement_transition_cost,
    allgather_cost,
    redistribute_cost,
)
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import Partial, Placement, Shard, _StridedShard

from verifier.torch_internals.groups import submeshes_of_several_dims
from verifier.torch_internals.placements import Placements

__all__ = ["Ordered", "PlannedStep", "Planner", "PlannerName", "Refused"]

PlannerName = Literal["default", "greedy", "graph"]
"""``default`` is what a user gets who sets nothing: greedy, and graph for other than default shard orders."""

Ordered = tuple[Placements, tuple[tuple[int, tuple[int, ...]], ...]]
"""Placements, and for each sharded tensor dim the mesh dims in the order in which they shard it."""


class Refused(Exception):  # noqa: N818 - what the planner did
    """Torch's planner raised an exception."""


@dataclass(frozen=True)
class PlannedStep:
    """A step of a plan, after torch has merged what it merges: placements change on ``mesh_dims``.

    ``executed`` is False if torch raises an exception when it executes the step, which the greedy planner plans all the
    same: from a shard to a Partial. From 2.14 on, torch executes it if the Partial is a sum.
    """

    mesh_dims: tuple[int, ...]
    before: Placement
    after: Placement
    collective: str | None
    executed: bool = True


_PADS = hasattr(Shard, "_to_partial_tensor")
"""Whether torch makes a pending sum of a shard, by zeros in the place of other shards: from 2.14 on, on request."""

GraphPlanner = Callable[[Ordered, Ordered], tuple[PlannedStep, ...]]
"""Plans with one of torch's graph planners, which keeps what its plans leave in it."""


class Planner:
    """Asks torch's planners about redistributions of a tensor on a mesh.

    Parameters
    ----------
    flattened
        Whether the mesh has all its flattened submeshes, for which torch merges collectives.
    """

    def __init__(
        self, mesh_shape: Sequence[int], shape: Sequence[int], dtype: torch.dtype, flattened: bool = False
    ) -> None:
        ranks = torch.arange(math.prod(mesh_shape)).view(tuple(mesh_shape))
        names = tuple(f"dim{d}" for d in range(len(mesh_shape)))
        self.mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=0)
        if flattened:
            self._flatten()
        stride = torch.empty(tuple(shape), device="meta").stride()
        self._meta = TensorMeta(torch.Size(shape), stride, dtype)
        self._bytes = math.prod(shape) * dtype.itemsize
        self._topology = MeshTopoInfo.build_from_mesh(self.mesh)
        self._specs: dict[Ordered, DTensorSpec] = {}
        self._planner = _Remembering(self.mesh, self._meta)

    def _flatten(self) -> None:
        """Give the mesh its flattened submeshes; torch's own way to make them needs a process group."""
        for dims in submeshes_of_several_dims(self.mesh):
            layout = _MeshLayout([self.mesh._get_slice_mesh_layout(dims).collapse()])
            name = "_".join(dims)
            flat = DeviceMesh("cpu", range(layout.numel()), mesh_dim_names=(name,), _init_backend=False, _rank=0)
            flat._layout = layout
            self.mesh._flatten_mapping[name] = flat

    def link(self, mesh_dim: int) -> tuple[float, float]:
        """Return the latency of a hop in seconds and the bandwidth in bytes a second that torch assumes."""
        gigabytes = self._topology.mesh_dim_bandwidth[mesh_dim]
        return self._topology.mesh_dim_latency[mesh_dim] * 1e-6, gigabytes * 2**30

    def plan(self, source: Ordered, target: Ordered, planner: PlannerName = "default") -> tuple[PlannedStep, ...]:
        """Return the steps that torch would take.

        Raises
        ------
        Refused
            If torch raises an exception.
        """
        first, last = self._spec(source), self._spec(target)
        wanted = {"default": None, "greedy": False, "graph": True}[planner]
        with _planning_with(self._planner), _quiet():
            try:
                infos = redistribute_module._gen_transform_infos_non_cached(first, last, wanted)
                infos = redistribute_module._optimize_transform_infos(
                    infos, self.mesh, first.placements, last.placements
                )
            except (AssertionError, RuntimeError, ValueError, NotImplementedError, KeyError, IndexError) as error:
                raise Refused(f"{type(error).__name__}: {error}") from error
        return tuple(map(self._planned, infos))

    def graph_planner(self, history: Sequence[tuple[Ordered, Ordered]], backwards: bool = False) -> GraphPlanner:
        """Return a new graph planner of torch that has planned ``history``.

        With ``backwards``, the planner's sets are iterated in the opposite order, as under another hash seed.
        """
        planner = _Remembering(self.mesh, self._meta)
        if not backwards:
            planner.known = self._planner.known
        else:
            planner.partial_reduce_ops_in_target = _Backwards()
            planner.strided_shard_placements_in_target = _Backwards()

        def plan(source: Ordered, target: Ordered) -> tuple[PlannedStep, ...]:
            first, last = self._spec(source), self._spec(target)
            infos = planner.generate_graph_based_transform_infos(first, last, first.shape)
            return tuple(map(self._planned, infos))

        for source, target in history:
            plan(source, target)
        return plan

    def predicted(self, source: Ordered, target: Ordered) -> float:
        """Return the seconds that torch's ``redistribute_cost`` gives for a redistribution."""
        redistribute_module._gen_transform_infos.cache_clear()
        with _planning_with(self._planner), _quiet():
            return float(redistribute_cost(self._spec(source), self._spec(target))) * 1e-6

    def moves(self, source: Ordered, targets: Sequence[Ordered]) -> Mapping[Ordered, float]:
        """Return the layouts that the graph planner reaches from ``source`` in one step, with torch's seconds.

        ``targets`` are the placements to which a redistribution may go: Partial and strided shards that occur in none
        are in no step.
        """
        self._planner.forget()
        spec = self._spec(source)
        for placements, _ in (source, *targets):
            self._planner.expect(placements)
        states = self._planner.get_next_state(spec.placements, spec.shard_order)
        if _PADS:
            start = self._planner.DistState(spec.placements, spec.shard_order)
            for target in targets:
                last = self._spec(target)
                wanted = self._planner.DistState(last.placements, last.shard_order)
                states |= self._planner._get_shard_to_partial_target_states(start, wanted)  # type: ignore[attr-defined]
        return {
            (state.placements, _order(state.tensor_dim_to_mesh_dim)): float(cost) * 1e-6
            for state, cost in states.items()
        }

    def step_cost(
        self, kind: str, mesh_dims: tuple[int, ...], before: Placement, after: Placement, shards: int
    ) -> float:
        """Return the seconds that torch's cost model gives for a step of a tensor in ``shards`` shards.

        Where torch has no such step, its formula of the nearest collective is asked. A merged collective is one over
        as many ranks as its mesh dims have together, at the slowest of their links. A permute is an all-gather of two
        ranks.
        """
        size = self._bytes / shards / 2**30
        if not mesh_dims:
            return 0.0
        topology = self._topology
        extent = math.prod(topology.mesh_dim_devices[d] for d in mesh_dims)
        merged = MeshTopoInfo(
            self.mesh,
            [2 if kind == "permute" else extent],
            [min(topology.mesh_dim_bandwidth[d] for d in mesh_dims)],
            [max(topology.mesh_dim_latency[d] for d in mesh_dims)],
        )
        if kind == "permute":
            return float(allgather_cost(2 * size, merged, 0)) * 1e-6
        if before == after:  # an all-to-all that changes the shard order only
            return float(allgather_cost(size, merged, 0) + 1.0) * 1e-6
        # torch multiplies the bytes by the size of the group itself
        cost, _ = _compute_placement_transition_cost(before, after, merged, 0, size)
        return float(cost) * 1e-6

    def _planned(self, info: Any) -> PlannedStep:
        dims = getattr(info, "original_mesh_dims", (info.mesh_dim,))
        before, after = info.src_dst_placements
        cost, _ = _compute_placement_transition_cost(before, after, self._topology, dims[0], 1.0)
        pads = _PADS and isinstance(before, Shard) and type(after) is Partial and after.reduce_op == "sum"
        return PlannedStep(tuple(dims), before, after, info._comm_type_key(), pads or cost != math.inf)

    def _spec(self, layout: Ordered) -> DTensorSpec:
        if layout not in self._specs:
            placements, order = layout
            self._specs[layout] = DTensorSpec(
                self.mesh,
                placements,
                self._meta,
                shard_order=tuple(ShardOrderEntry(dim, dims) for dim, dims in order),
                use_strided_shard_as_shard_order=False,
            )
        return self._specs[layout]


class _Remembering(redistribute_module.DTensorRedistributePlanner):
    """Torch's planner, which remembers the next states of a state; torch works them out whenever it comes by.

    Next states depend on the placements of all redistributions that the planner has planned. Each plan is made as if
    the planner were new.
    """

    def __init__(self, mesh: DeviceMesh, meta: TensorMeta) -> None:
        super().__init__(mesh, meta)
        self.known: dict[Any, Any] = {}

    def forget(self) -> None:
        self.strided_shard_placements_in_target.clear()
        self.partial_reduce_ops_in_target.clear()

    def expect(self, placements: Placements) -> None:
        for placement in placements:
            if isinstance(placement, Partial):
                self.partial_reduce_ops_in_target.add(placement.reduce_op)
            elif isinstance(placement, _StridedShard):
                self.strided_shard_placements_in_target.add(placement)

    def get_next_state(self, placements: Any, tensor_mesh_dim_tuple: Any) -> Any:
        expected = (frozenset(self.strided_shard_placements_in_target), frozenset(self.partial_reduce_ops_in_target))
        key = (placements, tensor_mesh_dim_tuple, expected)
        if key not in self.known:
            self.known[key] = super().get_next_state(placements, tensor_mesh_dim_tuple)
        return dict(self.known[key])  # torch adds steps to it that hold for one target alone


class _Backwards(set[Any]):
    """A set that is iterated in the opposite order."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=str, reverse=True))


@contextlib.contextmanager
def _planning_with(planner: _Remembering) -> Iterator[None]:
    """Let torch plan with ``planner``, as if it were new, instead of a planner of torch's cache."""
    planner.forget()
    given = redistribute_module.get_redistribute_planner
    redistribute_module.get_redistribute_planner = lambda *_: planner
    try:
        yield
    finally:
        redistribute_module.get_redistribute_planner = given


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warnings on merges that it does not make: they are about plans that nobody executes."""
    logger, warned = redistribute_module.logger, set(redistribute_module._warned_flatten_issues)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        redistribute_module._warned_flatten_issues.clear()
        redistribute_module._warned_flatten_issues.update(warned)


def _order(order: Any) -> tuple[tuple[int, tuple[int, ...]], ...]:
    return tuple((entry.tensor_dim, tuple(entry.mesh_dims)) for entry in order)
