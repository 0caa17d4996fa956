"""The program of gradients of gradients, as gradient penalties and second-order optimisers take them.

It imports only torch, so that its source can stand in a reproduction.
"""

from __future__ import annotations

from typing import Any

import torch

from verifier.planning.boundary import declares

__all__ = ["twice"]


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


declares(f"{__name__}.{twice.__name__}")
