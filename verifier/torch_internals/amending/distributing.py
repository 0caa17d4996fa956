"""Amendments to how tensors come to a mesh and leave it, also on ranks that the mesh lacks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.distributed import tensor as dtensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _api
from torch.distributed.tensor._collective_utils import mesh_broadcast
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpInfo, OpSchema
from torch.distributed.tensor._redistribute import NestedRedistribute, Redistribute
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree as pytree

from verifier.torch_internals.amending.registrations import exchanged, layered

__all__ = [
    "norms_of_several_meshes",
    "orders_in_memory_kept",
    "orders_of_arguments_kept",
    "placements_counted",
    "strided_shards_scattered",
    "strides_of_kernels",
    "without_handlers_beside_meshes",
]


def strided_shards_scattered() -> contextlib.AbstractContextManager[None]:
    """Let ``distribute_tensor`` broadcast a tensor of which strided shards are uneven, and each rank take its shard."""

    def wrap(scatter: Any) -> Any:
        def scattered(
            self: _StridedShard, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, source: int | None = 0
        ) -> Any:
            pieces = mesh.size(mesh_dim) * int(self.split_factor)
            if source is None or mesh.get_coordinate() is None or tensor.shape[self.dim] % pieces == 0:
                return scatter(self, tensor, mesh, mesh_dim, source)
            held = tensor.clone(memory_format=torch.contiguous_format)
            mesh_broadcast(held, mesh, mesh_dim=mesh_dim, group_src=source)
            return scatter(self, held, mesh, mesh_dim, None)

        return scattered

    return exchanged(_StridedShard, "_shard_tensor", wrap)


def norms_of_several_meshes() -> contextlib.AbstractContextManager[None]:
    """Let ``clip_grad_norm_`` reduce the norms of gradients on different meshes before it puts these together."""

    def wrap(clip: Any) -> Any:
        @torch.no_grad()
        def clipped(parameters: Any, max_norm: float, norm_type: float = 2.0, *rest: Any, **options: Any) -> Any:
            held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            gradients = [one.grad for one in held if one.grad is not None]
            meshes = {one.device_mesh for one in gradients if isinstance(one, DTensor)}
            if len(meshes) < 2:
                return clip(held, max_norm, norm_type, *rest, **options)
            norms: list[Any] = [torch.linalg.vector_norm(one, norm_type) for one in gradients]
            norms = [one.full_tensor() if isinstance(one, DTensor) else one for one in norms]
            total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
            for one in gradients:
                one.mul_(min(max_norm / (float(total) + 1e-6), 1.0))
            return total

        return clipped

    return exchanged(torch.nn.utils, "clip_grad_norm_", wrap)


@contextlib.contextmanager
def orders_in_memory_kept() -> Iterator[None]:
    """Let what is moved be laid out as the strides of the DTensor say.

    Moves are ``distribute_tensor``, ``redistribute`` and its gradient, and replicas that ``from_local`` broadcasts.
    """
    distribute: Any = _api.distribute_tensor
    taken: Any = _api._FromTorchTensor.forward

    def distributed(*given: Any, **options: Any) -> Any:
        made = distribute(*given, **options)
        wanted = made._local_tensor.requires_grad
        made._local_tensor = _laid_out(made._local_tensor.detach(), made.stride()).requires_grad_(wanted)
        return made

    def moved(function: Any) -> Any:
        forward = function.forward

        def redistributed(ctx: Any, given: Any, *rest: Any) -> Any:
            made = forward(ctx, given, *rest)
            if made._local_tensor is not given._local_tensor:
                made._local_tensor = _expanded(_laid_out(made._local_tensor, made.stride()), made.stride())
            return made

        return mock.patch.object(function, "forward", staticmethod(redistributed))

    def checked(ctx: Any, given: torch.Tensor, mesh: Any, placements: Any, check: bool, *rest: Any) -> Any:
        made = taken(ctx, given, mesh, placements, check, *rest)
        if check:
            made._local_tensor = _laid_out(made._local_tensor, made.stride())
        return made

    distributed.__module__ = distribute.__module__
    with (
        moved(Redistribute),
        moved(NestedRedistribute),
        mock.patch.object(_api._FromTorchTensor, "forward", staticmethod(checked)),
        mock.patch.object(_api, "distribute_tensor", distributed),
        mock.patch.object(dtensors, "distribute_tensor", distributed),
    ):
        yield


@contextlib.contextmanager
def orders_of_arguments_kept() -> Iterator[None]:
    """Lay out the arguments that an op redistributes as their strides say, and let those stay expanded that are."""
    redistribute = OpDispatcher.redistribute_local_args

    def redistributed(given: OpInfo, wanted: OpSchema, of_wanted: bool) -> None:
        before = given.local_args
        redistribute(given, wanted, of_wanted)
        held = list(given.local_args)
        for at, (spec, old) in enumerate(zip(given.flat_args_schema, before, strict=True)):
            local = held[at]
            if isinstance(spec, DTensorSpec) and isinstance(local, torch.Tensor) and local is not old:
                held[at] = _expanded(_without_gaps(_laid_out(local, spec.stride)), spec.stride)
        given.local_args = tuple(held)

    with mock.patch.object(OpDispatcher, "redistribute_local_args", staticmethod(redistributed)):
        yield


def _without_gaps(local: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose elements are neighbours in memory: a copy, if what is cut off from others has gaps."""
    strides: Sequence[int] = local.stride()
    order = sorted(range(local.ndim), key=lambda dim: -strides[dim])
    return local.permute(order).contiguous().permute([order.index(dim) for dim in range(local.ndim)])


