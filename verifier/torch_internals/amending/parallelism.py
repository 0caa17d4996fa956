"""Amendments to tensor parallelism: inputs kept in shards, plans, and what from_local checks and differentiates."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor._api as api
import torch.distributed.tensor.parallel.input_reshard
from torch.distributed.tensor import DTensor, Replicate, Shard, experimental
from torch.distributed.tensor.parallel import parallelize_module, style
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from verifier.torch_internals.amending.registrations import exchanged

__all__ = [
    "checks_ask_the_mesh",
    "dims_of_gradients_counted",
    "inputs_taken_by_keyword",
    "layouts_asked_for",
    "lists_of_outputs_kept",
    "own_tensors_kept",
    "placements_in_tuples_taken",
    "saved_sizes_kept",
    "sources_passed_on",
]

_RESHARDING: Any = sys.modules["torch.distributed.tensor.parallel.input_reshard"]
_PLANS: Any = sys.modules[parallelize_module.__module__]


class _Kept:
    """What a hook has kept for the backward pass: the whole tensor, or a shard and what it is of."""

    def __init__(self, tensor: torch.Tensor, shape: torch.Size | None = None, dim: int = 0) -> None:
        self.tensor, self.shape, self.dim = tensor, shape, dim


def _gathered(mesh: Any, held: object) -> list[Any]:
    """Return what each rank of a mesh holds."""
    found = [held]
    for mesh_dim in range(mesh.ndim):
        parts: list[Any] = [None] * mesh.size(mesh_dim)
        dist.all_gather_object(parts, found, group=mesh.get_group(mesh_dim))
        found = [one for part in parts for one in part]
    return found


def _are_alike(mesh: Any, tensor: torch.Tensor) -> bool:
    held = tensor.detach().cpu().contiguous()
    return all(one.shape == held.shape and torch.equal(one, held) for one in _gathered(mesh, held))


def _restores(unpack: Any) -> Any:
    """Return a hook that gives back what was kept."""

    def restored(mesh: Any, dim: int, kept: Any) -> Any:
        if not isinstance(kept, _Kept):
            return unpack(mesh, dim, kept)
        if kept.shape is None:
            return kept.tensor
        stride = torch.empty(kept.shape, device="meta").stride()
        given: Any = {"run_check": False, "shape": kept.shape, "stride": stride}
        return DTensor.from_local(kept.tensor, mesh, [Shard(kept.dim)], **given).full_tensor()

    return restored


@contextlib.contextmanager
def own_tensors_kept() -> Iterator[None]:
    """Let ``input_reshard`` keep a shard of what all ranks hold alike, and all of what is a rank's own."""

    def wrap(pack: Any) -> Any:
        def packed(mesh: Any, dim: int, tensor: Any) -> Any:
            if isinstance(tensor, DTensor):
                return pack(mesh, dim, tensor)
            return pack(mesh, dim, tensor) if _are_alike(mesh, tensor) else _Kept(tensor)

        packed.__module__, packed.asks = pack.__module__, True  # type: ignore[attr-defined]
        return packed

    with exchanged(_RESHARDING, "_pack_hook_tp", wrap), exchanged(_RESHARDING, "_unpack_hook_tp", _restores):
        yield


@contextlib.contextmanager
def saved_sizes_kept() -> Iterator[None]:
    """Let ``input_reshard`` restore a tensor of which it has kept a shard, of any size, to the size that it had."""

    def wrap(pack: Any) -> Any:
        def packed(mesh: Any, dim: int, tensor: Any) -> Any:
            if isinstance(tensor, DTensor):
                return pack(mesh, dim, tensor)
            own = hasattr(pack, "asks") and not _are_alike(mesh, tensor)
            if own or not -tensor.ndim <= dim < tensor.ndim:
                return _Kept(tensor)
            whole = DTensor.from_local(tensor.contiguous(), mesh, [Replicate()], run_check=False)
            shard = whole.redistribute(placements=[Shard(dim)]).to_local()
            return _Kept(shard.clone(memory_format=torch.contiguous_format), tensor.shape, dim % tensor.ndim)

        return packed

    with exchanged(_RESHARDING, "_pack_hook_tp", wrap), exchanged(_RESHARDING, "_unpack_hook_tp", _restores):
        yield


@contextlib.contextmanager
def sources_passed_on() -> Iterator[None]:
    """Let a plan's style for the module itself get the rank whose parameters are taken, as those of its children do."""

    def wrap(parallelize: Any) -> Any:
        def parallelized(module: Any, mesh: Any = None, plan: Any = None, *, src_data_rank: int | None = 0) -> Any:
            if not isinstance(plan, dict):
                return parallelize(module, mesh, plan, src_data_rank=src_data_rank)
            for path, one in plan.items():
                given = {path: one} if path else one
                parallelize(module, mesh, given, src_data_rank=src_data_rank)
            return module

        return parallelized

    with (
        exchanged(_PLANS, "parallelize_module", wrap),
        exchanged(torch.distributed.tensor.parallel, "parallelize_module", wrap),
    ):
        yield


