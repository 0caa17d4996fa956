"""The only importer of torch's private modules: what the verifier must know of DTensor's insides, in one place.

Everything here was read off torch 2.13.0. Where a name is missing in another version, :func:`require` says which.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import _local_tensor as local_tensor_module
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import _dispatch as dispatch_module
from torch.distributed.tensor import _redistribute as redistribute_module
from torch.distributed.tensor._decompositions import DecompShardingStrategy
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import (
    OpInfo,
    OpSchema,
    OpSpec,
    OpStrategy,
    OutputSharding,
    RuntimeSchemaInfo,
)
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor._ops.single_dim_strategy import (
    _PreparedSingleDimStrategy,
    _resolve_foreach_elementwise_overload,
    _SingleDimStrategyInfo,
)
from torch.distributed.tensor._ops.utils import generate_redistribute_costs
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import (
    CommDebugMode,
    _clear_sharding_prop_cache,
    _get_fast_path_sharding_prop_cache_stats,
)
from torch.distributed.tensor.placement_types import Placement, _MaskPartial, _StridedShard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from verifier.cases import PLAIN_PLACEMENTS, Combination, Placements, placement_parsers

__all__ = [
    "ClaimReader",
    "CollectiveWatch",
    "CustomOpDef",
    "DTensorSpec",
    "LocalShards",
    "LocalShardsWrapper",
    "NarrowingWatch",
    "OpOverload",
    "OpOverloadPacket",
    "Propagation",
    "RankView",
    "Recorder",
    "ShardedOp",
    "Slot",
    "cache_misses",
    "capture_calls",
    "chunk_sharded",
    "clear_caches",
    "count_collectives",
    "definition_of",
    "describe_dtensor",
    "forget_calls",
    "given_strides",
    "has_decomposition",
    "has_own_handler",
    "install_handler",
    "install_sharded_op",
    "is_composite",
    "is_fake",
    "is_refusal",
    "let_new_rules_win",
    "local_shards",
    "make_dtensor",
    "make_rank_tensors",
    "masked_extent",
    "mesh_of_world",
    "next_sequence_number",
    "norm_order",
    "on_dim",
    "on_each_rank",
    "opinfo_entries",
    "opinfo_samples",
    "opinfo_sizes",
    "paused_simulation",
    "per_rank",
    "placement_text",
    "pytree",
    "raised_in",
    "registered_overloads",
    "registries_of_rules",
    "release_groups",
    "replaced_handler",
    "replaced_sharded_op",
    "replaced_strategy",
    "run_in_threads",
    "selected_overload",
    "simulated_mode",
    "simulated_ranks",
    "special_placement",
    "stage_through_host",
    "staged_collective",
    "start_simulated_world",
    "strided_shard",
    "strides_of",
    "torch_converter",
    "with_local",
]


# ------------------------------------------------------------------------------------------------------ simulated ranks
def start_simulated_world(world_size: int) -> None:
    """Make a default process group of ``world_size`` ranks in this process that moves no data.

    Only under :func:`simulated_mode` do its collectives have an effect.
    """
    # importing the module registers the "fake" backend
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())


def simulated_mode(world_size: int) -> contextlib.AbstractContextManager[object]:
    """Return torch's ``LocalTensorMode``, under which one process plays all ranks."""
    mode: contextlib.AbstractContextManager[object] = LocalTensorMode(world_size)
    return mode


def simulated_ranks() -> tuple[int, ...] | None:
    """Return the ranks that this process simulates at this moment, or None if it is a real rank."""
    mode = local_tensor_module.local_tensor_mode()
    return None if mode is None else tuple(sorted(mode.ranks))


def paused_simulation() -> contextlib.AbstractContextManager[object]:
    """Return a context in which factory functions make plain tensors again, whether or not ranks are simulated."""
    context: contextlib.AbstractContextManager[object] = local_tensor_module.maybe_disable_local_tensor_mode()
    return context


