"""Amendments to backward passes, in which DTensor refuses what it has accepted forwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.tensor._api as api
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import _redistribute as redistributing
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from verifier.torch_internals.amending.registrations import exchanged, handled
from verifier.torch_internals.refusals import asks_otherwise, lacks_strategy

__all__ = [
    "cotangents_of_averages",
    "gradients_of_group_norms",
    "gradients_without_strategies",
    "penalties_through_from_local",
    "pending_gradients_reduced",
    "plain_tensors_taken",
    "views_of_gradients_reshard",
]


class _InBackwards(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tries an op of a backward pass again, with other arguments, if DTensor refuses it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if DTensor not in types or torch._C._current_graph_task_id() < 0:
            return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except (RuntimeError, AssertionError, ValueError) as error:
            if not self.concerns(error) or not self.mends(func, args):
                raise
        return self.again(func, args, kwargs)

    def concerns(self, error: Exception) -> bool:
        """Return whether the refusal is one that this amendment is about."""
        return asks_otherwise(error)

    def mends(self, func: OpOverload, args: tuple[Any, ...]) -> bool:
        """Return whether this amendment concerns the call."""
        raise NotImplementedError

    def again(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the op with other arguments."""
        raise NotImplementedError


class _TakesPlainTensors(_InBackwards):  # type: ignore[no-untyped-call]
    def mends(self, func: OpOverload, args: tuple[Any, ...]) -> bool:
        return any(type(leaf) is torch.Tensor for leaf in pytree.tree_leaves(args))

    def again(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mesh = next(leaf.device_mesh for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DTensor))
        whole = [Replicate()] * mesh.ndim

        def wrapped(leaf: Any) -> Any:
            return DTensor.from_local(leaf, mesh, whole, run_check=False) if type(leaf) is torch.Tensor else leaf

        return func(*pytree.tree_map(wrapped, args), **pytree.tree_map(wrapped, kwargs))


class _ReshardsViews(_InBackwards):  # type: ignore[no-untyped-call]
    def mends(self, func: OpOverload, args: tuple[Any, ...]) -> bool:
        return not func._schema.is_mutable and isinstance(args[0], DTensor)

    def again(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(_whole(args[0]), *args[1:], **kwargs)


class _ReducesFirst(_InBackwards):  # type: ignore[no-untyped-call]
    def mends(self, func: OpOverload, args: tuple[Any, ...]) -> bool:
        return func._schema.is_mutable and isinstance(args[0], DTensor)

    def again(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args[0]._is_view():  # its base has to see what is written, and so the shards have to stay where they are
            return _written_through(func, args, kwargs)
        _replicate(args[0])
        return func(*args, **kwargs)


class _RunsOnWholes(_InBackwards):  # type: ignore[no-untyped-call]
    def concerns(self, error: Exception) -> bool:
        return lacks_strategy(error)

    def mends(self, func: OpOverload, args: tuple[Any, ...]) -> bool:
        return True

    def again(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return on_wholes(func, args, kwargs)


def on_wholes(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the results of an op on whole tensors, replicated; what it writes to is replicated, too."""
    mesh = next(leaf.device_mesh for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DTensor))
    whole = [Replicate()] * mesh.ndim
    if func._schema.is_mutable and isinstance(args[0], DTensor):
        _replicate(args[0])

    def local(leaf: Any) -> Any:
        return _whole(leaf)._local_tensor if isinstance(leaf, DTensor) else leaf

    def wrapped(leaf: Any) -> Any:
        return DTensor.from_local(leaf, mesh, whole, run_check=False) if type(leaf) is torch.Tensor else leaf

    found = func(*pytree.tree_map(local, args), **pytree.tree_map(local, kwargs))
    if not func._schema.is_mutable:
        return pytree.tree_map(wrapped, found)
    if found.shape != args[0].shape:
        raise NotImplementedError(f"{func} is not supported on a DTensor, whose shape it changes in place")
    return args[0]


def _replicate(tensor: DTensor) -> None:
    """Replicate a tensor in place, for whoever else holds it."""
    whole = _whole(tensor)
    tensor._local_tensor, tensor._spec = whole._local_tensor, whole._spec


def _written_through(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Write to a replicated copy of the first argument, then write the copy's shards to those of the argument."""
    tensor: DTensor = args[0]
    copy: DTensor = _whole(tensor).clone()  # type: ignore[assignment]
    func(copy, *args[1:], **kwargs)
    parts = redistributing.redistribute_local_tensor(copy._local_tensor, copy._spec, tensor._spec)
    tensor._local_tensor.copy_(parts)
    return tensor


def _whole(tensor: DTensor) -> DTensor:
    with torch.no_grad():
        return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


@contextlib.contextmanager
def plain_tensors_taken() -> Iterator[None]:
    """Let DTensor take plain tensors that a formula of autograd makes for replicated ones."""
    with _TakesPlainTensors():
        yield


@contextlib.contextmanager
def views_of_gradients_reshard() -> Iterator[None]:
    """Let DTensor replicate a gradient before a view of it that it refuses."""
    with _ReshardsViews():
        yield


@contextlib.contextmanager
def pending_gradients_reduced() -> Iterator[None]:
    """Let DTensor replicate a gradient before it is written to, if it has no rule for the placements that it has."""
    with _ReducesFirst():
        yield


@contextlib.contextmanager
def gradients_without_strategies() -> Iterator[None]:
    """Let DTensor replicate the arguments of an op of a backward pass that has no strategy."""
    with _RunsOnWholes():
        yield


def gradients_of_group_norms() -> contextlib.AbstractContextManager[None]:
    """Let DTensor compute the gradients of a group norm on whole tensors."""
    op = torch.ops.aten.native_group_norm_backward.default
    return handled(op, lambda *args, **kwargs: on_wholes(op, args, kwargs))


def cotangents_of_averages() -> contextlib.AbstractContextManager[None]:
    """Let the gradient of a redistribution replicate what is pending in another way than its input was."""

    def wrap(backward: Any) -> Any:
        def redistributed(gradient: DTensor, before: DTensorSpec, **options: Any) -> Any:
            pairs = zip(gradient.placements, before.placements, strict=True)
            wanted = [
                Replicate() if one.is_partial() and other.is_partial() and one != other else other
                for one, other in pairs
            ]
            return backward(gradient, DTensorSpec(before.mesh, tuple(wanted), before.tensor_meta), **options)

        return redistributed

    return exchanged(redistributing, "_redistribute_backward", wrap)


def penalties_through_from_local() -> contextlib.AbstractContextManager[None]:
    """Let the gradient of ``from_local`` be differentiable also where it arrives in other placements."""

    def wrap(backward: Any) -> Any:
        def redistributed(ctx: Any, gradient: DTensor | None) -> Any:
            if gradient is not None and torch.is_grad_enabled():
                given = ctx.forward_input_placements
                kept = [Replicate() if placement.is_partial() else placement for placement in given]
                gradient = gradient.redistribute(placements=ctx.grad_placements or kept)
            return backward(ctx, gradient)

        redistributed.__module__ = backward.__module__
        return staticmethod(redistributed)

    return exchanged(api._FromTorchTensor, "backward", wrap)
