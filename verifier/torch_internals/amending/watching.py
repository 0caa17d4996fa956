"""Amendments that see each op of DTensors, before and after it runs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import _sharding_prop as sharding_prop
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpInfo, OpSchema, OpSpec
from torch.distributed.tensor._ops._mask_buffer import MaskBuffer
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from verifier.torch_internals.amending.propagation import is_torchs, refusing
from verifier.torch_internals.amending.registrations import handled_where, layered
from verifier.torch_internals.caches import clear_caches
from verifier.torch_internals.ops import registered_overloads, written_tensors
from verifier.torch_internals.registries import is_registered_by_user
from verifier.torch_internals.watching import memory_of

__all__ = [
    "keywords_replicated",
    "locals_measured",
    "masks_of_their_own",
    "users_copies_unwritten",
    "views_of_copies_unwritten",
]


class _LostWrites:
    """Refuses to write to a view that shares no memory with its base, because the base was redistributed.

    A write to the base is refused as well, as long as somebody holds such a view.
    """

    def __init__(self) -> None:
        self._copies: dict[int, torch.Tensor] = {}  # keeps the memory, so that no other tensor gets it
        self._bases: dict[int, tuple[torch.Tensor, list[weakref.ref[DTensor]]]] = {}

    @refusing
    def refuse_lost(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not func._schema.is_mutable:
            return
        memories = [memory_of(tensor._local_tensor) for tensor in _dtensors(written_tensors(func, args, kwargs))]
        if any(memory in self._copies for memory in memories):
            raise NotImplementedError(f"{func} is not supported on a view of a redistributed tensor")
        if any(view() is not None for memory in memories for view in self._bases.get(memory, (None, []))[1]):
            raise NotImplementedError(f"{func} is not supported on a tensor of whose copy there is a view")

    def note(self, func: OpOverload, args: tuple[Any, ...], result: object) -> None:
        views = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.arguments)
        if not views or not isinstance(args[0], DTensor):
            return
        base = memory_of(args[0]._local_tensor)
        for tensor in _dtensors(result):
            memory = memory_of(tensor._local_tensor)
            if memory and (memory != base or base in self._copies):
                self._copies[memory] = tensor._local_tensor
                if base and memory != base:
                    held = self._bases.setdefault(base, (args[0]._local_tensor, []))
                    held[1].append(weakref.ref(tensor))


class _ReplicatesKeywords(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replicates tensors that are given by keyword and not written to, before DTensor decides on the op.

    Where the op runs by a rule of the user's, the tensors get the placements that this rule asks for.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = {one.name for one in func._schema.arguments if one.alias_info is None or not one.alias_info.is_write}
        named = {name for name, value in kwargs.items() if name in read and isinstance(value, DTensor)}
        if named and is_torchs(func):
            kwargs = {name: _whole(value) if name in named else value for name, value in kwargs.items()}
        elif named:
            with torch.no_grad():
                for name, placements in _asked_for(func, args, kwargs).items():
                    if name in named:
                        kwargs = {**kwargs, name: kwargs[name].redistribute(placements=placements)}
        return func(*args, **kwargs)


def _asked_for(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Sequence[Placement]]:
    """Return the placements that the rule which DTensor chooses asks for of tensors given by keyword."""
    dispatcher = DTensor._op_dispatcher
    choose = sharding_prop._select_min_cost_strategy
    chosen: list[OpSpec] = []

    def noted(*given: Any) -> OpSpec:
        chosen.append(choose(*given))
        return chosen[-1]

    try:
        schema: Any = dispatcher.unwrap_to_op_info(func, args, kwargs).schema
        with mock.patch.object(sharding_prop, "_select_min_cost_strategy", noted):
            dispatcher.sharding_propagator.propagate_op_sharding_non_cached(schema)
    except Exception:  # noqa: BLE001 - the op itself is about to raise the same
        return {}
    names = [name for name, value in schema.kwargs_schema.items() if isinstance(value, DTensorSpec)]
    inputs = chosen[-1].input_specs if chosen else None
    if inputs is None or len(inputs) != len(schema.args_spec) + len(names):
        return {}
    asked = inputs[len(schema.args_spec) :]
    return {name: spec.placements for name, spec in zip(names, asked, strict=True)}


_MASKING = ("aten.embedding.", "aten.gather.", "aten.index_select.")


def _dtensors(tree: object) -> list[DTensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, DTensor)]


def _by_argument(schema: Sequence[Any], given: OpInfo) -> Sequence[Any]:
    """Return what DTensor knows of each argument of a call, of which it may have taken the lists apart."""
    if given.args_tree_spec is None:
        return schema
    whole: Sequence[Any] = pytree.tree_unflatten(pytree.tree_leaves(schema), given.args_tree_spec)
    return whole


def _whole(tensor: DTensor) -> DTensor:
    with torch.no_grad():
        return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


@contextlib.contextmanager
def keywords_replicated() -> Iterator[None]:
    """Let DTensor replicate tensors that are given by keyword, or redistribute them as a rule of the user's asks."""
    with _ReplicatesKeywords():
        yield