def make_rank_tensors(locals_: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one tensor that holds the local tensor of every simulated rank, given in rank order."""
    result: torch.Tensor = LocalTensor(dict(enumerate(locals_)))  # type: ignore[no-untyped-call]
    return result


_new_dtensor = DTensor.__new__
"""As DTensor makes the results of its own ops: the constructor does nothing more, at twice the price."""


def describe_dtensor(value: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> DTensorSpec:
    """Return the description of a DTensor that stands for ``value``, a global tensor."""
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(value.shape, value.stride(), value.dtype))


def make_dtensor(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Return what ``DTensor.from_local`` makes of ``local`` without a check, for a tenth of the time.

    That one goes through an autograd function, in case a gradient has to flow back to ``local``. DTensors may share
    what :func:`describe_dtensor` returned, as results of DTensor's cached ops do, unless a shard is strided: of these
    DTensor changes descriptions in place (torch 2.13.0).
    """
    result: torch.Tensor = _new_dtensor(DTensor, local, spec, requires_grad=False)
    return result


# ----------------------------------------------------------------------------------------------------- ranks as threads
def run_in_threads(function: Callable[[int], object], world_size: int, limit: float) -> list[BaseException | None]:
    """Call ``function(rank)`` in a thread for each rank, and return what each raised.

    Collectives go through torch's threaded process group, as its own tests have it: tensors are handed over in memory.
    When one thread raises, those that wait for it end as well. A thread that has not ended after ``limit`` seconds has
    "raised" a TimeoutError; it is left behind.
    """
    # importing the module registers the "threaded" backend
    from torch.testing._internal.distributed import multi_threaded_pg

    threaded: Any = multi_threaded_pg
    isolate: Any = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    store = dist.HashStore()  # type: ignore[attr-defined]
    raised: list[BaseException | None] = [None] * world_size
    over = threading.Event()

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            try:
                function(rank)
            finally:
                if not over.is_set():  # from then on the process group is that of the process
                    dist.destroy_process_group()
        except BaseException as error:  # noqa: BLE001 - goes to the caller
            if not over.is_set():
                raised[rank] = error
                threaded.ProcessLocalGroup.exception_handle(error)

    isolate(True)
    threaded._install_threaded_pg()
    try:
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + limit
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        over.set()
        for rank, thread in enumerate(threads):
            if thread.is_alive():
                raised[rank] = TimeoutError(f"no end within {limit:g} s")
        return list(raised)
    finally:
        over.set()
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        isolate(False)


# -------------------------------------------------------------------------------------------------------- local shards
@dataclass(frozen=True)
class LocalShards:
    """What this process holds of a DTensor, in terms of :mod:`verifier.placements`.

    ``placements`` is None where a placement is not understood, and
    ``reason`` then names it. A masked partial is turned into the plain ``P(sum)`` that it promises to be: masked
    elements count as 0.
    """

    placements: Placements | None
    locals: dict[int, torch.Tensor]
    reason: str = ""


def per_rank(tensor: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return this process's value of ``tensor`` by rank: one entry, or all of them if ranks are simulated."""
    if isinstance(tensor, LocalTensor):
        return {int(rank): local.detach() for rank, local in sorted(tensor._local_tensors.items())}
    world = dist.group.WORLD
    assert world is not None, "there is no process group"
    if type(tensor) is not torch.Tensor or tensor.requires_grad:
        tensor = tensor.detach()
    return {world.rank(): tensor}  # dist.get_rank() takes ten times as long, and this is called often


def placement_text(placements: Sequence[Placement]) -> str:
    """Return placements as text; a masked partial is ``MaskP(sum)``, whatever its table's shape."""
    texts = [
        f"MaskP({p.reduce_op})" if type(p) not in PLAIN_PLACEMENTS and isinstance(p, _MaskPartial) else str(p)
        for p in placements
    ]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def local_shards(tensor: DTensor) -> LocalShards:
    """Return what this process holds of ``tensor``: its own local tensor, or every rank's if ranks are simulated."""
    locals_ = per_rank(tensor._local_tensor)
    understood: list[Placement] = []
    for placement in tensor.placements:
        if type(placement) in PLAIN_PLACEMENTS:
            understood.append(placement)
        elif isinstance(placement, _MaskPartial):
            mask = placement.mask_buffer.data
            if mask is None:
                return LocalShards(None, locals_, "a masked partial has lost its mask")
            masks = per_rank(mask)
            for rank, local in locals_.items():
                if local.shape[: masks[rank].ndim] != masks[rank].shape:
                    got, needed = list(masks[rank].shape), list(local.shape)
                    return LocalShards(None, locals_, f"a mask of shape {got} on a local tensor of {needed}")
            locals_ = {rank: _without_masked(local, masks[rank]) for rank, local in locals_.items()}
            understood.append(Partial(placement.reduce_op))
        elif isinstance(placement, _StridedShard | _NormPartial):
            understood.append(placement)
        else:
            return LocalShards(None, locals_, f"placement {placement} is not modelled")
    return LocalShards(tuple(understood), locals_)


def _without_masked(local: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return ``local`` [*mask.shape, ...] with 0 where ``mask`` is set: what the rank contributes to the sum."""
    widened = mask.view(*mask.shape, *(1 for _ in range(local.ndim - mask.ndim)))
    return torch.where(widened, torch.zeros((), dtype=local.dtype, device=local.device), local)


# ----------------------------------------------------------------------------------------------------------- recording
@dataclass
class Step:
    """One step of a redistribution; all placements as text of all mesh dims."""

    source: str
    target: str
    mesh_dim: int
    collective: str | None
    bytes: int
    path: tuple[str, str]


@dataclass
class Recorder:
    """Collects the redistributions that DTensor performs, and the placements on which it really runs each op."""

    steps: list[Step] = field(default_factory=list)
    executed: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    _masks: list[object] = field(default_factory=list)

    def left_state(self) -> bool:
        """Return whether a mask made while recording is still held, in placements that DTensor has cached.

        A later call of the same shapes would then run with it. Forgets the masks.
        """
        masks, self._masks = self._masks, []
        return any(mask.refcount for mask in masks)  # type: ignore[attr-defined]

    def clear(self) -> None:
        self.steps.clear()
        self.executed.clear()

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record everything that this thread's DTensors do inside the block."""
        _install_hooks()
        _recorders.append(self)
        try:
            yield self
        finally:
            _recorders.remove(self)


_recorders: list[Recorder] = []
_hooked = False


def _install_hooks() -> None:
    """Wrap DTensor's two redistribution entry points, once per process.

    A hook and not ``DebugMode``: that one is a dispatch mode and multiplies the time of every op, this costs only where
    there is a redistribution.
    """
    global _hooked
    if _hooked:
        return
    _hooked = True
    redistribute = redistribute_module.redistribute_local_tensor
    redistribute_args = dispatch_module.OpDispatcher.redistribute_local_args

    def recording_redistribute(
        local: torch.Tensor, current: DTensorSpec, target: DTensorSpec, **options: Any
    ) -> torch.Tensor:
        if _recorders and not current.placements == target.placements:  # noqa: SIM201 - != takes 30 times as long
            steps = _planned_steps(local, current, target, options.get("use_graph_based_transform"))
            masks = [p.mask_buffer for p in target.placements if isinstance(p, _MaskPartial)]
            for recorder in _recorders:
                recorder.steps.extend(steps)
                recorder._masks.extend(masks)
        result: torch.Tensor = redistribute(local, current, target, **options)
        return result

    def recording_redistribute_args(op_info: OpInfo, schema: OpSchema, use_values: bool) -> None:
        if _recorders:
            entry = _executed(schema)
            for recorder in _recorders:
                recorder.executed.append(entry)
        redistribute_args(op_info, schema, use_values)

    for holder, name, hook in (
        (redistribute_module, "redistribute_local_tensor", recording_redistribute),
        (dispatch_module, "redistribute_local_tensor", recording_redistribute),
        (dispatch_module.OpDispatcher, "redistribute_local_args", staticmethod(recording_redistribute_args)),
    ):
        setattr(holder, name, hook)


def _executed(schema: OpSchema) -> tuple[str, tuple[str, ...]]:
    specs = [arg for arg in schema.args_schema if isinstance(arg, DTensorSpec)]
    return str(schema.op), tuple(placement_text(spec.placements) for spec in specs)


_planned: dict[tuple[object, ...], tuple[list[Step], DeviceMesh, DeviceMesh]] = {}
"""What :func:`_plan_steps` returned, and the meshes, which a key names by their ids. :func:`forget_calls` empties it.

DTensor remembers its plans as well, but by specs, whose hash and comparison are Python's.
"""


def _planned_steps(local: torch.Tensor, current: DTensorSpec, target: DTensorSpec, graph_based: object) -> list[Step]:
    """Return what :func:`_plan_steps` does, or did for the same redistribution."""
    placements = (*current.placements, *target.placements)
    if isinstance(local, LocalTensor) or any(type(p) not in _COMPARED_BY_TEXT for p in placements):
        return _plan_steps(local, current, target, graph_based)
    orders = (current.shard_order, target.shard_order)
    size = local.numel() * local.element_size()
    key = (id(current.mesh), id(target.mesh), placements, orders, current.tensor_meta, graph_based, size)
    known = _planned.get(key)
    if known is None:
        steps = _plan_steps(local, current, target, graph_based)
        known = _planned[key] = (steps, current.mesh, target.mesh)
    return known[0]


_COMPARED_BY_TEXT = PLAIN_PLACEMENTS | {_MaskPartial}
"""Placements that have the same text if they are equal."""


def _plan_steps(local: torch.Tensor, current: DTensorSpec, target: DTensorSpec, graph_based: object) -> list[Step]:
    """Return the steps that DTensor will take; none if it cannot plan them, which is for DTensor to report."""
    try:
        infos = redistribute_module._gen_transform_infos(current, target, graph_based)
    except (RuntimeError, ValueError, NotImplementedError, AssertionError):
        return []
    size = max((shard.numel() * shard.element_size() for shard in per_rank(local).values()), default=0)
    state = list(current.placements)
    path = (placement_text(current.placements), placement_text(target.placements))
    mesh_shape = tuple(current.mesh.shape)
    steps = []
    for info in infos:
        before, after = info.src_dst_placements
        source = placement_text(state)
        state[info.mesh_dim] = after
        collective = info._comm_type_key()
        steps.append(Step(source, placement_text(state), info.mesh_dim, collective, size, path))
        extent = mesh_shape[info.mesh_dim]
        if isinstance(before, Shard) and not isinstance(after, Shard):
            size *= extent
        elif isinstance(after, Shard) and not isinstance(before, Shard):
            size = -(-size // extent)
    return steps


@contextlib.contextmanager
def count_collectives() -> Iterator[dict[str, int]]:
    """Count the collectives that really run inside the block, by name, with torch's ``CommDebugMode``."""
    counts: dict[str, int] = {}
    mode = CommDebugMode()  # type: ignore[no-untyped-call]
    with mode:
        yield counts
    for op, count in mode.get_comm_counts().items():
        name = str(op).rsplit(".", 1)[-1]
        counts[name] = counts.get(name, 0) + count


_C10D_NAMES = {  # what torch.distributed calls them, which those of the functional collectives follow
    "_allgather_base_": "all_gather_into_tensor",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather_coalesced",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "broadcast_": "broadcast",
    "gather_": "gather",
    "reduce_": "reduce",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "scatter_": "scatter",
}


def _collective_name(op: OpOverload) -> str | None:
    """Return what a collective is called, None for any other op: a wait, or what only passes a tensor on."""
    name = op.overloadpacket.__name__
    if op.namespace == "c10d":
        return _C10D_NAMES.get(name)
    functional = op.namespace == "_c10d_functional" and name in _FUNCTIONAL_COLLECTIVES
    return name if functional or name == "shard_dim_alltoall" else None


class CollectiveWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells ``seen`` of each collective that this thread issues: its name, and the autograd node that it runs in.

    The node is given by its sequence number, which grows with the order in which nodes are made in the forward pass; it
    is None outside a backward pass. Of DTensors the collectives on their local tensors are seen.
    """

    def __init__(self, seen: Callable[[str, int | None], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented
        name = _collective_name(func)
        if name is not None:
            node = torch._C._current_autograd_node()
            self._seen(name, None if node is None else node._sequence_nr())
        return func(*args, **(kwargs or {}))


class NarrowingWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes in ``eps`` the coarsest dtype to which this thread converts values of a finer one; 0 for none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.eps = 0.0

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            before, after = (
                torch.finfo(one.dtype).eps if one.is_floating_point() or one.is_complex() else None
                for one in (source, result)
            )
            if before is not None and after is not None and after > before:
                self.eps = max(self.eps, after)
        return result


def next_sequence_number() -> int:
    """Return the sequence number that the next autograd node of this thread gets."""
    return int(torch._C._autograd._get_sequence_nr())


def cache_misses() -> int:
    """Return how often DTensor's sharding propagation missed its cache in this process so far."""
    return int(_get_fast_path_sharding_prop_cache_stats()[1])  # type: ignore[no-untyped-call]


def implicit_replication_allowed() -> bool:
    """Return whether DTensor takes plain tensors for replicated ones now."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


def clear_caches() -> None:
    """Empty DTensor's sharding propagation caches, so that rules registered later are used."""
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _decisions.clear()


def forget_calls() -> int:
    """Empty every cache in which DTensor keeps what it has worked out of calls; return how many redistributions it had.

    None of them has a limit: with calls that are ever new, a rank of a mesh 2x2 grows by 20 KB with each trial.
    """
    clear_caches()
    count: int = redistribute_module._gen_transform_infos.cache_info().currsize
    redistribute_module._gen_transform_infos.cache_clear()
    redistribute_module.clear_redistribute_planner_cache()
    DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta_cached.cache_clear()
    _planned.clear()
    return count


# --------------------------------------------------------------------------------------------------------------- rules
def registries_of_rules() -> tuple[dict[OpOverload, Any], ...]:
    """Return what DTensor runs each op by, in whatever way it was registered.

    These are handlers, prop rules, strategies, and last the strategies for one mesh dim, which DTensor asks before the
    two kinds before them.
    """
    dispatcher = DTensor._op_dispatcher
    propagator = dispatcher.sharding_propagator
    return (
        dispatcher._custom_op_handlers,
        propagator.op_to_rules,
        propagator.op_strategy_funcs,
        propagator.op_single_dim_strategy_funcs,
    )


@contextlib.contextmanager
def let_new_rules_win() -> Iterator[list[str]]:
    """Let rules that are registered inside the block replace torch's own; yield the ops for which that took our help.

    ``register_sharding`` says that it overrides a strategy that DTensor has, but DTensor (torch 2.13.0) asks its newer
    registry of single-dim strategies first, in which nothing is replaced. The op's entry there is removed.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    registries: tuple[dict[OpOverload, Any], ...] = (propagator.op_strategy_funcs, propagator.op_to_rules)
    before = [dict(registry) for registry in registries]
    helped: list[str] = []
    yield helped
    for old, registry in zip(before, registries, strict=True):
        for op, rule in registry.items():
            if old.get(op) is not rule and propagator.op_single_dim_strategy_funcs.pop(op, None) is not None:
                helped.append(str(op))
    clear_caches()


@contextlib.contextmanager
def replaced_strategy(
    op: OpOverload, strategy: Callable[..., list[list[Placement | None]]] | None = None
) -> Iterator[None]:
    """Let DTensor have no other rules for ``op`` inside the block than those of ``strategy``.

    Parameters
    ----------
    strategy
        Called with the op, its arguments and its keyword arguments, in which a tensor is its ``TensorMeta``. Returns
        rules for one mesh dim: the placements of each result, then of each tensor argument. Shards may be uneven. If it
        is None, the block registers rules itself, in whatever way.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    registries: tuple[dict[OpOverload, Any], ...] = (
        propagator.op_single_dim_strategy_funcs,
        propagator.op_strategy_funcs,
        propagator.op_to_rules,
        propagator.op_to_schema_info,
        propagator.op_to_schema_info_for_single_dim_strategy,
    )
    # what is said of the arguments stays: whether they hold lists of tensors does not depend on the rules
    kept = [registry.get(op) for registry in registries]
    for registry in registries[:3]:
        registry.pop(op, None)
    if strategy is not None:
        info = _SingleDimStrategyInfo(func=strategy, allow_uneven_sharding=True)
        propagator.op_single_dim_strategy_funcs[op] = info
    clear_caches()
    try:
        yield
    finally:
        for registry, rules in zip(registries, kept, strict=True):
            registry.pop(op, None)
            if rules is not None:
                registry[op] = rules
        clear_caches()


# ----------------------------------------------------------------------------------------------------- ops of our own
@dataclass(frozen=True)
class RankView:
    """What a rank may know of a call beside its own tensors.

    Parameters
    ----------
    mesh_shape, coordinate
        Of the mesh, and of the rank on it.
    shapes, placements
        Global shape and placements of each tensor argument, in the order of the call.
    """

    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    placements: tuple[Placements, ...]

    def bounds(self, number: int, tensor_dim: int) -> tuple[int, int]:
        """Return where on ``tensor_dim`` the rank's shard of tensor argument ``number`` starts and stops."""
        shape, placements = self.shapes[number], self.placements[number]
        if any(strides_of(placement) for placement in placements):
            sizes, offsets = _compute_local_shape_and_global_offset(
                shape, self.mesh_shape, list(self.coordinate), placements
            )
            return int(offsets[tensor_dim]), int(offsets[tensor_dim]) + int(sizes[tensor_dim])
        start, stop = 0, shape[tensor_dim]  # without tensors, so that a call can be traced
        for mesh_dim in self.cuts(number, tensor_dim):
            chunk = -(-(stop - start) // self.mesh_shape[mesh_dim])
            start = min(start + self.coordinate[mesh_dim] * chunk, stop)
            stop = min(start + chunk, stop)
        return start, stop

    def cuts(self, number: int, tensor_dim: int) -> tuple[int, ...]:
        """Return the mesh dims that cut ``tensor_dim`` of tensor argument ``number``."""
        return tuple(
            mesh_dim
            for mesh_dim, placement in enumerate(self.placements[number])
            if isinstance(placement, Shard) and placement.dim == tensor_dim
        )


@dataclass(frozen=True)
class ShardedOp:
    """An op that DTensor is to run by rules and a kernel of our own.

    Parameters
    ----------
    op
        The overload.
    rules
        Called with the op, its arguments and its keyword arguments, in which a tensor is its ``TensorMeta``. Returns
        rules for one mesh dim: the placements of each result, then of each tensor argument. Shards may be uneven or
        empty.
    kernel
        Called with a :class:`RankView` and the arguments, with the rank's own tensors in them; returns the rank's part
        of the result. It communicates nothing.
    static_argnum
        From this argument on, what is no tensor decides about the rules.
    check
        Called with the arguments; raises where they are not supported. It may look at whatever decides how the call is
        run (placements, shapes, dtypes, and what is no tensor), since it is not called again for the same of all.
    flag, before
        Where the argument of number ``flag`` is true, ``before`` is called with the arguments. It returns those to be
        used in their place, and further keyword arguments for the kernel. Here an op may communicate.
    as_it_is
        Whether the kernel, without further keyword arguments, is the op itself on the rank's own tensors. Such a call
        takes less time.
    """

    op: OpOverload
    rules: Callable[..., list[list[Placement | None]]]
    kernel: Callable[..., object]
    static_argnum: int = 100
    check: Callable[[tuple[object, ...]], None] | None = None
    flag: int = 0
    before: Callable[[tuple[object, ...]], tuple[tuple[object, ...], dict[str, object]]] | None = None
    as_it_is: Callable[[RankView], bool] | None = None

    def __call__(self, op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run the op on DTensors: DTensor's dispatcher calls this."""
        extra: dict[str, object] = {}
        if self.before is not None and len(args) > self.flag and args[self.flag]:
            args, extra = self.before(args)
        key, local = _call_key(op, args, kwargs)
        try:
            decision = _decisions.get(key)
        except TypeError:  # sizes that are symbols, while torch.compile traces, have no hash
            key = decision = None
        if decision is None:
            if self.check is not None:
                self.check(args)
            return self._decided(op, args, kwargs, extra, key)
        plain = decision.as_it_is and not extra
        result = op(*local) if plain else self.kernel(decision.view, *local, **extra)
        if self.in_place:
            return args[0]
        spec = decision.result
        if isinstance(spec, DTensorSpec) and isinstance(result, torch.Tensor):
            return _new_dtensor(DTensor, result, spec, requires_grad=result.requires_grad)
        return DTensor._op_dispatcher.wrap(result, spec)

    def _decided(
        self,
        op: OpOverload,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        extra: dict[str, object],
        key: tuple[object, ...] | None,
    ) -> object:
        """Run the op as DTensor's rules decide, and remember under ``key`` if nothing is to be redistributed."""
        dispatcher = DTensor._op_dispatcher
        info = dispatcher.unwrap_to_op_info(op, args, kwargs)
        assert info.schema is not None
        given = {placement for spec in info.schema.args_spec for placement in spec.placements}
        asked = _given_placements.set(given)
        try:
            dispatcher.sharding_propagator.propagate(info)
        finally:
            _given_placements.reset(asked)
        sharding = info.output_sharding
        assert isinstance(sharding, OutputSharding)
        if not info.compute_mesh._is_current_rank_part_of_mesh():
            nothing = dispatcher._dispatch_get_local_results_slow_path(op, args, info)
            return dispatcher.wrap(nothing, sharding.output_spec)
        schema = sharding.redistribute_schema if sharding.needs_redistribute else info.schema
        assert schema is not None
        if sharding.needs_redistribute:
            if self.in_place and schema.args_spec[0] != info.schema.args_spec[0]:
                raise NotImplementedError(f"{op}: a tensor placed as {info.schema.args_spec[0]} cannot be written to")
            dispatcher.redistribute_local_args(info, schema, False)
        specs = [leaf for leaf in pytree.tree_leaves(schema.args_schema) if isinstance(leaf, DTensorSpec)]
        local_args: Any = info.local_args
        if info.args_tree_spec is not None:
            local_args = pytree.tree_unflatten(list(local_args), info.args_tree_spec)
        elif key is not None and not sharding.needs_redistribute:
            if len(_decisions) >= _MOST_DECISIONS:
                _decisions.clear()
            coordinate = info.compute_mesh.get_coordinate()
            assert coordinate is not None, "this rank is part of the mesh"
            meshes = tuple(arg._spec.mesh for arg in args if isinstance(arg, DTensor))
            view = _view(info.compute_mesh, specs, coordinate)
            as_it_is = self.as_it_is is not None and self.as_it_is(view)
            _decisions[key] = _Decision(view, as_it_is, sharding.output_spec, meshes)
        call = functools.partial(_with_view, self.kernel, info.compute_mesh, specs)
        results = _by_rank(info.compute_mesh, call, local_args, {**info.local_kwargs, **extra})
        return args[0] if self.in_place else dispatcher.wrap(results, sharding.output_spec)

    @functools.cached_property
    def in_place(self) -> bool:
        """Whether the op changes its first argument and returns it; its rules must leave that placed as it is."""
        alias = self.op._schema.arguments[0].alias_info
        return alias is not None and alias.is_write

    def rules_to_decide_by(
        self, op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> list[list[Placement | None]]:
        """Return :attr:`rules`, in a call of the op without those that want a Partial which no argument is.

        To make an argument Partial that is not never costs less than to replicate it. DTensor takes the products of
        the rules over all mesh dims, ``rules ** 3`` on three, and weighs each.
        """
        rules, given = self.rules(op, args, kwargs), _given_placements.get()
        if given is None:
            return rules
        results = len(op._schema.returns)
        return [rule for rule in rules if all(p is None or not p.is_partial() or p in given for p in rule[results:])]

    def at(self, mesh: DeviceMesh, coordinate: Sequence[int], specs: Sequence[DTensorSpec]) -> Callable[..., object]:
        """Return the kernel as the rank at ``coordinate`` runs it on tensors that are placed by ``specs``."""
        return functools.partial(_with_view, self.kernel, mesh, specs, coordinate)


def is_fake(value: object) -> bool:
    """Return whether ``value`` is a tensor without values, of which shapes alone are known.

    Not while torch.compile traces, which has to see what is done with values, or that it cannot.
    """
    return isinstance(value, FakeTensor) and not torch.compiler.is_compiling()


def given_strides() -> tuple[Placement, ...]:
    """Return the strided shards among the placements of the call whose rules DTensor is asking for, if it is."""
    return tuple(p for p in _given_placements.get() or () if strides_of(p))


def on_dim(placement: Placement, tensor_dim: int) -> Placement:
    """Return the shard that ``placement`` is, strided or not, of another tensor dim."""
    strides = strides_of(placement)
    return Shard(tensor_dim) if strides is None else strided_shard(tensor_dim, strides[1])


def with_local(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor of local tensors ``local``, of any dtype, that is placed and shaped as ``tensor``; no gradient.

    ``DTensor.from_local`` takes strided shards for another order of shards, whatever those of ``tensor`` are.
    """
    meta = TensorMeta(tensor.shape, tensor.stride(), local.dtype)
    spec = replace(tensor._spec, tensor_meta=meta)
    result: DTensor = _new_dtensor(DTensor, local, spec, requires_grad=False)
    return result


@dataclass(frozen=True)
class _Decision:
    """What is the same in each call with the same specs and the same other arguments, on the same mesh.

    ``meshes`` keeps alive those that the key names by their ids.
    """

    view: RankView
    as_it_is: bool
    result: Any
    meshes: tuple[DeviceMesh, ...]


_given_placements: ContextVar[set[Placement] | None] = ContextVar("_given_placements", default=None)
"""Those of the arguments of the call that is being decided."""

_SCALARS = frozenset({bool, int, float, str, type(None)})
_MOST_DECISIONS = 4096
_decisions: dict[tuple[object, ...] | None, _Decision] = {}
"""By :func:`_call_key`. DTensor remembers the same, but takes its call apart before it looks, which takes longer.

:func:`clear_caches` empties it.
"""


def _call_key(
    op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...] | None, list[object]]:
    """Return all of a call that decides how it is run, and the arguments with the rank's own tensors in them.

    None and no arguments if the call is not to be remembered.

    Meshes are equal whose ranks, names and threads are, although this rank may stand elsewhere on the other: on one of
    a later process group, or of a later thread that has got the number of an earlier one. So each is named by its id.
    """
    if kwargs or local_tensor_module.local_tensor_mode() is not None:
        return None, []
    key: list[object] = [op]
    local: list[object] = []
    for arg in args:
        kind = type(arg)
        if kind is DTensor:
            spec = arg._spec  # type: ignore[attr-defined]
            # and not the spec, which is another object in each backward: its hash and comparison are Python's
            key += (id(spec.mesh), spec.placements, spec.tensor_meta, spec.shard_order)
            local.append(arg._local_tensor)  # type: ignore[attr-defined]
        elif kind in _SCALARS:
            key += (kind, arg)  # 1 is not True
            local.append(arg)
        else:
            return None, []
    return tuple(key), local


def on_each_rank(function: Callable[..., object], *tensors: DTensor) -> None:
    """Call ``function`` with a :class:`RankView` and this rank's part of each tensor, for what it writes to them.

    If the ranks are simulated, call it for each of them.
    """
    mesh = tensors[0].device_mesh
    if mesh._is_current_rank_part_of_mesh():
        specs = [tensor._spec for tensor in tensors]
        call = functools.partial(_with_view, function, mesh, specs)
        _by_rank(mesh, call, [tensor._local_tensor for tensor in tensors], {})


def _with_view(
    function: Callable[..., object],
    mesh: DeviceMesh,
    specs: Sequence[DTensorSpec],
    coordinate: Sequence[int],
    *args: object,
    **kwargs: object,
) -> object:
    return function(_view(mesh, specs, coordinate), *args, **kwargs)


def _view(mesh: DeviceMesh, specs: Sequence[DTensorSpec], coordinate: Sequence[int]) -> RankView:
    shapes = tuple(tuple(spec.shape) for spec in specs)
    placements = tuple(tuple(spec.placements) for spec in specs)
    return RankView(tuple(mesh.shape), tuple(coordinate), shapes, placements)


def _by_rank(
    mesh: DeviceMesh, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    """Return what ``function`` returns at this rank's coordinate, or at every rank's if they are simulated."""
    if simulated_ranks() is None:
        coordinate = mesh.get_coordinate()
        assert coordinate is not None, "this rank is not part of the mesh"
        return function(coordinate, *args, **kwargs)
    with paused_simulation():
        by_rank = {}
        for coordinate, rank in zip(_coordinates(mesh), mesh.mesh.flatten().tolist(), strict=True):
            own_args, own_kwargs = _of_rank(rank, (tuple(args), dict(kwargs)))
            by_rank[rank] = function(coordinate, *own_args, **own_kwargs)
    flat = {rank: pytree.tree_flatten(made) for rank, made in by_rank.items()}
    structure = next(iter(flat.values()))[1]
    columns = zip(*(leaves for leaves, _ in flat.values()), strict=True)
    joined = [_joined(dict(zip(flat, column, strict=True))) for column in columns]
    return pytree.tree_unflatten(joined, structure)


def _joined(values: dict[int, object]) -> object:
    """Return the tensors of simulated ranks as one; what is no tensor is the same on all."""
    first = next(iter(values.values()))
    return LocalTensor(values) if isinstance(first, torch.Tensor) else first  # type: ignore[no-untyped-call]


def _of_rank(rank: int, values: Any) -> Any:
    """Return a pytree with the tensors that simulated rank ``rank`` holds of those in ``values``."""
    return pytree.tree_map_only(LocalTensor, lambda tensor: tensor._local_tensors[rank], values)


def _coordinates(mesh: DeviceMesh) -> list[tuple[int, ...]]:
    """Return the coordinates of a mesh, the last dim running fastest."""
    return list(itertools.product(*(range(extent) for extent in mesh.shape)))


def install_sharded_op(sharded: ShardedOp) -> None:
    """Let DTensor run an op by ``sharded`` from now on."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    older: tuple[dict[OpOverload, Any], ...] = (
        propagator.op_strategy_funcs,
        propagator.op_to_rules,
        propagator.op_to_schema_info,
    )
    for registry in older:  # of which the dispatcher asks some first
        registry.pop(sharded.op, None)
    info = _SingleDimStrategyInfo(func=sharded.rules_to_decide_by, allow_uneven_sharding=True)
    propagator.register_single_dim_op_strategy(sharded.op, info, RuntimeSchemaInfo(sharded.static_argnum))
    handlers: dict[OpOverload, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[sharded.op] = sharded
    clear_caches()


def install_handler(op: OpOverload, handler: Callable[..., object]) -> None:
    """Let DTensor call ``handler(op, *args, **kwargs)`` in the place of ``op`` from now on."""
    handlers: dict[OpOverload, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[op] = lambda op, args, kwargs: handler(op, *args, **kwargs)


@contextlib.contextmanager
def replaced_sharded_op(sharded: ShardedOp) -> Iterator[None]:
    """Let DTensor run an op by ``sharded`` inside the block, and as before after it."""
    with replaced_strategy(sharded.op), _restored_handler(sharded.op):
        install_sharded_op(sharded)
        yield


@contextlib.contextmanager
def replaced_handler(op: OpOverload, handler: Callable[..., object]) -> Iterator[None]:
    """Let DTensor call ``handler`` in the place of ``op`` inside the block, and do as before after it."""
    with _restored_handler(op):
        install_handler(op, handler)
        yield


@dataclass(frozen=True)
class _Guarded:
    """Rules of an op, each of which ``guard`` is asked about before DTensor goes by it."""

    rules: Callable[[OpSchema], Any]
    guard: Callable[..., None]

    def __call__(self, schema: OpSchema) -> Any:
        given = schema.args_schema[0]
        assert isinstance(given, OpStrategy)
        if not math.prod(given.shape):
            return _replicated(given)
        strategy = self.rules(schema)
        args = [arg.shape if isinstance(arg, OpStrategy) else arg for arg in schema.args_schema]
        for rule in strategy.strategies:
            (before,) = rule.input_specs
            mesh_shape = tuple(before.mesh.shape)
            self.guard(schema.op, args, mesh_shape, before.placements, rule.output_spec.placements)
        return strategy


def _replicated(given: OpStrategy) -> OpStrategy:
    """Return the rule of an op with one tensor and one result by which both are replicated."""
    everywhere = DTensorSpec(
        given.mesh, (Replicate(),) * given.mesh.ndim, tensor_meta=given.strategies[0].output_spec.tensor_meta
    )
    costs = [generate_redistribute_costs(given, everywhere)]
    return OpStrategy([OpSpec(everywhere, (everywhere,), redistribute_cost=costs)])


def install_guard(op: OpOverload, guard: Callable[..., None]) -> None:
    """Let DTensor ask ``guard`` before it goes by a rule of ``op``, an op with one tensor and one result, from now on.

    A tensor without elements is replicated, whatever its rules are: torch's rule of views, asked to flatten one, looks
    for further dims for ever (2.13.0).

    To do so twice changes nothing, nor does it where DTensor has no rules of that op that look at a whole call.

    Parameters
    ----------
    guard
        Called with the op, its arguments with the shape in the tensor's place, the shape of the mesh, and the
        placements of the tensor and of the result. What it raises is what the op raises.
    """
    strategies = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    rules = strategies.get(op)
    if rules is None or (isinstance(rules, _Guarded) and rules.guard is guard):
        return
    strategies[op] = _Guarded(rules, guard)
    clear_caches()


@contextlib.contextmanager
def guarded(op: OpOverload, guard: Callable[..., None]) -> Iterator[None]:
    """Let DTensor ask ``guard`` about the rules of ``op`` inside the block, and not after it."""
    strategies = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    kept = strategies.get(op)
    install_guard(op, guard)
    try:
        yield
    finally:
        if kept is not None:
            strategies[op] = kept
        clear_caches()


@contextlib.contextmanager
def _restored_handler(op: OpOverload) -> Iterator[None]:
    handlers = DTensor._op_dispatcher._custom_op_handlers
    kept = handlers.get(op)
    try:
        yield
    finally:
        handlers.pop(op, None)
        if kept is not None:
            handlers[op] = kept


def _sharded_op(op: OpOverload) -> ShardedOp | None:
    handler = DTensor._op_dispatcher._custom_op_handlers.get(op)
    return handler if isinstance(handler, ShardedOp) else None


def has_own_handler(op: OpOverload) -> bool:
    """Return whether DTensor runs code of its own for ``op``, of which nothing is known, instead of the op."""
    return op in DTensor._op_dispatcher._custom_op_handlers and _sharded_op(op) is None


# -------------------------------------------------------------------------------------------------------------- claims
@dataclass(frozen=True)
class Slot:
    """Stands for tensor argument number ``index`` in a call that DTensor has rewritten."""

    index: int


@dataclass(frozen=True)
class Propagation:
    """What DTensor decides to do with a call whose tensors have given placements, as one rank sees it.

    Parameters
    ----------
    inputs
        For each tensor argument the placements to which DTensor brings it before it runs the op.
    outputs
        The placements of each result, None for one that is no tensor; None if the op returns no DTensor.
    call
        ``(op, args)`` where DTensor runs another op or other arguments than it was given, with :class:`Slot` in the
        place of tensors; else None.
    """

    inputs: tuple[Placements, ...]
    outputs: tuple[Placements | None, ...] | None
    call: tuple[Callable[..., object], tuple[object, ...]] | None = None


class ClaimReader:
    """Reads what DTensor claims for one call: no process group, no DTensor, nothing is run.

    Whatever way of registering the op's rules used, DTensor's sharding propagation is what turns them into a decision,
    so that is what is asked. Only its dry run of the op on fake tensors is left out: the results are known.

    Parameters
    ----------
    op
        The overload that is called.
    args, kwargs
        The call, with global tensors.
    result
        What the call returns on them.
    """

    def __init__(self, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], result: object) -> None:
        self.op = op
        self._propagator = DTensor._op_dispatcher.sharding_propagator
        leaves, self._spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        self._leaves = leaves
        self._slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._metas = [_meta_of(leaves[i]) for i in self._slots]
        self._result_meta: Any = _result_meta(result)
        self._in_args = len([leaf for leaf in pytree.tree_leaves(tuple(args)) if isinstance(leaf, torch.Tensor)])

    def at(self, combination: Combination, mesh_shape: tuple[int, ...], rank: int = 0) -> Propagation | None:
        """Return what DTensor does at ``combination``; None if it has no rule for it or fails to apply one."""
        mesh = _bare_mesh(mesh_shape, rank)
        specs = [
            DTensorSpec(mesh, placements, tensor_meta=meta)
            for placements, meta in zip(combination, self._metas, strict=True)
        ]
        schema = self._schema(specs)
        try:
            with self._without_dry_run():
                sharding = self._propagator.propagate_op_sharding_non_cached(schema)
        except Exception:  # noqa: BLE001 - strategies refuse in many ways, and fail in more; none of them is a claim
            return None
        outputs = _placements_of(sharding.output_spec)
        changed = sharding.redistribute_schema if sharding.needs_redistribute else None
        ours = _sharded_op(self.op)
        if ours is not None:
            return self._by_kernel(ours, changed or schema, mesh, outputs)
        if changed is None:
            return Propagation(combination, outputs)
        wanted = [leaf for leaf in pytree.tree_leaves(changed.args_schema) if isinstance(leaf, DTensorSpec)]
        in_kwargs = combination[self._in_args :]  # DTensor never redistributes those
        inputs = (*(tuple(spec.placements) for spec in wanted), *in_kwargs)
        if not sharding.use_val_from_redistribute_schema:
            return Propagation(inputs, outputs)
        return Propagation(inputs, outputs, (changed.op, _with_slots(changed.args_schema)))

    def _by_kernel(
        self, ours: ShardedOp, schema: OpSchema, mesh: DeviceMesh, outputs: tuple[Placements | None, ...] | None
    ) -> Propagation:
        specs = [leaf for leaf in pytree.tree_leaves(schema.args_schema) if isinstance(leaf, DTensorSpec)]
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        inputs = tuple(tuple(spec.placements) for spec in specs)
        return Propagation(inputs, outputs, (ours.at(mesh, coordinate, specs), _with_slots(schema.args_schema)))

    def listed(
        self, mesh_shape: tuple[int, ...], combinations: Sequence[tuple[Placement, ...]]
    ) -> list[tuple[Placement, ...]] | None:
        """Return the input placements, on one mesh dim, of the rules that the op's strategy lists.

        An op without a strategy is traced through its decomposition with each of ``combinations``. None for an op
        whose strategy decides by the placements that it is shown, so that each combination has to be tried.
        """
        if self.op in self._propagator.op_single_dim_strategy_funcs:
            return self._listed_per_element() if self._is_foreach() else self._listed_whole(mesh_shape)
        if self.op in self._propagator.op_strategy_funcs or self.op in self._propagator.op_to_rules:
            return None
        if not self._decomposes([Replicate()] * len(self._metas)):
            return []
        return [combination for combination in combinations if self._decomposes(combination)]

    @property
    def lists_rules(self) -> bool:
        """Whether the op's strategy lists its rules for one mesh dim, whatever the placements that it is shown."""
        return self.op in self._propagator.op_single_dim_strategy_funcs

    def enumerated(self, mesh_shape: tuple[int, ...]) -> list[tuple[Placement, ...]]:
        """Return the input placements, on one mesh dim, that the op's strategy enumerates for replicated arguments."""
        strategy = self._propagator.op_strategy_funcs.get(self.op)
        if strategy is None or self.lists_rules or len(mesh_shape) > 1:
            return []
        mesh = _bare_mesh(mesh_shape, 0)
        specs = [DTensorSpec(mesh, (Replicate(),), tensor_meta=meta) for meta in self._metas]
        try:
            decided = strategy(self._propagator._wrap_with_op_strategy(self._schema(specs)))
        except Exception:  # noqa: BLE001 - as above
            return []
        rules = []
        for one in getattr(decided, "strategies", []):
            inputs = one.input_specs or ()
            placed = [spec.placements[0] for spec in inputs if isinstance(spec, DTensorSpec)]
            if len(placed) == len(self._metas):
                rules.append(tuple(placed))
        return rules

    def _listed_whole(self, mesh_shape: tuple[int, ...]) -> list[tuple[Placement, ...]] | None:
        mesh = _bare_mesh(mesh_shape, 0)
        first = next((i for i, meta in enumerate(self._metas) if len(meta.shape)), None)
        specs = [
            DTensorSpec(mesh, (Shard(0) if i == first else Replicate(),) * mesh.ndim, tensor_meta=meta)
            for i, meta in enumerate(self._metas)
        ]  # the strategy fills in Shard where it sees one among the inputs
        return self._rules(self._schema(specs), self._result_meta, len(self._metas))

    def _is_foreach(self) -> bool:
        return str(self.op).startswith(("aten._foreach_", "aten._amp_foreach_", "aten._fused_")) and any(
            isinstance(arg, list | tuple) and any(isinstance(x, torch.Tensor) for x in arg) for arg in self._args()
        )

    def _args(self) -> tuple[object, ...]:
        args: tuple[object, ...] = pytree.tree_unflatten(self._leaves, self._spec)[0]
        return args

    def _listed_per_element(self) -> list[tuple[Placement, ...]] | None:
        """Return the rules that DTensor applies to each element of the lists, here the same to all elements."""
        mesh = _bare_mesh((2,), 0)
        lengths: list[int] = []
        element: list[object] = []
        for arg in self._args():
            tensors = [x for x in arg if isinstance(x, torch.Tensor)] if isinstance(arg, list | tuple) else []
            if tensors or isinstance(arg, torch.Tensor):
                lengths.append(len(tensors) or 1)
                one = tensors[0] if tensors else arg
                assert isinstance(one, torch.Tensor)
                element.append(DTensorSpec(mesh, (Shard(0) if one.ndim else Replicate(),), tensor_meta=_meta_of(one)))
            else:
                element.append(arg)
        meta = self._result_meta[0] if isinstance(self._result_meta, list | tuple) and self._result_meta else None
        schema = OpSchema(_resolve_foreach_elementwise_overload(self.op) or self.op, tuple(element), {})
        rules = self._rules(schema, meta, len(lengths))
        if rules is None:
            return None
        return [tuple(p for p, n in zip(rule, lengths, strict=True) for _ in range(n)) for rule in rules]

    def _rules(self, schema: OpSchema, result_meta: Any, inputs: int) -> list[tuple[Placement, ...]] | None:
        info = self._propagator.op_single_dim_strategy_funcs[self.op]
        try:
            wrapped = self._propagator._wrap_with_op_strategy(schema)
            prepared = _PreparedSingleDimStrategy(info, wrapped, result_meta)
        except Exception:  # noqa: BLE001 - as above
            return None
        rules = [rule[prepared.num_outputs :] for rule in prepared.expanded_strategies]
        complete = [tuple(p for p in rule if p is not None) for rule in rules]
        return [rule for rule in complete if len(rule) == inputs]

    def _decomposes(self, combination: Sequence[Placement]) -> bool:
        """Return whether DTensor can carry ``combination`` through the op's decomposition."""
        strategy = self._propagator.decomp_strategy
        mesh = _bare_mesh((2,), 0)
        schema = self._schema([
            DTensorSpec(mesh, (placement,), tensor_meta=meta)
            for placement, meta in zip(combination, self._metas, strict=True)
        ])  # fmt: skip
        slots = dict(zip(self._slots, combination, strict=True))
        placements: Any = tuple(slots.get(i) for i in range(len(self._leaves)))
        try:
            strategy.ensure_schema_info(self.op)
            strategy._propagate_through_decomp(schema, placements, strategy._get_fake_mesh("cpu"))
        except Exception:  # noqa: BLE001 - as above
            return False
        return True

    def _schema(self, specs: Sequence[DTensorSpec]) -> OpSchema:
        leaves = list(self._leaves)
        for slot, spec in zip(self._slots, specs, strict=True):
            leaves[slot] = spec
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        propagator = self._propagator
        info = propagator.op_to_schema_info.get(self.op)
        if info is None:
            info = propagator.op_to_schema_info_for_single_dim_strategy.get(self.op)
        return OpSchema(self.op, args, kwargs, schema_info=info)

    @contextlib.contextmanager
    def _without_dry_run(self) -> Iterator[None]:
        propagator = self._propagator
        propagator._propagate_tensor_meta_non_cached = lambda op_schema: self._result_meta  # type: ignore[method-assign]
        try:
            yield
        finally:
            del propagator._propagate_tensor_meta_non_cached


def _with_slots(args: Sequence[object]) -> tuple[object, ...]:
    numbers = itertools.count()
    filled = pytree.tree_map_only(DTensorSpec, lambda _: Slot(next(numbers)), tuple(args))
    return tuple(filled)


def _meta_of(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)


def _result_meta(result: object) -> Any:
    if isinstance(result, torch.Tensor):
        return _meta_of(result)
    if isinstance(result, list | tuple):
        metas = [_meta_of(item) if isinstance(item, torch.Tensor) else None for item in result]
        return tuple(metas) if isinstance(result, tuple) else metas
    return None


def _placements_of(spec: object) -> tuple[Placements | None, ...] | None:
    if spec is None:
        return None
    specs = spec if isinstance(spec, list | tuple) else (spec,)
    return tuple(None if one is None else tuple(one.placements) for one in specs)


@functools.cache
def _bare_mesh(shape: tuple[int, ...], rank: int) -> DeviceMesh:
    """Return a mesh as ``rank`` sees it, that has a shape and nothing behind it."""
    ranks = torch.arange(math.prod(shape)).view(shape)
    return DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)


def masked_extent(placement: Placement) -> int | None:
    """Return the size of the tensor dim by whose shards a masked partial masks indices; None for all others."""
    if not isinstance(placement, _MaskPartial) or placement.offset_shape is None:
        return None
    return int(placement.offset_shape[placement.offset_dim])


def strides_of(placement: Placement) -> tuple[int, int] | None:
    """Return ``(tensor dim, split factor)`` of a strided shard; None for any other placement."""
    return (placement.dim, int(placement.split_factor)) if isinstance(placement, _StridedShard) else None


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Return the placement that cuts tensor dim ``dim`` into ``split_factor`` pieces and shards each of them."""
    placement: Placement = _StridedShard(dim, split_factor=split_factor)
    return placement


def special_placement(text: str) -> Placement | None:
    """Return the strided shard or norm partial that DTensor prints as ``text``; None for anything else.

    >>> special_placement("_S(0, 2)"), special_placement("_NormP(2)")
    (_StridedShard(dim=0, sf=2), _NormPartial(2))
    """
    if match := re.fullmatch(r"_S\((\d+), (\d+)\)", text):
        return strided_shard(int(match[1]), int(match[2]))
    if match := re.fullmatch(r"_NormP\((-?[\d.]+)\)", text):
        return _NormPartial(float(match[1]) if "." in match[1] else int(match[1]))
    return None


placement_parsers.append(special_placement)


def norm_order(placement: Placement) -> float | None:
    """Return the p of a Partial whose parts are p-norms of parts of the vector; None for any other placement."""
    return float(placement.norm_type) if isinstance(placement, _NormPartial) else None


# ------------------------------------------------------------------------------------------------------------ refusals
_BACKEND_REFUSALS = (
    "Cannot use ReduceOp",  # gloo and nccl on a reduction that they lack
    "Unsupported data type",
    "Invalid scalar type",
)
_VIEW_REFUSALS = (  # a view must not communicate
    "Please redistribute the tensor before this operation",
    "Please redistribute the input first",
)
_PARTIAL_REFUSALS = (
    "redistributing to Partial is for internal use only",
    "does not support complex tensors",  # an all-reduce by product, minimum or maximum
)
_MIXED_REFUSALS = ("got mixed torch.Tensor and DTensor",)  # as where a function of torch makes plain tensors itself
_CONVOLUTION_REFUSALS = ("for tensor parallel convolution",)  # of strides, dilations and sizes
_UNEVEN_REFUSALS = ("cannot be evenly sharded",)  # nll_loss, whose mean would be biased
_SAYS_SO = re.compile(r"\b(not (yet )?supported|unsupported|(does not|doesn't|cannot) support)\b", re.IGNORECASE)


def is_refusal(error: BaseException) -> bool:
    """Return True if DTensor or the backend says plainly that it does not support what was asked.

    ``NotImplementedError`` is the documented way. The communication backends and the view ops raise RuntimeError, so
    theirs are known by their message; elsewhere in DTensor, whatever it raises, the message has to say so.
    """
    if isinstance(error, NotImplementedError):
        return True
    text = str(error)
    if isinstance(error, RuntimeError | ValueError) and text.startswith(_BACKEND_REFUSALS):
        return True
    if isinstance(error, RuntimeError):
        known = (*_VIEW_REFUSALS, *_PARTIAL_REFUSALS, *_MIXED_REFUSALS, *_CONVOLUTION_REFUSALS, *_UNEVEN_REFUSALS)
        if any(refusal in text for refusal in known):
            return True
    return _raised_by_dtensor(error) and bool(_SAYS_SO.search(text))


def _raised_by_dtensor(error: BaseException) -> bool:
    """Return whether the exception came from torch's distributed package and not from a kernel."""
    code = raised_in(error)
    return code is not None and f"{os.sep}torch{os.sep}distributed{os.sep}" in code.co_filename


def raised_in(error: BaseException) -> CodeType | None:
    """Return the code that raised ``error``; None if nothing has raised it yet."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return None if step is None else step.tb_frame.f_code


def release_groups(mesh: DeviceMesh) -> None:
    """Let go of the process groups of a mesh that nobody uses any more, with their threads and connections.

    The mesh itself may live on in some cache of DTensor's.
    """
    mesh._pg_registry.clear()


def mesh_of_world(
    device: str, shape: tuple[int, ...], backend: str | None = None, dim_names: tuple[str, ...] = ()
) -> DeviceMesh:
    """Return a mesh of all ranks of the default process group, with groups of ``backend`` if it is given."""
    names = dim_names or None
    if backend is None:
        return dist.device_mesh.init_device_mesh(device, shape, mesh_dim_names=names)
    overrides: dict[int | str, Any] = dict.fromkeys(range(len(shape)), backend)
    return dist.device_mesh.init_device_mesh(device, shape, mesh_dim_names=names, backend_override=overrides)


def chunk_sharded(
    piece: torch.Tensor, dim: int, ranks: Sequence[int], shape: Sequence[int], group: dist.ProcessGroup
) -> Any:
    """Return a legacy ShardedTensor of ``shape``, of which this rank has ``piece`` and ``ranks`` the pieces in order.

    Programs call it, so it has its imports in itself: its source stands in scripts that need torch alone.
    """
    import warnings

    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    # its kernels call what is deprecated, and would hide what ends a process among as many warnings
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    warnings.filterwarnings("ignore", "Please use DTensor", FutureWarning)
    spec = ChunkShardingSpec(dim, [f"rank:{rank}/{piece.device}" for rank in ranks])
    return ShardedTensor._init_from_local_tensor(piece, spec, shape, process_group=group)


# ------------------------------------------------------------------------------------------- CUDA tensors through gloo
_FUNCTIONAL_COLLECTIVES = (
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_gather_into_tensor",
    "all_gather_into_tensor_out",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "all_to_all_single",
    "broadcast",
    "broadcast_",
)


def stage_through_host() -> list[torch.library.Library]:
    """Have DTensor's collectives on CUDA tensors copy these to the host and back; lasts as long as what is returned.

    Gloo itself does so for some collectives, and reads from the GPU's addresses in others, which ends the process:
    https://github.com/pytorch/pytorch/issues/152645, on the very one with which DTensor gathers.
    """
    libraries = []
    for namespace, names in (("_c10d_functional", _FUNCTIONAL_COLLECTIVES), ("_dtensor", ("shard_dim_alltoall",))):
        library = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
        for name in names:
            op = getattr(getattr(torch.ops, namespace), name).default
            library.impl(name, staged_collective(op), "CUDA")  # type: ignore[no-untyped-call]
        libraries.append(library)
    return libraries


def staged_collective(op: OpOverload) -> Callable[..., Any]:
    """Return a function that does what the functional collective ``op`` does, by way of the host's memory."""
    written = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]

    def run(*args: Any, **kwargs: Any) -> Any:
        named = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
        device = next(leaf.device for leaf in pytree.tree_leaves(named) if isinstance(leaf, torch.Tensor))
        hosted = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("cpu", copy=True), named)
        result = pytree.tree_map_only(torch.Tensor, torch.ops._c10d_functional.wait_tensor, op(**hosted))
        if written:  # one tensor in each of these ops, which they return
            (name,) = written
            return named[name].copy_(result)
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), result)

    return run


# -------------------------------------------------------------------------------------------------------------- OpInfo
def registered_overloads() -> frozenset[OpOverload]:
    """Return the overloads that DTensor has a rule of its own for, in any of its registries."""
    dispatcher = DTensor._op_dispatcher
    propagator = dispatcher.sharding_propagator
    return frozenset(
        [
            *propagator.op_strategy_funcs,
            *propagator.op_single_dim_strategy_funcs,
            *propagator.op_to_rules,
            *dispatcher._random_ops,
        ]
    )


def selected_overload(op: object, args: Sequence[object], kwargs: Mapping[str, object]) -> OpOverload | None:
    """Return the overload that a call of ``op`` runs: of ``torch.ops.aten.sum``, or of a function made a custom op.

    None if ``op`` is neither, and if the arguments fit no overload.
    """
    if isinstance(op, CustomOpDef):
        return op._opoverload
    if not isinstance(op, OpOverloadPacket):
        return None
    names: list[str] = op.overloads()  # type: ignore[no-untyped-call]
    if len(names) > 1:
        try:
            names = [torch._C._jit_resolve_packet(op._qualified_op_name, *args, **kwargs) or "default"]
        except RuntimeError:  # it says what fits none, which the call itself will do
            return None
    overload: OpOverload = getattr(op, names[0])
    return overload


def definition_of(op: OpOverload) -> Callable[..., object] | str:
    """Return the function that was made a custom op; of an operator of a library, the file that defines it."""
    name = op._schema.name
    if (made := OPDEFS.get(name)) is not None:
        function: Callable[..., object] = made._init_fn
        return function
    found = re.search(r"^debug: registered at (.*):\d+$", torch._C._dispatch_dump(name), re.MULTILINE)
    return found[1] if found else ""


def has_decomposition(op: OpOverload) -> bool:
    """Return whether DTensor can derive the sharding of ``op`` from a decomposition."""
    return bool(DecompShardingStrategy.has_decomp(op))


def is_composite(op: OpOverload) -> bool:
    """Return whether autograd takes ``op`` apart, so that DTensor sees the op itself in inference mode only."""
    name: str = op.name()  # type: ignore[no-untyped-call]
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


@functools.cache
def opinfo_entries() -> tuple[Any, ...]:
    """Return torch's own descriptions of its ops, with generators of arguments: ``op_db`` and the foreach lists.

    The first call imports torch's test utilities, which takes about 2 s.
    """
    from torch.testing._internal import common_methods_invocations as db

    foreach = ("unary", "binary", "pointwise", "reduce", "other")
    return (*db.op_db, *(entry for kind in foreach for entry in getattr(db, f"foreach_{kind}_op_db")))


def _opinfo_modules() -> list[Any]:
    import importlib
    import pkgutil

    from torch.testing._internal import common_methods_invocations as db
    from torch.testing._internal.opinfo import definitions

    names = [module.name for module in pkgutil.iter_modules(definitions.__path__)]
    return [db, *(importlib.import_module(f"{definitions.__name__}.{name}") for name in names)]


@contextlib.contextmanager
def opinfo_sizes(constants: Mapping[str, int], foreach: Sequence[tuple[int, ...]]) -> Iterator[None]:
    """Let torch's generators of arguments use other sizes inside the block.

    Parameters
    ----------
    constants
        Values of the constants that they are written with: S, M, L, XS.
    foreach
        Shapes of the tensors in each list of a foreach op; torch has square ones only.
    """
    from torch.testing import make_tensor
    from torch.testing._internal import common_methods_invocations as db

    def foreach_tensors(
        info: object, device: str, dtype: torch.dtype, count: int, **options: Any
    ) -> list[torch.Tensor]:
        kept = {name: options[name] for name in ("low", "high", "requires_grad") if name in options}
        return [make_tensor(foreach[i % len(foreach)], dtype=dtype, device=device, **kept) for i in range(count)]

    replaced: list[tuple[Any, str, object]] = []
    try:
        for module in _opinfo_modules():
            for name, value in constants.items():
                if isinstance(getattr(module, name, None), int):
                    replaced.append((module, name, getattr(module, name)))
                    setattr(module, name, value)
        replaced.append((db, "sample_inputs_foreach", vars(db)["sample_inputs_foreach"]))
        setattr(db, "sample_inputs_foreach", foreach_tensors)  # noqa: B010
        yield
    finally:
        for module, name, old in reversed(replaced):
            setattr(module, name, old)


def opinfo_samples(entry: Any, dtype: torch.dtype, *, requires_grad: bool) -> Iterator[Any]:
    """Return the sample inputs that ``entry`` generates, without torch's seeding (it depends on the running test)."""
    options = {"num_input_tensors": [2]} if entry.name.startswith("_foreach") else {}
    # not entry.sample_inputs: it seeds by the running test, which it finds by walking the stack for every sample
    samples: Iterator[Any] = iter(entry.sample_inputs_func(entry, "cpu", dtype, requires_grad, **options))
    return samples


def torch_converter(mesh: DeviceMesh, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """Return the ``DTensorConverter`` of torch's own tests: an iterator of ``(args, kwargs)`` made of DTensors.

    They are replicated or evenly sharded. It makes them by ``distribute_tensor``, so all ranks have to call it.
    """
    from torch.testing._internal.distributed._tensor.common_dtensor import DTensorConverter

    return DTensorConverter(mesh, args, kwargs)


_EMPTY = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
"""Ops that return memory as it is: what is captured would differ from process to process, as the noise of rrelu does
where it is not training."""


class _Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(
        self, wanted: Callable[[OpOverload], bool], largest: int, calls: list[tuple[OpOverload, Any, Any]]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wanted, self.largest, self.calls = wanted, largest, calls

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.wanted(func):
            values = [*args, *kwargs.values()]
            # aten has no deeper nesting; pytree would take most of the time
            flat = [leaf for value in values for leaf in (value if isinstance(value, list | tuple) else (value,))]
            tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
            if tensors and all(self._plain(tensor) for tensor in tensors):
                # copied now, since a later call may write into them
                copies = tuple(map(_plain_copies, args)), {name: _plain_copies(v) for name, v in kwargs.items()}
                self.calls.append((func, *copies))
        result = func(*args, **kwargs)
        if func.overloadpacket.__name__ in _EMPTY:
            result.zero_()
        return result

    def _plain(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.layout == torch.strided
            and tensor.device.type == "cpu"
            and not tensor.is_quantized
            and tensor.numel() <= self.largest
        )


def _plain_copies(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return type(value)(map(_plain_copies, value)) if isinstance(value, list | tuple) else value


@contextlib.contextmanager
def capture_calls(
    wanted: Callable[[OpOverload], bool], largest: int
) -> Iterator[list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]]]:
    """Collect the calls of aten overloads inside the block that ``wanted`` accepts, with copies of their tensors.

    Calls without a tensor, with one of more than ``largest`` elements, or with one that is not plain (sparse,
    quantized, on another device) are left out. The copies are contiguous. Memory that nobody has written to is 0.
    """
    calls: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]] = []
    with _Capture(wanted, largest, calls):
        yield calls
