"""Amendments to how tensors come to a mesh and leave it, also on ranks that the mesh lacks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.tensor._api as api
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._collective_utils import mesh_broadcast
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree as pytree

from verifier.torch_internals.amending.registrations import exchanged
from verifier.torch_internals.amending.watching import Watch

__all__ = [
    "handlers_on_ranks_of_mesh",
    "local_gradients_on_ranks_of_mesh",
    "missing_outputs_on_ranks_of_mesh",
    "norms_of_several_meshes",
    "strided_shards_scattered",
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

        scattered.__module__ = scatter.__module__
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

        clipped.__module__ = clip.__module__
        return clipped

    return exchanged(torch.nn.utils, "clip_grad_norm_", wrap)


# ---------------------------------------------------------------------------------------- ranks that the mesh lacks
@contextlib.contextmanager
def local_gradients_on_ranks_of_mesh() -> Iterator[None]:
    """Let ``to_local`` and ``from_local`` give no gradient on ranks outside of the mesh, which hold nothing."""

    def of_to_local(backward: Any) -> Any:
        def differentiated(ctx: Any, gradient: Any) -> Any:
            spec = ctx.dtensor_spec
            if gradient is None or spec.mesh.get_coordinate() is not None:
                return backward(ctx, gradient)
            meta = spec.tensor_meta
            placements = ctx.grad_placements or api._normalize_placements_for_grad(spec.placements)
            nothing = {"run_check": False, "shape": meta.shape, "stride": meta.stride}
            return DTensor.from_local(gradient, spec.mesh, placements, **nothing), None

        differentiated.__module__ = backward.__module__
        return staticmethod(differentiated)

    def of_from_local(backward: Any) -> Any:
        def differentiated(ctx: Any, gradient: Any) -> Any:
            if ctx.forward_input_device_mesh.get_coordinate() is not None:
                return backward(ctx, gradient)
            return (None,) * 7

        differentiated.__module__ = backward.__module__
        return staticmethod(differentiated)

    with (
        exchanged(api._ToTorchTensor, "backward", of_to_local),
        exchanged(api._FromTorchTensor, "backward", of_from_local),
    ):
        yield


class _LeavesOutOutputs(Watch):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:  # NotImplementedError is one
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
            inside = not tensors or tensors[0].device_mesh.get_coordinate() is not None
            if inside or not str(error).startswith("return type"):
                raise
        return _empty_outputs(func, args, kwargs)


def _empty_outputs(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an op of several outputs makes on a rank outside of the mesh."""
    dispatcher: Any = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    dispatcher.sharding_propagator.propagate(info)
    specs = info.output_sharding.output_spec
    metas = [spec and spec.tensor_meta for spec in specs]
    local = [meta and torch.zeros(() if meta.shape == () else (0,), dtype=meta.dtype) for meta in metas]
    return dispatcher.wrap(local, specs)


@contextlib.contextmanager
def missing_outputs_on_ranks_of_mesh() -> Iterator[None]:
    """Let an op that leaves out some of its outputs leave them out on ranks outside of the mesh, too."""
    with _LeavesOutOutputs():
        yield


@contextlib.contextmanager
def handlers_on_ranks_of_mesh() -> Iterator[None]:
    """Let ranks outside of the mesh pass over torch's handlers of single ops, and make what other ops make there."""
    handlers: dict[OpOverload, Any] = DTensor._op_dispatcher._custom_op_handlers
    before = dict(handlers)

    def passed_over(own: Any) -> Any:
        def handle(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            tensors = [arg for arg in args if isinstance(arg, DTensor)]
            if not tensors or tensors[0].device_mesh.get_coordinate() is not None:
                return own(op, args, kwargs)
            held = handlers.pop(op)
            try:
                return op(*args, **kwargs)
            finally:
                handlers[op] = held

        handle.__module__ = own.__module__
        return handle

    torchs = "torch.", __name__.rpartition(".")[0]  # or another amendment to torch's
    handlers.update({op: passed_over(own) for op, own in before.items() if str(own.__module__).startswith(torchs)})
    try:
        yield
    finally:
        for op, own in before.items():
            handlers[op] = own
