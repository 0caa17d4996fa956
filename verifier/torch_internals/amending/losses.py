"""Amendments to losses: to ``loss_parallel``, to classes that a rank lacks, to the gradient of a log-softmax."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.tensor.parallel as parallel
import torch.distributed.tensor.parallel.loss as losses
from torch.distributed.tensor import DTensor, Replicate

from verifier.torch_internals.amending.registrations import exchanged

__all__ = [
    "absent_classes",
    "gradients_of_log_softmax",
    "ignored_targets_of_losses",
    "losses_end",
    "losses_of_many_dims",
]


def losses_end() -> contextlib.AbstractContextManager[None]:
    """Let ``loss_parallel`` end with its block also after an error, and not with a block inside of it."""

    def wrap(before: Any) -> Any:
        @contextlib.contextmanager
        def loss_parallel() -> Iterator[None]:
            handlers = DTensor._op_dispatcher._custom_op_handlers
            held = dict(handlers)
            handlers.update(losses.customized_loss_ops)
            try:
                yield
            finally:
                handlers.clear()
                handlers.update(held)

        return loss_parallel

    return exchanged(parallel, "loss_parallel", wrap)


def losses_of_many_dims() -> contextlib.AbstractContextManager[None]:
    """Let the gradient of a parallel loss take all dims behind the classes for one."""

    def wrap(backward: Any) -> Any:
        def flat(grad: Any, x: Any, target: Any, *rest: Any) -> Any:
            if x.dim() < 4:
                return backward(grad, x, target, *rest)
            grad = grad.flatten(1) if grad.dim() else grad
            return backward(grad, x.flatten(2), target.flatten(1), *rest).view(x.shape)

        return flat

    return exchanged(losses, "_nll_loss_and_log_softmax_backward", wrap)


def ignored_targets_of_losses() -> contextlib.AbstractContextManager[None]:
    """Let the gradient of a parallel loss with weights look up no weight of targets that are ignored."""

    def wrap(backward: Any) -> Any:
        def safe(grad: Any, x: Any, target: Any, weight: Any, reduction: int, ignored: int, *rest: Any) -> Any:
            counts = target != ignored
            found = backward(grad, x, target.where(counts, 0), weight, reduction, -1, *rest)
            return found * counts.unsqueeze(0 if x.dim() < 2 else 1)

        return safe

    return exchanged(losses, "_nll_loss_and_log_softmax_backward", wrap)


@contextlib.contextmanager
def absent_classes() -> Iterator[None]:
    """Let a rank without classes take part in a parallel loss, by a column that no target names."""

    def padded(x: Any, dim: int) -> Any:
        return torch.cat([x, x.new_zeros([1 if at == dim else size for at, size in enumerate(x.shape)])], dim)

    def forward(before: Any) -> Any:
        def taken(x: Any, target: Any, weight: Any, local_weight: Any, *rest: Any) -> Any:
            dim = 0 if x.dim() < 2 else 1
            if x.shape[dim] == 0:
                local_weight = None if local_weight is None else padded(local_weight, 0)
                x = padded(x, dim)
            return before(x, target, weight, local_weight, *rest)

        return taken

    def backward(before: Any) -> Any:
        def taken(grad: Any, x: Any, *rest: Any) -> Any:
            dim = 0 if x.dim() < 2 else 1
            if x.shape[dim]:
                return before(grad, x, *rest)
            return before(grad, padded(x, dim), *rest).narrow(dim, 0, 0)

        return taken

    def softmax(before: Any) -> Any:
        def taken(x: Any, dim: int, *rest: Any) -> Any:
            if x.shape[dim]:
                return before(x, dim, *rest)
            nothing = x.new_full([1 if at == dim else size for at, size in enumerate(x.shape)], -torch.inf)
            return before(nothing, dim, *rest).narrow(dim, 0, 0)

        return taken

    with (
        exchanged(losses, "_log_softmax", softmax),
        exchanged(losses, "_nll_loss_forward", forward),
        exchanged(losses, "_nll_loss_and_log_softmax_backward", backward),
    ):
        yield


@contextlib.contextmanager
def gradients_of_log_softmax() -> Iterator[None]:
    """Let the gradients of ``log_softmax`` and of ``nll_loss`` in a parallel loss be their own.

    Torch's of ``nll_loss`` is that of both. Of scores of minus infinity, whose exponentials are 0, it is its own.
    """
    op = torch.ops.aten._log_softmax_backward_data.default
    handlers: dict[Any, Any] = losses.customized_loss_ops
    before = handlers[op]

    def backward(_op: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
        cotangent, output, dim, dtype = args
        with torch.no_grad():
            total = cotangent.sum(dim, keepdim=True).redistribute(placements=[
                Replicate() if placement.is_partial() or placement.is_shard(dim % output.ndim) else placement
                for placement in output.placements
            ])  # fmt: skip
            found: DTensor = (cotangent.redistribute(placements=output.placements) - output.exp() * total).to(dtype)
        return found

    def wrap(of_both: Any) -> Any:
        def of_loss(gradient: torch.Tensor, x: torch.Tensor, *rest: Any) -> torch.Tensor:
            found: torch.Tensor = of_both(gradient, torch.full_like(x, -torch.inf), *rest)
            return found

        return of_loss

    handlers[op] = backward
    try:
        with exchanged(losses, "_nll_loss_and_log_softmax_backward", wrap):
            yield
    finally:
        handlers[op] = before
