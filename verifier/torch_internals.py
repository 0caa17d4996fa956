"""The only importer of torch's private modules: what the verifier must know of DTensor's insides, in one place.

Everything here was read off torch 2.13.0. Where a name is missing in another version, :func:`require` says which.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.distributed import _local_tensor as local_tensor_module
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor import _dispatch as dispatch_module
from torch.distributed.tensor import _redistribute as redistribute_module
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpInfo, OpSchema
from torch.distributed.tensor.debug import (
    CommDebugMode,
    _clear_sharding_prop_cache,
    _get_fast_path_sharding_prop_cache_stats,
)
from torch.distributed.tensor.placement_types import Placement, _MaskPartial, _StridedShard
from torch.utils import _pytree as pytree

from verifier.cases import Placements

__all__ = [
    "LocalShards",
    "Recorder",
    "cache_misses",
    "clear_caches",
    "count_collectives",
    "is_refusal",
    "let_new_rules_win",
    "local_shards",
    "make_rank_tensors",
    "mesh_of_world",
    "paused_simulation",
    "per_rank",
    "placement_text",
    "pytree",
    "simulated_mode",
    "simulated_ranks",
    "start_simulated_world",
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


# -------------------------------------------------------------------------------------------------------- local shards
@dataclass(frozen=True)
class LocalShards:
    """What this process holds of a DTensor, in terms of :mod:`verifier.placements`.

    ``text`` is the placements as DTensor prints them. ``placements`` is None where a placement is not understood, and
    ``reason`` then names it. A masked partial is turned into the plain ``P(sum)`` that it promises to be: masked
    elements count as 0.
    """

    text: str
    placements: Placements | None
    locals: dict[int, torch.Tensor]
    reason: str = ""


def per_rank(tensor: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return this process's value of ``tensor`` by rank: one entry, or all of them if ranks are simulated."""
    if isinstance(tensor, LocalTensor):
        return {int(rank): local.detach() for rank, local in sorted(tensor._local_tensors.items())}
    return {dist.get_rank(): tensor.detach()}


def placement_text(placements: Sequence[Placement]) -> str:
    """Return placements as text; a masked partial is ``MaskP(sum)``, whatever its table's shape."""
    texts = [f"MaskP({p.reduce_op})" if isinstance(p, _MaskPartial) else str(p) for p in placements]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def local_shards(tensor: DTensor) -> LocalShards:
    """Return what this process holds of ``tensor``: its own local tensor, or every rank's if ranks are simulated."""
    locals_ = per_rank(tensor._local_tensor)
    text = placement_text(tensor.placements)
    understood: list[Placement] = []
    for placement in tensor.placements:
        if isinstance(placement, _MaskPartial):
            mask = placement.mask_buffer.data
            if mask is None:
                return LocalShards(text, None, locals_, "a masked partial has lost its mask")
            masks = per_rank(mask)
            for rank, local in locals_.items():
                if local.shape[: masks[rank].ndim] != masks[rank].shape:
                    got, needed = list(masks[rank].shape), list(local.shape)
                    return LocalShards(text, None, locals_, f"a mask of shape {got} on a local tensor of {needed}")
            locals_ = {rank: _without_masked(local, masks[rank]) for rank, local in locals_.items()}
            understood.append(Partial(placement.reduce_op))
        elif isinstance(placement, _StridedShard) or type(placement).__name__ not in ("Replicate", "Shard", "Partial"):
            return LocalShards(text, None, locals_, f"placement {placement} is not modelled")
        else:
            understood.append(placement)
    return LocalShards(text, tuple(understood), locals_)


def _without_masked(local: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return ``local`` [*mask.shape, ...] with 0 where ``mask`` is set: what the rank contributes to the sum."""
    widened = mask.view(*mask.shape, *(1 for _ in range(local.ndim - mask.ndim)))
    return torch.where(widened, torch.zeros((), dtype=local.dtype), local)


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
        if _recorders and current.placements != target.placements:
            steps = _plan_steps(local, current, target, options.get("use_graph_based_transform"))
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


def cache_misses() -> int:
    """Return how often DTensor's sharding propagation missed its cache in this process so far."""
    return int(_get_fast_path_sharding_prop_cache_stats()[1])  # type: ignore[no-untyped-call]


def clear_caches() -> None:
    """Empty DTensor's sharding propagation caches, so that rules registered later are used."""
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


# --------------------------------------------------------------------------------------------------------------- rules
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


# ------------------------------------------------------------------------------------------------------------ refusals
_BACKEND_REFUSALS = (
    "Cannot use ReduceOp",  # gloo and nccl on a reduction that they lack
    "Unsupported data type",
    "Invalid scalar type",
)
_VIEW_REFUSAL = "Please redistribute the tensor before this operation"  # a view must not communicate


def is_refusal(error: BaseException) -> bool:
    """Return True if DTensor or the backend says plainly that it does not support what was asked.

    ``NotImplementedError`` is the documented way. The communication backends and the view ops raise RuntimeError, so
    theirs are known by their message.
    """
    if isinstance(error, NotImplementedError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (text.startswith(_BACKEND_REFUSALS) or _VIEW_REFUSAL in text)


def mesh_of_world(device: str, shape: tuple[int, ...]) -> DeviceMesh:
    """Return a mesh of all ranks of the default process group."""
    return dist.device_mesh.init_device_mesh(device, shape)
