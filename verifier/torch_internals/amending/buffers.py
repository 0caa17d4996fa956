"""Tensors whose memory is exchanged or shared: outputs, and buffers that ``context_parallel`` shards in place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.tensor.experimental as experimental
import torch.distributed.tensor.experimental._attention as attention
import torch.distributed.tensor.experimental._context_parallel._attention as context
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from verifier.torch_internals.amending.propagation import refusing
from verifier.torch_internals.amending.registrations import exchanged, handled_where

__all__ = [
    "outputs_resized",
    "outputs_shared",
    "sequences_counted",
    "sequences_in_front_restored",
    "views_of_sequences_kept",
]


def _has_outputs(op: OpOverload) -> bool:
    return any(argument.is_out for argument in op._schema.arguments)


@contextlib.contextmanager
def outputs_resized() -> Iterator[None]:
    """Let a tensor given as ``out`` have the shape of what was written to it."""

    def handler(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        found = op(*args, **kwargs)
        for argument in op._schema.arguments:
            out = kwargs.get(argument.name) if argument.is_out else None
            if isinstance(out, DTensor) and tuple(out.shape) != tuple(out._spec.shape):
                kind: Any = DTensor
                inherited: Any = torch.Tensor.data
                inherited.__set__(out, kind(out._local_tensor, out._spec, requires_grad=False))
        return found

    with handled_where(_has_outputs, handler):
        yield


def _is_shared(tensor: DTensor) -> bool:
    """Return whether another tensor shares the memory of the local one, as a view or its base does."""
    storage = tensor._local_tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > 2  # the local tensor, and ``storage``


@refusing
def _written(tensor: DTensor, found: DTensor) -> None:
    """Write ``found`` to the memory of ``tensor``, which keeps its placements."""
    if tensor.shape != found._spec.shape:
        raise NotImplementedError("out= is not supported where it is resized and shares its memory")
    if any(one.is_partial() and one != other for one, other in zip(tensor.placements, found.placements, strict=True)):
        raise NotImplementedError("out= is not supported where it is pending and shares its memory")
    with torch.no_grad():
        tensor.copy_(found.redistribute(placements=tensor.placements))


@contextlib.contextmanager
def outputs_shared() -> Iterator[None]:
    """Let a tensor given as ``out`` keep its placements where another one shares its memory."""

    def handler(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        names = [argument.name for argument in op._schema.arguments if argument.is_out]
        shared = {name: out for name in names if isinstance(out := kwargs.get(name), DTensor) and _is_shared(out)}
        kind: Any = DTensor
        own = {
            name: kind(torch.empty_like(out._local_tensor), out._spec, requires_grad=False)
            for name, out in shared.items()
        }
        found = op(*args, **{**kwargs, **own})
        if not own:
            return found
        for name, out in shared.items():
            _written(out, own[name])
        return kwargs[names[0]] if len(names) == 1 else tuple(kwargs[name] for name in names)

    with handled_where(_has_outputs, handler):
        yield


@contextlib.contextmanager
def _exchanged_in_context(name: str, wrap: Callable[[Any], Any], *holders: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for holder in holders:
            stack.enter_context(exchanged(holder, name, wrap))
        yield


def sequences_in_front_restored() -> contextlib.AbstractContextManager[None]:
    """Let ``context_parallel_unshard`` take buffers without a dim of a batch in front of the sequence."""

    def wrap(unshard: Any) -> Any:
        def unsharded(mesh: Any, buffers: Any, dims: Any, load_balancer: Any = None) -> Any:
            front = [dim == 0 for dim in dims]
            given = [one.unsqueeze(0) if first else one for one, first in zip(buffers, front, strict=True)]
            found = unshard(mesh, given, [1 if first else dim for dim, first in zip(dims, front, strict=True)],
                            load_balancer)  # fmt: skip
            return [one.squeeze(0) if first else one for one, first in zip(found, front, strict=True)]

        return unsharded

    return _exchanged_in_context("context_parallel_unshard", wrap, attention, context)


@contextlib.contextmanager
def sequences_counted() -> Iterator[None]:
    """Let ``context_parallel`` and ``context_parallel_unshard`` count negative dims of sequences from the end."""

    def wrap(before: Any) -> Any:
        def counted(mesh: Any, buffers: Any, dims: Any, *rest: Any, **options: Any) -> Any:
            dims = [dim % one.ndim if isinstance(one, torch.Tensor) else dim
                    for one, dim in zip(buffers, dims, strict=True)]  # fmt: skip
            return before(mesh, buffers, dims, *rest, **options)

        return counted

    with (
        _exchanged_in_context("context_parallel_unshard", wrap, attention, context),
        exchanged(context, "_context_parallel_buffers", wrap),
    ):
        yield


def views_of_sequences_kept() -> contextlib.AbstractContextManager[None]:
    """Let ``context_parallel`` write the shards of a view to memory of their own."""

    def wrap(before: Any) -> Any:
        @contextlib.contextmanager
        def context_parallel(mesh: Any, *, buffers: Any = None, **options: Any) -> Iterator[None]:
            views = [(one, one.data) for one in buffers or [] if one._is_view()]
            kept = options.get("no_restore_buffers") or ()
            for one, held in views:
                one.data = held.clone(memory_format=torch.contiguous_format)
            try:
                with before(mesh, buffers=buffers, **options):
                    yield
            finally:
                for one, held in views:
                    if one not in kept:
                        one.data = held

        return context_parallel

    return _exchanged_in_context("context_parallel", wrap, experimental, attention, context)
