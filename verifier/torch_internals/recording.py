"""Redistributions that DTensor plans and executes."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._local_tensor import LocalTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import _dispatch as dispatch_module
from torch.distributed.tensor import _redistribute as redistribute_module
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpInfo, OpSchema
from torch.distributed.tensor.placement_types import _MaskPartial

from verifier.torch_internals.caches import clear_caches
from verifier.torch_internals.dtensors import per_rank
from verifier.torch_internals.groups import is_flattened
from verifier.torch_internals.placements import PLAIN_PLACEMENTS, placement_text, strides_of
from verifier.torch_internals.watching import Issued, RedistributionWatch, watched_collectives

__all__ = [
    "RedistributionRecorder",
    "forget_calls",
]


@dataclass
class Step:
    """One step of a redistribution; each text gives the placements on all mesh dims.

    The first step names the ops: the one that asked for the redistribution (``by``), the one for which the same tensor
    went the same way before (``repeats``), and the one that gathered what is sharded again (``undoes``). If the
    recorder measures, it also has what really ran: the collectives that were issued, the most bytes that were alive at
    once (``peak``), and the seconds until the result was there, waiting for other ranks included.
    """

    source: str
    target: str
    mesh_dim: int
    collective: str | None
    bytes: int
    path: tuple[str, str]
    tensor: str
    explicit: bool
    begins: bool
    mesh: str
    by: str = ""
    repeats: str = ""
    undoes: str = ""
    issued: tuple[Issued, ...] = ()
    peak: int = 0
    seconds: float = 0.0


_BY_CALLER = "the caller"
"""Stands for an op, where the caller asked for a redistribution."""


@dataclass
class _Neighbours:
    """What was redistributed before, by the local tensors that DTensor took and made.

    ``sources`` has each local tensor that was redistributed for an op, with the version of its DTensor and the two
    ends. ``gathered`` has each local tensor that an all-gather made, or an op from one, with the mesh dims of the
    gather. Both name the op. Tensors are kept alive, because their ids are the keys.
    """

    sources: dict[tuple[object, ...], str] = field(default_factory=dict)
    gathered: dict[int, tuple[str, frozenset[int]]] = field(default_factory=dict)
    alive: list[object] = field(default_factory=list)

    def clear(self) -> None:
        self.sources.clear()
        self.gathered.clear()
        self.alive.clear()

    def told(self, steps: list[Step], local: torch.Tensor, call: _Call | None) -> list[Step]:
        """Return ``steps`` with the op that needs them, and what they repeat or undo."""
        first = copy.copy(steps[0])
        op, dims = self.gathered.get(id(local), ("", frozenset[int]()))
        if op != _BY_CALLER and any(not step.collective and step.mesh_dim in dims for step in steps):
            first.undoes = op
        if call is not None:
            first.by = call.op
            if (version := call.versions.get(id(local))) is not None:
                key = (id(local), version, first.path, first.mesh)
                first.repeats = self.sources.get(key, "") if any(step.collective for step in steps) else ""
                self.sources[key] = call.op
                self.alive.append(local)
        return [first, *steps[1:]]

    def made(self, steps: list[Step], result: torch.Tensor, by: str) -> frozenset[int]:
        """Keep the result of a redistribution; return the mesh dims over which it was gathered."""
        dims = frozenset(step.mesh_dim for step in steps if step.collective == "all_gather")
        left = frozenset(step.mesh_dim for step in steps if not step.collective)
        if dims - left:
            self.keep(result, by or _BY_CALLER, dims - left)
        return dims - left

    def keep(self, result: object, op: str, dims: frozenset[int]) -> None:
        self.gathered[id(result)] = (op, dims)
        self.alive.append(result)


@dataclass
class RedistributionRecorder:
    """Collects the redistributions that DTensor performs, and the placements on which it then runs the ops.

    ``measures`` says whether what really ran is recorded as well.
    """

    measures: bool = True
    steps: list[Step] = field(default_factory=list)
    executed: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    neighbours: _Neighbours = field(default_factory=_Neighbours)
    _masks: list[object] = field(default_factory=list)

    def left_state(self) -> bool:
        """Return whether placements in DTensor's cache still hold a mask that was made while recording.

        A later call of the same shapes would then use that mask. Forgets the masks.
        """
        masks, self._masks = self._masks, []
        return any(mask.refcount for mask in masks)  # type: ignore[attr-defined]

    def clear(self) -> None:
        self.steps.clear()
        self.executed.clear()
        self.neighbours.clear()

    @contextlib.contextmanager
    def recording(self) -> Iterator[RedistributionRecorder]:
        """Record everything that this thread's DTensors do inside the block."""
        _recorders.append(self)
        try:
            with watched_collectives():
                yield self
        finally:
            _recorders.remove(self)


