"""The program of gradients of gradients, as gradient penalties and second-order optimisers take them.

It imports only torch, so that its source can stand in a reproduction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from verifier.planning.boundary import declares

__all__ = ["parallel", "transformed", "twice"]


def twice(path: str, given: list[Any], options: dict[str, Any], /, **tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of the first gradients' squares, of a function's results times what they are.

    Parameters
    ----------
    path
        The function. It gets the tensors, then ``given``, and ``options`` by keyword.
    tensors
        Those of numbers are differentiated. A gradient that the function does not have is left out.
    """
    function: Any = torch
    for part in path.split(".")[1:]:
        function = getattr(function, part)
    held = {name: one.detach().requires_grad_(one.is_floating_point()) for name, one in tensors.items()}
    leaves = [one for one in held.values() if one.requires_grad]
    found = function(*held.values(), *given, **options)
    found = found[0] if isinstance(found, tuple) else found
    squares = (found * found.detach().conj()).real if found.is_complex() else found * found.detach()
    first = torch.autograd.grad(squares.sum(), leaves, create_graph=True, allow_unused=True)
    penalty: Any = sum((one**2).sum() for one in first if one is not None)
    second = torch.autograd.grad(penalty, leaves, allow_unused=True)
    return [one for one in second if one is not None]


def parallel(
    placements: list[Any],
    options: dict[str, Any],
    /,
    x: torch.Tensor,
    y: torch.Tensor,
    **tensors: torch.Tensor,
) -> list[torch.Tensor]:
    """Return a loss's gradient and that of its squares, both computed under ``loss_parallel`` on DTensors.

    Parameters
    ----------
    options
        Keywords of ``cross_entropy`` of the scores ``x`` and the targets ``y``.
    tensors
        ``z``, the weights of classes.
    """
    from contextlib import nullcontext

    from torch.distributed.tensor.parallel import loss_parallel

    leaf: Any = x.detach()
    target: Any = y
    weight: Any = tensors.get("z")
    if isinstance(leaf, DTensor):
        leaf = leaf.redistribute(placements=placements)
        kept = [placement if placement == Shard(0) else Replicate() for placement in placements]
        target = y.redistribute(placements=kept) if isinstance(y, DTensor) else y
        weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
    leaf = leaf.requires_grad_()
    with loss_parallel() if isinstance(x, DTensor) else nullcontext():
        loss = torch.nn.functional.cross_entropy(leaf, target, weight=weight, **options)
        (first,) = torch.autograd.grad((loss * loss.detach()).sum(), leaf, create_graph=True)
        return [first.detach(), *torch.autograd.grad((first**2).sum(), leaf)]


def transformed(kind: str, path: str, given: list[Any], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return what a transform of ``torch.func`` makes of the sum of a function's results, times itself.

    Parameters
    ----------
    kind
        ``grad``, ``hessian``, ``jacrev`` or ``jacfwd``; ``vmap`` takes the function itself, along the first dim.
    """
    function: Any = torch
    for part in path.split(".")[1:]:
        function = getattr(function, part)

    def summed(one: Any) -> Any:
        found = function(one, *given)
        return (found * found).sum()

    transform: Any = getattr(torch.func, kind)
    found = transform((lambda one: function(one, *given)) if kind == "vmap" else summed)(x.detach())
    return [found.detach()]


for _program in (parallel, transformed, twice):
    declares(f"{__name__}.{_program.__name__}")
