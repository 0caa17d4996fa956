"""Programs of DTensor's entry points that no op reaches: factories, initialisers, submeshes, parallel styles.

Each imports only torch, so that its source can stand in a reproduction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from verifier.planning.boundary import declares

__all__ = ["initialised", "made", "on_submeshes", "styled"]


def made(kind: str, placements: list[Any], given: list[Any], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return a tensor of the shape of ``x`` that ``torch.distributed.tensor.KIND`` makes, and twice its sum.

    Of random numbers, which DTensor does not promise, only that they are finite is kept.
    """
    if isinstance(x, DTensor):
        factory = getattr(torch.distributed.tensor, kind)
        found = factory(tuple(x.shape), *given, dtype=x.dtype, device_mesh=x.device_mesh, placements=placements)
    else:
        found = getattr(torch, kind)(tuple(x.shape), *given, dtype=x.dtype)
    if kind.startswith("rand"):
        found = (found - found) + 1
    return [found * 2, found.sum() * 2]


def initialised(name: str, given: list[Any], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return a copy of ``x`` that the initialiser ``torch.nn.init.NAME`` has filled."""
    copied = x.detach().clone()
    getattr(torch.nn.init, name)(copied, *given)
    return [copied]


def named(mesh: Any) -> Any:
    """Return ``mesh`` with names ``a``, ``b`` … for its dims, as submeshes need. Its groups are kept for ever."""
    if "named" not in vars(mesh):
        mesh.named = torch.distributed.device_mesh.DeviceMesh(
            mesh.device_type, mesh.mesh, mesh_dim_names=tuple("abc"[: mesh.ndim])
        )
    return mesh.named


def on_submeshes(path: str, rows: int, /, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Return results of one function on each of ``rows`` of the first mesh dim, whose ranks take ``y`` plus their row.

    Each row is a mesh of its own. Results are stacked, so that the first mesh dim shards the first dim. A mesh of one
    dim is its own row.
    """
    function: Any = torch
    for part in path.split(".")[1:]:
        function = getattr(function, part)
    if not isinstance(x, DTensor):
        found = [function(x, y + row) for row in range(rows)]
        return [torch.stack([torch.as_tensor(one, dtype=x.dtype) for one in found])]
    from torch.distributed.tensor import Shard, distribute_tensor

    whole, other = (each.full_tensor() if isinstance(each, DTensor) else each for each in (x.detach(), y))
    mesh: Any = x.device_mesh
    rest, row = named(mesh)["abc"[mesh.ndim - 1]], mesh.get_local_rank(0) if mesh.ndim > 1 else 0
    sharded = [distribute_tensor(each, rest, [Shard(0)], src_data_rank=None) for each in (whole, other + row)]
    one = function(*sharded)
    one = one.full_tensor() if isinstance(one, DTensor) else one
    local = torch.as_tensor(one, dtype=x.dtype)[None].contiguous()
    first = Shard(0) if mesh.ndim > 1 else Replicate()
    return [DTensor.from_local(local, mesh, [first, *[Replicate()] * (mesh.ndim - 1)], run_check=False)]


def styled(model: str, styles: dict[str, list[Any]], sizes: list[int], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the result of a small model under parallel styles, gradients of its weights, and who wants one.

    Parameters
    ----------
    model
        ``perceptron``, ``frozen``, ``normed`` or ``padded``.
    styles
        For each module the name of a style and its options.
    """
    nn, tp = torch.nn, torch.distributed.tensor.parallel
    columns, hidden = sizes
    layers: list[Any]
    if model == "padded":
        layers = [nn.Embedding(hidden, columns, padding_idx=1), nn.Linear(columns, hidden, bias=False)]
    elif model == "normed":
        layers = [nn.LayerNorm(columns), nn.Linear(columns, hidden)]
    else:
        layers = [nn.Linear(columns, hidden), nn.Linear(hidden, columns)]
    network: Any = nn.Sequential(*layers).to(x.dtype if x.is_floating_point() else torch.float64)
    with torch.no_grad():
        for number, parameter in enumerate(network.parameters()):
            parameter.copy_((torch.arange(parameter.numel()) * 7 + number).remainder(5).sub(2).view(parameter.shape))
    if model in ("frozen", "normed"):
        next(network.parameters()).requires_grad_(False)
    given: Any = x.detach()
    if isinstance(x, DTensor):
        mesh = named(x.device_mesh)["abc"[x.device_mesh.ndim - 1]]
        plan = {name: getattr(tp, style)(**options) for name, (style, options) in styles.items()}
        network = tp.parallelize_module(network, mesh, plan)
        pending = any(placement.is_partial() for placement in x.placements)
        kept = [Replicate()] if pending or x.device_mesh.ndim > 1 else x.placements
        given = torch.distributed.tensor.distribute_tensor(given.full_tensor(), mesh, kept)
    result = network(given)
    (result * result.detach()).sum().backward()
    wanted = [float(parameter.requires_grad) for parameter in network.parameters()]
    flags = torch.tensor(wanted + [0.0] * (4 - len(wanted)), dtype=torch.float64) + 1
    weights = [layer.weight for layer in network]
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in weights]
    found: list[Any] = [result.detach(), *gradients, flags]
    if not isinstance(x, DTensor):
        return found
    wholes = [one.full_tensor().detach() if isinstance(one, DTensor) else one for one in found]
    everywhere = [Replicate()] * x.device_mesh.ndim
    return [DTensor.from_local(one.contiguous(), x.device_mesh, everywhere, run_check=False) for one in wholes]


for _program in (initialised, made, on_submeshes, styled):
    declares(f"{__name__}.{_program.__name__}")