@dataclass
class _Call:
    """An op that DTensor runs, and the mesh dims over which it has gathered arguments for that.

    ``versions`` has those of its DTensors by the ids of their local tensors, which keep no count of writes.
    """

    op: str
    versions: dict[int, int] = field(default_factory=dict)
    gathered: frozenset[int] = frozenset()


def _is_counted(spec: DTensorSpec) -> bool:
    """Return whether there are as many placements as mesh dims; torch takes others, too, and they are no layout."""
    return len(spec.placements) == spec.mesh.ndim


def _versions(args: tuple[object, ...]) -> dict[int, int]:
    return {
        id(arg._local_tensor): 0 if arg.is_inference() else arg._version for arg in args if isinstance(arg, DTensor)
    }


_recorders: list[RedistributionRecorder] = []
_calls: list[_Call] = []


def _install_hooks() -> None:
    """Wrap DTensor's entry points of redistributions and of ops with them.

    ``DebugMode`` is a dispatch mode and multiplies the time of every op. A hook costs time only if there is a
    redistribution. It is there from the import of this module on, because torch keeps the functions that its first op
    found.
    """
    redistribute = redistribute_module.redistribute_local_tensor
    redistribute_args = dispatch_module.OpDispatcher.redistribute_local_args
    run_locally = dispatch_module.OpDispatcher._dispatch_get_local_results_slow_path

    def recording_redistribute(
        local: torch.Tensor, current: DTensorSpec, target: DTensorSpec, **options: Any
    ) -> torch.Tensor:
        if not (_recorders and isinstance(current, DTensorSpec) and isinstance(target, DTensorSpec)):
            return redistribute(local, current, target, **options)  # which raises if torch gives it anything else
        if current.placements == target.placements or not (_is_counted(current) and _is_counted(target)):
            return redistribute(local, current, target, **options)
        graph_based, explicit = options.get("use_graph_based_transform"), bool(options.get("is_explicit"))
        key = _key(local, current, target, graph_based, explicit)
        steps = _planned_steps(key, local, current, target, graph_based, explicit)
        masks = [p.mask_buffer for p in target.placements if isinstance(p, _MaskPartial)]
        call = None if explicit or not _calls else _calls[-1]
        by = "" if call is None else call.op
        begun = []
        for recorder in _recorders:
            told = recorder.neighbours.told(steps, local, call) if steps else []
            recorder.steps.extend(told)
            begun += told[:1] if recorder.measures else []
            recorder._masks.extend(masks)

        def run() -> torch.Tensor:
            result: torch.Tensor = redistribute(local, current, target, **options)
            return result

        result = _measured(run, begun, local) if begun else run()
        for recorder in _recorders:
            dims = recorder.neighbours.made(steps, result, by)
            if call is not None:
                call.gathered |= dims
        return result

    def recording_redistribute_args(op_info: OpInfo, schema: OpSchema, use_values: bool) -> None:
        if _recorders:
            entry = _executed(schema)
            for recorder in _recorders:
                recorder.executed.append(entry)
        redistribute_args(op_info, schema, use_values)

    def recording_run(dispatcher: Any, op: Any, args: tuple[object, ...], info: OpInfo) -> object:
        if not _recorders:
            return run_locally(dispatcher, op, args, info)
        call = _Call(str(op), _versions(args))
        _calls.append(call)
        try:
            results = run_locally(dispatcher, op, args, info)
        finally:
            _calls.pop()
        if call.gathered:
            for recorder in _recorders:
                for result in results if isinstance(results, list | tuple) else (results,):
                    recorder.neighbours.keep(result, call.op, call.gathered)
        return results

    for holder, name, hook in (
        (redistribute_module, "redistribute_local_tensor", recording_redistribute),
        (dispatch_module, "redistribute_local_tensor", recording_redistribute),
        (dispatch_module.OpDispatcher, "redistribute_local_args", staticmethod(recording_redistribute_args)),
        (dispatch_module.OpDispatcher, "_dispatch_get_local_results_slow_path", recording_run),
    ):
        setattr(holder, name, hook)


def _executed(schema: OpSchema) -> tuple[str, tuple[str, ...]]:
    specs = [arg for arg in schema.args_schema if isinstance(arg, DTensorSpec)]
    return str(schema.op), tuple(placement_text(spec.placements) for spec in specs)


_planned: dict[tuple[object, ...], tuple[list[Step], DeviceMesh, DeviceMesh]] = {}
"""What :func:`_plan_steps` returned, and the meshes, because keys contain their ids. :func:`forget_calls` empties it.

DTensor caches its plans as well, but by specs, whose hash and comparison are slow Python code.
"""


_Key = tuple[object, ...]


