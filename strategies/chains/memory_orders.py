"""Programs about the order of elements in memory, which decides whether a view is legal.

Each imports only torch, so that its source can stand in a reproduction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from verifier.planning.boundary import declares

__all__ = ["computed", "differentiated", "exchanged", "in_formats", "laid_out", "moved_between"]


def in_formats(
    path: str, given: list[Any], placements: list[Any], formats: list[Any], /, x: torch.Tensor
) -> list[torch.Tensor]:
    """Return what a function makes of images in several memory formats, one after the other, each as rows of a matrix.

    A row is a view of an image: it has the image's elements in the order in which the format has them in memory.

    Parameters
    ----------
    path
        The function. If its name ends with ``like``, the images are copied to what it makes.
    placements
        Those of the images, which are made of the rows of ``x``.
    formats
        The memory formats. None stands for a call without one, whose result is in the order of the images.
    """
    function: Any = torch
    for part in path.split(".")[1:]:
        function = getattr(function, part)
    held: Any = x.detach()
    if isinstance(x, DTensor):
        held = held.redistribute(placements=placements)
    images = torch.stack([held * number for number in (1, 2, 3, 4)], -1).view(*x.shape, 2, 2)
    found = []
    for one in formats:
        made = function(images, *given, **({} if one is None else {"memory_format": one}))
        made = made.copy_(images) if path.endswith("like") else made
        made = made.permute(0, 2, 3, 1) if one is torch.channels_last else made
        found.append(made.view(x.shape[0], -1) * 2)
    return found


def laid_out(way: str, order: list[int], placements: list[Any], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return twice a matrix that is a view of three multiples of ``x``, moved while their dims were permuted.

    A view is taken only if the tensor says that it is contiguous.

    Parameters
    ----------
    way
        ``redistribute`` or ``distribute_tensor``; ``from_local`` for replicas that are checked.
    order
        The order of the three dims. The last one tells the multiples apart.
    placements
        What the permuted tensor is moved to.
    """
    held: Any = x.detach()
    blocks = torch.stack([held, held * 2, held * 3], -1)
    permuted: Any = blocks.permute(order)
    if isinstance(blocks, DTensor) and way == "redistribute":
        permuted = permuted.redistribute(placements=placements)
    elif isinstance(blocks, DTensor):
        whole = blocks.full_tensor().permute(order)
        if way == "from_local":
            everywhere = [Replicate()] * blocks.device_mesh.ndim
            permuted = DTensor.from_local(whole, blocks.device_mesh, everywhere, run_check=True)
        else:
            permuted = torch.distributed.tensor.distribute_tensor(whole, blocks.device_mesh, placements)
    back = permuted.permute([order.index(dim) for dim in range(3)])
    rows = x.shape[0]
    return [(back.view(rows, -1) if back.is_contiguous() else back.reshape(rows, -1)) * 2]


def computed(
    path: str, given: list[Any], order: list[int], beside: str, /, x: torch.Tensor, **tensors: Any
) -> list[Any]:
    """Return twice a matrix that is a view of what a function makes of three multiples of ``x`` with permuted dims.

    A view is taken only if the tensor says that it is contiguous.

    Parameters
    ----------
    path
        The function.
    given
        Its last arguments.
    order
        The order of the three dims. The last one tells the multiples apart.
    beside
        What the function takes as well: ``y`` for as many multiples of ``y``, ``expanded`` for a number that is
        expanded to their size, ``moved`` for one that is then redistributed as they are. It is first if a ``first``
        follows.
    """
    function: Any = torch
    for part in path.split(".")[1:]:
        function = getattr(function, part)
    held: Any = x.detach()
    taken = [torch.stack([held, held * 2, held * 3], -1).permute(order)]
    if beside.startswith("y"):
        other = tensors["y"].detach()
        taken.append(torch.stack([other, other * 3, other * 2], -1).permute(order))
    elif beside:
        other = (held.sum() * 0 + 2).expand(taken[0].shape)
        if beside.startswith("moved") and isinstance(other, DTensor):
            placements: Any = taken[0].placements  # type: ignore[attr-defined]
            other = other.redistribute(placements=[Replicate() if one.is_partial() else one for one in placements])
        taken.append(other)
    found = function(*(reversed(taken) if beside.endswith("first") else taken), *given)
    back = found.permute([order.index(dim) for dim in range(3)])
    rows = x.shape[0]
    return [(back.view(rows, -1) if back.is_contiguous() else back.reshape(rows, -1)) * 2]


def differentiated(path: str, sizes: list[int], dims: list[int], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradient of a function of ``x``, beside its double, whose columns are split in two.

    Parameters
    ----------
    path
        The function, which makes a scalar.
    sizes
        Those of the three dims, as the heads of attention are split from a matrix.
    dims
        The dims that are exchanged.
    """
    function: Any = torch
    for part in path.split(".")[1:]:
        function = getattr(function, part)
    leaf: Any = x.detach().requires_grad_()
    parts = torch.cat([leaf, leaf * 2], 1).view(sizes)
    found = function(parts.transpose(*dims).square())
    return [*torch.autograd.grad(found, leaf)]


def moved_between(sizes: list[int], dims: list[int], placements: list[Any], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return ``x``, beside its double, with its columns split in two, and the gradient of the sum of its squares.

    Parameters
    ----------
    sizes
        Those of the three dims, as the heads of attention are split from a matrix.
    dims
        The dims that are exchanged before the tensor is moved, and exchanged back after it.
    placements
        What it is moved to, as attention moves heads to other ranks and tokens back.
    """
    leaf: Any = x.detach().requires_grad_()
    parts: Any = torch.cat([leaf, leaf * 2], 1).view(sizes).transpose(*dims)
    if isinstance(parts, DTensor):
        parts = parts.redistribute(placements=placements)
    back = parts.transpose(*dims)
    return [back.detach() * 2, *torch.autograd.grad(back.square().sum(), leaf)]


def exchanged(path: str, given: list[Any], sizes: list[int], dims: list[int], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return what a function makes of ``x``, beside its double, between two exchanges of dims, and a gradient.

    Parameters
    ----------
    path
        The function, which keeps the sizes.
    given
        Its last arguments.
    sizes
        Those of the three dims that the columns are split to.
    dims
        The dims that are exchanged before the function is called, and exchanged back after it.
    """
    function: Any = torch
    for part in path.split(".")[1:]:
        function = getattr(function, part)
    leaf: Any = x.detach().requires_grad_()
    parts = torch.cat([leaf, leaf * 2], 1).view(sizes)
    back = function(parts.transpose(*dims), *given).transpose(*dims)
    weighted = (back * parts.detach()).sum()  # the gradient of the function's result has its dims exchanged
    return [back.detach() * 2, *torch.autograd.grad(weighted, leaf)]


for _program in (computed, differentiated, exchanged, in_formats, laid_out, moved_between):
    declares(f"{__name__}.{_program.__name__}")
