"""Ops that run as one kernel call per rank: the frame for our own strategies."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed import _local_tensor as local_tensor_module
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._local_tensor import LocalTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OutputSharding
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from verifier.torch_internals.dtensors import new_dtensor
from verifier.torch_internals.placements import Placements, strides_of
from verifier.torch_internals.simulation import paused_simulation, simulated_ranks

__all__ = [
    "RankView",
    "ShardedOp",
    "given_strides",
    "on_each_rank",
    "remembered_decisions",
]


@dataclass(frozen=True)
class RankView:
    """What a rank may know of a call besides its own tensors.

    Parameters
    ----------
    mesh_shape, coordinate
        The shape of the mesh, and the position of the rank in it.
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
        start, stop = 0, shape[tensor_dim]  # computed without tensors, so that a call can be traced
        for mesh_dim in self.cuts(number, tensor_dim):
            chunk = -(-(stop - start) // self.mesh_shape[mesh_dim])
            start = min(start + self.coordinate[mesh_dim] * chunk, stop)
            stop = min(start + chunk, stop)
        return start, stop

    def cuts(self, number: int, tensor_dim: int) -> tuple[int, ...]:
        """Return the mesh dims that shard ``tensor_dim`` of tensor argument ``number``."""
        return tuple(
            mesh_dim
            for mesh_dim, placement in enumerate(self.placements[number])
            if isinstance(placement, Shard) and placement.dim == tensor_dim
        )


def _is_of_a_copy(tensor: object) -> bool:
    """Return whether DTensor redistributed the base of a view, so that the base would not see what is written to it.

    Tensors that stand in for others while a call is traced have storages of their own, which tell nothing.
    """
    if not isinstance(tensor, DTensor) or not isinstance(base := tensor._base, DTensor):
        return False
    of_view, of_base = map(_storages, (tensor._local_tensor, base._local_tensor))
    return of_view != of_base and None not in (*of_view, *of_base)


def _storages(local: torch.Tensor) -> list[int | None]:
    if isinstance(local, LocalTensor):
        return [storage for each in local._local_tensors.values() for storage in _storages(each)]
    if isinstance(local, AsyncCollectiveTensor):
        local = local.elem
    return [local.untyped_storage()._cdata if type(local) in (torch.Tensor, torch.nn.Parameter) else None]


@dataclass(frozen=True)
class ShardedOp:
    """An op that DTensor runs by our own rules and kernel.

    Parameters
    ----------
    op
        The overload.
    rules
        Called with the op, its arguments and its keyword arguments, in which a tensor is its ``TensorMeta``. Returns
        rules for one mesh dim: the placements of each result, then of each tensor argument. Shards may be uneven or
        empty.
    kernel
        Called with a :class:`RankView` and the arguments, with the rank's local tensors in them. Returns the rank's
        local tensors of the result. It does not communicate.
    static_argnum
        The rules depend on arguments that are no tensors, from this argument on.
    check
        Called with the arguments; raises if they are not supported. It may look only at placements, shapes, dtypes and
        arguments that are no tensors, because it is not called again when all of these are the same.
    flag, before
        If argument number ``flag`` is true, ``before`` is called with the arguments. It returns the arguments to use
        instead, and further keyword arguments for the kernel. ``before`` may communicate.
    as_it_is
        Whether the kernel, without further keyword arguments, is the op itself on the local tensors. Such a call
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
        if self.in_place and _is_of_a_copy(args[0]):
            raise NotImplementedError(f"{op} is not supported on a view of a redistributed tensor")
        if self.before is not None and len(args) > self.flag and args[self.flag]:
            args, extra = self.before(args)
        key, local = _call_key(op, args, kwargs)
        try:
            decision = remembered_decisions.get(key)
        except TypeError:  # symbolic sizes have no hash, while torch.compile traces
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
            return new_dtensor(DTensor, result, spec, requires_grad=result.requires_grad)
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
            if len(remembered_decisions) >= _MOST_DECISIONS:
                remembered_decisions.clear()
            coordinate = info.compute_mesh.get_coordinate()
            assert coordinate is not None, "this rank is part of the mesh"
            meshes = tuple(arg._spec.mesh for arg in args if isinstance(arg, DTensor))
            view = _view(info.compute_mesh, specs, coordinate)
            as_it_is = self.as_it_is is not None and self.as_it_is(view)
            remembered_decisions[key] = _Decision(view, as_it_is, sharding.output_spec, meshes)
        results = _by_rank(self.kernel, info.compute_mesh, specs, local_args, {**info.local_kwargs, **extra})
        return args[0] if self.in_place else dispatcher.wrap(results, sharding.output_spec)

    @functools.cached_property
    def in_place(self) -> bool:
        """Whether the op changes and returns its first argument, whose placements the rules must not change."""
        alias = self.op._schema.arguments[0].alias_info
        return alias is not None and alias.is_write

    def rules_to_decide_by(
        self, op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> list[list[Placement | None]]:
        """Return :attr:`rules`; during a call, without the rules that need a Partial which no argument has.

        Turning a non-Partial argument into Partial is never cheaper than replicating it, so these rules are dropped.
        DTensor computes the cost of each product of rules over all mesh dims: ``rules ** 3`` on three.
        """
        rules, given = self.rules(op, args, kwargs), _given_placements.get()
        if given is None:
            return rules
        results = len(op._schema.returns)
        return [rule for rule in rules if all(p is None or not p.is_partial() or p in given for p in rule[results:])]

    def at(self, mesh: DeviceMesh, coordinate: Sequence[int], specs: Sequence[DTensorSpec]) -> Callable[..., object]:
        """Return the kernel as the rank at ``coordinate`` runs it on tensors that are placed by ``specs``."""
        return functools.partial(self.kernel, _view(mesh, specs, coordinate))


def given_strides() -> tuple[Placement, ...]:
    """Return the strided shards among the arguments of the call whose rules DTensor is asking for, if it is."""
    return tuple(p for p in _given_placements.get() or () if strides_of(p))


@dataclass(frozen=True)
class _Decision:
    """What all calls with the same specs, other arguments and mesh have in common.

    ``meshes`` keeps the meshes alive whose ids are in the key.
    """

    view: RankView
    as_it_is: bool
    result: Any
    meshes: tuple[DeviceMesh, ...]


_given_placements: ContextVar[set[Placement] | None] = ContextVar("_given_placements", default=None)
"""The placements of the arguments of the call that DTensor is deciding."""
_SCALARS = frozenset({bool, int, float, str, type(None)})
_MOST_DECISIONS = 4096
remembered_decisions: dict[tuple[object, ...] | None, _Decision] = {}
"""Keys are from :func:`_call_key`. DTensor has the same cache, but unpacks the call before a look-up: that is slower.

:func:`clear_caches` empties it.
"""


def _call_key(
    op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...] | None, list[object]]:
    """Return everything that decides how a call is run, and the arguments with the local tensors in them.

    The key is None, without arguments, if the call must not be remembered.

    Meshes with the same ranks, names and threads are equal, although this rank may have another position in each: one
    may be of a later process group, or of a later thread with a reused number. The key therefore has the meshes' ids.
    """
    if kwargs or local_tensor_module.local_tensor_mode() is not None:
        return None, []
    key: list[object] = [op]
    local: list[object] = []
    for arg in args:
        kind = type(arg)
        if kind is DTensor:
            spec = arg._spec  # type: ignore[attr-defined]
            # not the spec: it is a new object in each backward, and its hash and comparison are slow Python code
            key += (id(spec.mesh), spec.placements, spec.tensor_meta, spec.shard_order)
            local.append(arg._local_tensor)  # type: ignore[attr-defined]
        elif kind in _SCALARS:
            key += (kind, arg)  # 1 is not True
            local.append(arg)
        else:
            return None, []
    return tuple(key), local


def on_each_rank(function: Callable[..., object], *tensors: DTensor) -> None:
    """Call ``function`` with a :class:`RankView` and the local tensors, which it may write to.

    If the ranks are simulated, ``function`` is called for each rank.
    """
    mesh = tensors[0].device_mesh
    if mesh._is_current_rank_part_of_mesh():
        specs = [tensor._spec for tensor in tensors]
        _by_rank(function, mesh, specs, [tensor._local_tensor for tensor in tensors], {})


def _view(mesh: DeviceMesh, specs: Sequence[DTensorSpec], coordinate: Sequence[int]) -> RankView:
    shapes = tuple(tuple(spec.shape) for spec in specs)
    placements = tuple(tuple(spec.placements) for spec in specs)
    return RankView(tuple(mesh.shape), tuple(coordinate), shapes, placements)


def _by_rank(
    function: Callable[..., object],
    mesh: DeviceMesh,
    specs: Sequence[DTensorSpec],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> object:
    """Return the result of ``function`` with this rank's view, or with every rank's if ranks are simulated."""
    if simulated_ranks() is None:
        coordinate = mesh.get_coordinate()
        assert coordinate is not None, "this rank is not part of the mesh"
        return function(_view(mesh, specs, coordinate), *args, **kwargs)
    with paused_simulation():
        by_rank = {}
        coordinates = itertools.product(*map(range, mesh.shape))  # the last mesh dim varies fastest
        for coordinate, rank in zip(coordinates, mesh.mesh.flatten().tolist(), strict=True):
            own_args, own_kwargs = _of_rank(rank, (tuple(args), dict(kwargs)))
            by_rank[rank] = function(_view(mesh, specs, coordinate), *own_args, **own_kwargs)
    return pytree.tree_map(lambda *values: _joined(dict(zip(by_rank, values, strict=True))), *by_rank.values())


def _joined(values: dict[int, object]) -> object:
    """Return the tensors of simulated ranks as one tensor; other values are the same on all ranks."""
    first = next(iter(values.values()))
    return LocalTensor(values) if isinstance(first, torch.Tensor) else first  # type: ignore[no-untyped-call]


def _of_rank(rank: int, values: Any) -> Any:
    """Return the pytree ``values`` with the local tensors of simulated rank ``rank``."""
    return pytree.tree_map_only(LocalTensor, lambda tensor: tensor._local_tensors[rank], values)