def _key(
    local: torch.Tensor, current: DTensorSpec, target: DTensorSpec, graph_based: object, explicit: bool
) -> _Key | None:
    """Return what a redistribution has in common with those that do the same; None if that is not known."""
    placements = (*current.placements, *target.placements)
    if isinstance(local, LocalTensor) or any(type(p) not in _COMPARED_BY_TEXT for p in placements):
        return None
    orders = (current.shard_order, target.shard_order)
    size = local.numel() * local.element_size()
    return (id(current.mesh), id(target.mesh), placements, orders, current.tensor_meta, graph_based, size, explicit)


def _planned_steps(
    key: _Key | None,
    local: torch.Tensor,
    current: DTensorSpec,
    target: DTensorSpec,
    graph_based: object,
    explicit: bool,
) -> list[Step]:
    """Return the steps of :func:`_plan_steps`, from the cache if the redistribution was planned before."""
    if key is None:
        return _plan_steps(local, current, target, graph_based, explicit)
    known = _planned.get(key)
    if known is None:
        steps = _plan_steps(local, current, target, graph_based, explicit)
        known = _planned[key] = (steps, current.mesh, target.mesh)
    return known[0]


def _measured(run: Callable[[], torch.Tensor], begun: list[Step], local: torch.Tensor) -> torch.Tensor:
    """Return what ``run`` returns; write into the steps ``begun`` what it did and how long that took.

    Where ranks are simulated nothing is written, because no rank issues anything. On a GPU there are no seconds,
    because a collective is launched there and not waited for.
    """
    if type(local) not in _LOCAL:
        return run()
    with RedistributionWatch(local) as watch:
        started = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - started if local.device.type == "cpu" else 0.0
    for step in begun:
        step.issued, step.peak, step.seconds = tuple(watch.issued), watch.peak(result), seconds
    return result


_LOCAL = (torch.Tensor, torch.nn.Parameter, AsyncCollectiveTensor)
"""Types of the local tensors of ranks that are not simulated."""

_COMPARED_BY_TEXT = PLAIN_PLACEMENTS | {_MaskPartial}
"""Placements that have the same text if they are equal."""


def _plan_steps(
    local: torch.Tensor, current: DTensorSpec, target: DTensorSpec, graph_based: object, explicit: bool
) -> list[Step]:
    """Return the steps that DTensor will take; none if it cannot plan them, because DTensor itself reports that."""
    try:
        planned = redistribute_module._gen_transform_infos(current, target, graph_based)
        infos = redistribute_module._optimize_transform_infos(
            planned, current.mesh, current.placements, target.placements
        )
    except (RuntimeError, ValueError, NotImplementedError, AssertionError):
        return []
    size = max((shard.numel() * shard.element_size() for shard in per_rank(local).values()), default=0)
    state = list(current.placements)
    path = (placement_text(current.placements), placement_text(target.placements))
    mesh_shape = tuple(current.mesh.shape)
    tensor, mesh = _tensor_text(current, target), "x".join(map(str, mesh_shape)) + "+flat" * is_flattened(current.mesh)
    steps: list[Step] = []
    for info in infos:
        before, after = info.src_dst_placements
        source = placement_text(state)
        dims = getattr(info, "original_mesh_dims", (info.mesh_dim,))
        for mesh_dim in dims:
            state[mesh_dim] = after
        collective = info._comm_type_key()
        step = Step(source, placement_text(state), dims[0], collective, size, path, tensor, explicit, not steps, mesh)
        steps.append(step)
        extent = math.prod(mesh_shape[mesh_dim] for mesh_dim in dims)
        if isinstance(before, Shard) and not isinstance(after, Shard):
            size *= extent
        elif isinstance(after, Shard) and not isinstance(before, Shard):
            size = -(-size // extent)
    return steps


def _tensor_text(*specs: DTensorSpec) -> str:
    """Return dtype and global shape; empty if a shard order is another than the placements say."""
    meta = specs[0].tensor_meta
    orders = (spec.shard_order for spec in specs if not any(map(strides_of, spec.placements)))
    if meta is None or not all(order is None or DTensorSpec.is_default_device_order(order) for order in orders):
        return ""
    return f"{str(meta.dtype).removeprefix('torch.')}{[*map(int, meta.shape)]}"


def forget_calls() -> int:
    """Empty every cache of DTensor that grows with new calls; return how many redistributions were cached.

    These caches have no limit. If every call is new, a rank of a mesh 2x2 grows by 20 KB with each trial.
    """
    clear_caches()
    count: int = redistribute_module._gen_transform_infos.cache_info().currsize
    redistribute_module._gen_transform_infos.cache_clear()
    redistribute_module.clear_redistribute_planner_cache()
    DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta_cached.cache_clear()
    _planned.clear()
    return count


_install_hooks()