def _expanded(local: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return a tensor that has each dim without a stride once in memory."""
    found = local
    for dim, stride in enumerate(strides):
        if stride == 0 and local.shape[dim] > 1:
            found = found.narrow(dim, 0, 1)
    return found.expand(local.shape)


def _laid_out(local: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return a tensor whose dims are in memory in the order of ``strides``: a copy, if they are in another order."""
    order = sorted(range(local.ndim), key=lambda dim: -strides[dim])
    found = [local.stride(dim) for dim in order if local.shape[dim] > 1]
    if found == sorted(found, reverse=True):
        return local
    return local.permute(order).contiguous().permute([order.index(dim) for dim in range(local.ndim)])


def strides_of_kernels() -> contextlib.AbstractContextManager[None]:
    """Let ops whose kernels return other strides than DTensor expects take contiguous tensors."""

    def contiguous(leaf: Any) -> Any:
        return leaf.contiguous() if isinstance(leaf, DTensor) else leaf

    def run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return op(*pytree.tree_map(contiguous, args), **pytree.tree_map(contiguous, kwargs))

    aten = torch.ops.aten
    return layered(
        (
            aten._log_softmax_backward_data.default,
            aten.binary_cross_entropy.default,
            aten.elu_backward.default,
            aten.log_sigmoid_forward.default,
            aten.mse_loss_backward.default,
            aten.native_batch_norm.default,
            aten.native_batch_norm_backward.default,
            aten.native_dropout_backward.default,
            aten.native_layer_norm_backward.default,
            aten.pow.Scalar,
        ),
        run,
    )


@contextlib.contextmanager
def placements_counted() -> Iterator[None]:
    """Let ``from_local`` and ``redistribute`` refuse as many placements as the mesh has no dims."""
    make: Any = DTensor.from_local
    move: Any = DTensor.redistribute

    def check(mesh: Any, placements: Any) -> None:
        if mesh is not None and placements is not None and len(placements) != mesh.ndim:
            raise ValueError(f"{len(placements)} placements were given for a mesh of {mesh.ndim} dims")

    def made(local: Any, device_mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        check(device_mesh, placements)
        return make(local, device_mesh, placements, **options)

    def moved(self: Any, device_mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        check(device_mesh or self.device_mesh, placements)
        return move(self, device_mesh, placements, **options)

    with (
        mock.patch.object(DTensor, "from_local", staticmethod(made)),
        mock.patch.object(DTensor, "redistribute", moved),
    ):
        yield


@contextlib.contextmanager
def without_handlers_beside_meshes() -> Iterator[None]:
    """Let a rank that the mesh lacks run no handler of torch's, but take the way of ops that have none."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def beside(op: Any, handler: Any) -> Any:
        def handled(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            meshes = [one.device_mesh for one in args if isinstance(one, DTensor)]
            if not meshes or meshes[0].get_coordinate() is not None:
                return handler(op, args, kwargs)
            handlers.pop(op)
            try:
                return op(*args, **kwargs)
            finally:
                handlers[op] = handled

        handled.__module__ = handler.__module__
        return handled

    before = dict(handlers)
    for op, handler in before.items():
        if str(getattr(handler, "__module__", "")).startswith("torch."):
            handlers[op] = beside(op, handler)
    try:
        yield
    finally:
        for op, handler in before.items():
            handlers[op] = handler
