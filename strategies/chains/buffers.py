"""Programs of tensors whose memory is exchanged or shared: outputs, and buffers that are sharded in place.

Each imports only torch, so that its source can stand in a reproduction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from verifier.planning.boundary import declares

__all__ = ["in_context", "resized", "written_to_views"]


def resized(
    path: str, given: list[Any], shape: list[int], placements: list[Any], /, x: torch.Tensor
) -> list[torch.Tensor]:
    """Return a tensor of another shape that a function of ``x`` has to resize, and twice it."""
    function: Any = torch
    for part in path.split(".")[1:]:
        function = getattr(function, part)
    if isinstance(x, DTensor):
        zeros = torch.distributed.tensor.zeros
        out: Any = zeros(shape, dtype=x.dtype, device_mesh=x.device_mesh, placements=placements)
    else:
        out = torch.zeros(shape, dtype=x.dtype)
    function(x.detach(), *given, out=out)
    return [out * 2, out]


def written_to_views(
    path: str, given: list[Any], view: list[Any], whole: bool, earlier: list[Any], /, **tensors: torch.Tensor
) -> list[torch.Tensor]:
    """Return twice a tensor and twice a view of it, after a function wrote to one of them that it was given as ``out``.

    Parameters
    ----------
    given
        The arguments after the tensors, of which the last one is the base of the view.
    view
        The path of the function that makes the view, and its arguments.
    whole
        Whether the base is given as ``out``, and not the view.
    earlier
        The placements of another tensor that is given as ``out`` first; none if there is none.
    """

    def at(path: str) -> Any:
        function: Any = torch
        for part in path.split(".")[1:]:
            function = getattr(function, part)
        return function

    *arguments, held = [tensor.detach() for tensor in tensors.values()]
    base = held.clone()
    seen = at(view[0])(base, *view[1:])
    out = base if whole else seen
    if earlier:
        zeros: Any = torch.zeros
        options: dict[str, Any] = {}
        if isinstance(out, DTensor):
            zeros = torch.distributed.tensor.zeros
            options = {"device_mesh": out.device_mesh, "placements": earlier}
        at(path)(*arguments, *given, out=zeros(out.shape, dtype=out.dtype, **options))
    at(path)(*arguments, *given, out=out)
    return [base * 2, seen * 2]


def in_context(ways: list[list[Any]], dims: list[int], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return twice each buffer as ``context_parallel`` shards it and ``context_parallel_unshard`` puts it together.

    The buffers after the block, and the tensor of which they are made, follow.

    Parameters
    ----------
    ways
        For each buffer what makes it of one copy of ``x``: the path of a function, such as a view, and its arguments.
    dims
        For each buffer the dim of the sequence.
    """
    held: Any = x.detach().clone()
    base = held.full_tensor().clone() if isinstance(x, DTensor) else held
    buffers: list[Any] = []
    for path, *given in ways:
        function: Any = torch
        for part in path.split(".")[1:]:
            function = getattr(function, part)
        buffers.append(function(base, *given))
    if not isinstance(x, DTensor):
        return [*(buffer * 2 for buffer in buffers), *buffers, base]
    from torch.distributed.tensor import experimental

    module: Any = experimental
    mesh: Any = x.device_mesh
    if "row" not in vars(mesh):  # kept with the mesh, because groups stay for ever
        mesh.row = torch.distributed.device_mesh.DeviceMesh(mesh.device_type, mesh.mesh.flatten())
    with module.context_parallel(mesh.row, buffers=buffers, buffer_seq_dims=dims):
        halves = [buffer * 2 for buffer in buffers]
        found = module._attention.context_parallel_unshard(mesh.row, halves, dims)
    everywhere = [Replicate()] * mesh.ndim
    return [DTensor.from_local(one.contiguous(), mesh, everywhere, run_check=False) for one in [*found, *buffers, base]]


for _program in (in_context, resized, written_to_views):
    declares(f"{__name__}.{_program.__name__}")