@contextlib.contextmanager
def views_of_copies_unwritten() -> Iterator[None]:
    """Let DTensor refuse to write to a view if it redistributed the base, so that the base would not see the write."""
    lost = _LostWrites()

    def handler(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        lost.refuse_lost(op, args, kwargs)
        result = op(*args, **kwargs)
        lost.note(op, args, result)
        return result

    aliasing = (op for op in registered_overloads() if any(one.alias_info is not None for one in op._schema.arguments))
    known = tuple(aliasing)
    with layered(known, handler), handled_where(_writes, handler, known):  # DTensor decomposes some of the others
        yield


def _writes(op: OpOverload) -> bool:
    return op._schema.is_mutable


@contextlib.contextmanager
def users_copies_unwritten() -> Iterator[None]:
    """Let DTensor refuse to redistribute a tensor to which an op of the user's writes, whatever the op is called.

    So it is for an op of torch whose rules the user registers.
    """
    redistribute = OpDispatcher.redistribute_local_args

    @refusing
    def unless_written(given: OpInfo, wanted: OpSchema, of_wanted: bool) -> None:
        of_user = wanted.op.namespace not in ("aten", "prims") or is_registered_by_user(wanted.op)
        arguments = wanted.op._schema.arguments if of_user else ()
        both = (_by_argument(leaves, given) for leaves in (given.flat_args_schema, wanted.args_schema))
        for argument, before, after in zip(arguments, *both, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and pytree.tree_leaves(before) != pytree.tree_leaves(after):
                raise NotImplementedError(f"{wanted.op} is not supported where what it writes to is redistributed")
        redistribute(given, wanted, of_wanted)

    with mock.patch.object(OpDispatcher, "redistribute_local_args", staticmethod(unless_written)):
        yield


@contextlib.contextmanager
def masks_of_their_own() -> Iterator[None]:
    """Let each masked result keep a mask of its own, which no reduction of the result releases.

    DTensor decides again on each op that may mask its result, so that each result has its own placement.
    """

    def afresh(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        clear_caches()
        return op(*args, **kwargs)

    masking = (op for op in registered_overloads() if str(op).startswith(_MASKING))
    with layered(masking, afresh), mock.patch.object(MaskBuffer, "release_mask", return_value=None):
        yield


@contextlib.contextmanager
def locals_measured() -> Iterator[None]:
    """Let ``from_local`` ask all ranks for the sizes of their local tensors where it is given no shape."""
    wrap = DTensor.from_local

    def measured(
        local_tensor: torch.Tensor, device_mesh: DeviceMesh | None = None, placements: Any = None, **options: Any
    ) -> DTensor:
        if options.get("shape") is None and device_mesh is not None and placements is not None:
            sizes = list(local_tensor.shape)
            for mesh_dim in reversed(range(device_mesh.ndim)):  # the last mesh dim cuts what the others have left
                if isinstance(placement := placements[mesh_dim], Shard):
                    size = torch.tensor(sizes[placement.dim])
                    dist.all_reduce(size, group=device_mesh.get_group(mesh_dim))
                    sizes[placement.dim] = int(size)
            options["shape"] = torch.Size(sizes)
            options["stride"] = torch.empty(options["shape"], device="meta").stride()
        return wrap(local_tensor, device_mesh, placements, **options)

    with mock.patch.object(DTensor, "from_local", staticmethod(measured)):
        yield