@contextlib.contextmanager
def checks_ask_the_mesh() -> Iterator[None]:
    """Let ``from_local`` compare what the ranks of the mesh give it, and no others."""
    meshes: list[Any] = []

    def remembers(forward: Any) -> Any:
        def made(ctx: Any, given: Any, mesh: Any, *rest: Any) -> Any:
            meshes.append(mesh)
            try:
                return forward(ctx, given, mesh, *rest)
            finally:
                meshes.pop()

        made.__module__ = forward.__module__
        return staticmethod(made)

    def wrap(check: Any) -> Any:
        def checked(local: torch.Tensor, check_shape_stride: bool = False) -> None:
            known = (local.shape, local.stride()) if check_shape_stride else ()
            own = (local.dtype, local.requires_grad, *known)
            if any(one != own for one in _gathered(meshes[-1], own)):
                raise ValueError(
                    "the tensors of the mesh's ranks differ in dtype, shape, strides or in their gradients"
                )

        return checked

    with exchanged(api._FromTorchTensor, "forward", remembers), exchanged(api, "check_tensor_meta", wrap):
        yield


def _counted(placements: Any, ndim: int) -> Any:
    if placements is None:
        return None
    counted: list[Any] = []
    for one in placements:
        if isinstance(one, _StridedShard) and one.dim < 0:
            counted.append(_StridedShard(one.dim + ndim, split_factor=one.split_factor))
        else:
            counted.append(Shard(one.dim + ndim) if isinstance(one, Shard) and one.dim < 0 else one)
    return tuple(counted)


@contextlib.contextmanager
def dims_of_gradients_counted() -> Iterator[None]:
    """Let negative dims in ``grad_placements`` count from the end, as those of ``placements`` do."""

    def wrap(backward: Any) -> Any:
        def placed(ctx: Any, gradient: Any) -> Any:
            if gradient is not None:
                ctx.grad_placements = _counted(ctx.grad_placements, gradient.ndim)
            return backward(ctx, gradient)

        placed.__module__ = backward.__module__
        return staticmethod(placed)

    with exchanged(api._FromTorchTensor, "backward", wrap), exchanged(api._ToTorchTensor, "backward", wrap):
        yield


@contextlib.contextmanager
def layouts_asked_for() -> Iterator[None]:
    """Let styles for inputs and outputs redistribute a DTensor that is not placed as they say."""

    def of_input(prepare: Any) -> Any:
        def prepared(self: Any, given: Any, mesh: Any, said: Any, wanted: Any) -> Any:
            if isinstance(given, DTensor) and said is not None and given.placements != (said,):
                said = said if wanted is None else wanted
                given = given.redistribute(placements=(said,))
            return prepare(self, given, mesh, said, wanted)

        return prepared

    def of_output(prepare: Any) -> Any:
        def prepared(self: Any, outputs: Any, mesh: Any) -> Any:
            found = outputs if isinstance(outputs, tuple) else (outputs,)
            pairs = list(zip(found, self.output_layouts, self.desired_output_layouts, strict=False))
            if len(pairs) == len(found):
                found = tuple(
                    one.redistribute(placements=(said,)) if isinstance(one, DTensor) and said is not None else one
                    for one, said, _ in pairs
                )
                outputs = found if isinstance(outputs, tuple) else found[0]
            return prepare(self, outputs, mesh)

        return prepared

    with (
        exchanged(style.PrepareModuleInput, "_prepare_input_arg", of_input),
        exchanged(style.PrepareModuleOutput, "_prepare_out_fn", of_output),
    ):
        yield


def lists_of_outputs_kept() -> contextlib.AbstractContextManager[None]:
    """Let ``PrepareModuleOutput`` place the results in a list or a named tuple, and return them in one."""

    def wrap(prepare: Any) -> Any:
        def prepared(self: Any, outputs: Any, mesh: Any) -> Any:
            kind: Any = type(outputs)
            if kind is not list and not hasattr(kind, "_fields"):
                return prepare(self, outputs, mesh)
            found = prepare(self, tuple(outputs), mesh)
            found = found if isinstance(found, tuple) else (found,)
            return kind(found) if kind is list else kind(*found)

        return prepared

    return exchanged(style.PrepareModuleOutput, "_prepare_out_fn", wrap)


def inputs_taken_by_keyword() -> contextlib.AbstractContextManager[None]:
    """Let styles of layers take an input that is given by keyword for one that is given by position."""

    def turned(module: Any, args: Any, options: Any) -> Any:
        return None if args or not options else (tuple(options.values())[:1], dict([*options.items()][1:]))

    def wrap(distribute: Any) -> Any:
        def distributed(module: Any, *given: Any, **options: Any) -> Any:
            found = distribute(module, *given, **options)
            found.register_forward_pre_hook(turned, with_kwargs=True, prepend=True)
            return found

        return distributed

    return exchanged(style, "distribute_module", wrap)


def placements_in_tuples_taken() -> contextlib.AbstractContextManager[None]:
    """Let ``local_map`` take a tuple of placements for those of one result, as a DTensor has them."""

    def wrap(before: Any) -> Any:
        def local_map(func: Any = None, out_placements: Any = None, *given: Any, **options: Any) -> Any:
            alone = isinstance(out_placements, tuple) and all(isinstance(one, Placement) for one in out_placements)
            return before(func, list(out_placements) if alone else out_placements, *given, **options)

        return local_map

    return exchanged(experimental, "local_map", wrap)
