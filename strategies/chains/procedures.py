"""Programs that no list of steps describes: optimisers, clipping, scaled gradients, and DTensor's own entry points.

Each imports only torch, so that its source can stand in a reproduction. ``p0``, ``p1`` … are parameters, and ``g0``,
``g1`` … are their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from verifier.planning.boundary import declares

__all__ = [
    "accumulated",
    "clipped",
    "locally",
    "on_flattened_mesh",
    "optimised",
    "parallel_loss",
    "parameters_of",
    "penalised",
    "placed_gradients",
    "rewrapped",
    "scaled",
]


def parameters_of(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of the parameters, each with a copy of its gradient."""
    parameters = []
    for name, tensor in tensors.items():
        if name.startswith("p"):
            parameter = tensor.detach().clone().requires_grad_()
            parameter.grad = tensors[f"g{name[1:]}"].detach().clone()
            parameters.append(parameter)
    return parameters


def optimised(kind: str, options: dict[str, Any], steps: int, /, **tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return the parameters after ``steps`` steps of the optimiser ``torch.optim.KIND``; the gradients grow."""
    parameters = parameters_of(tensors)
    optimiser = getattr(torch.optim, kind)(parameters, **options)
    for _ in range(steps):
        optimiser.step()
        for parameter in parameters:
            parameter.grad = None if parameter.grad is None else parameter.grad * 2
    return [parameter.detach() for parameter in parameters]


def accumulated(calls: list[list[Any]], /, x: torch.Tensor, **tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradient of ``x`` after a backward pass for each call, a function's path and its other arguments."""
    leaf = x.detach().clone().requires_grad_()
    for path, *given in calls:
        function: Any = torch
        for part in path.split(".")[1:]:
            function = getattr(function, part)
        found = function(leaf, *(tensors.get(one, one) if isinstance(one, str) else one for one in given))
        (found * found.detach()).sum().backward()
    gradient: Any = leaf.grad
    return [gradient]


def clipped(norm: float, order: float, foreach: bool, /, **tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return the norm of all gradients, and the gradients that ``clip_grad_norm_`` leaves."""
    parameters = parameters_of(tensors)
    total = torch.nn.utils.clip_grad_norm_(parameters, norm, order, foreach=foreach)
    return [total, *(parameter.grad for parameter in parameters if parameter.grad is not None)]


def scaled(steps: int, /, **tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return the parameters after steps of SGD with gradients that a ``GradScaler`` has scaled, and the scale."""
    parameters = parameters_of(tensors)
    optimiser = torch.optim.SGD(parameters, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    scaler.scale(torch.ones(()))
    for _ in range(steps):
        scaler.unscale_(optimiser)
        scaler.step(optimiser)
        scaler.update()
    found = [parameter.detach() for parameter in parameters]
    return [*found, torch.ones_like(found[0]) * scaler.get_scale()]


def parallel_loss(
    placements: list[Any],
    options: dict[str, Any],
    before: str,
    /,
    x: torch.Tensor,
    y: torch.Tensor,
    **tensors: torch.Tensor,
) -> list[torch.Tensor]:
    """Return a loss of the scores ``x`` and its gradient, computed under ``loss_parallel`` on DTensors.

    Parameters
    ----------
    options
        Keywords of ``cross_entropy``. Without a reduction the loss is the squared ``log_softmax``; with ``alone`` it is
        an ``nll_loss`` of what some other function has made.
    before
        ``nested`` for one ``loss_parallel`` inside of another, ``raised`` for a loss that comes after a block which an
        error has ended.
    tensors
        ``z``, the weights of classes.
    """
    from contextlib import ExitStack

    from torch.distributed.tensor.parallel import loss_parallel

    def loss_of(leaf: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if "alone" in options:
            rest = {name: option for name, option in options.items() if name != "alone"}
            return torch.nn.functional.nll_loss(leaf, target, weight=weight, **rest)
        if "reduction" in options:
            return torch.nn.functional.cross_entropy(leaf, target, weight=weight, **options)
        return torch.nn.functional.log_softmax(leaf, min(leaf.ndim - 1, 1)) ** 2

    weight = tensors.get("z")
    if not isinstance(x, DTensor):
        leaf = x.detach().requires_grad_()
        loss = loss_of(leaf, y, weight)
        return [loss.detach(), *torch.autograd.grad(loss.sum(), leaf)]
    scores: Any = x.detach()
    if before == "raised":
        try:
            with loss_parallel():
                raise ArithmeticError
        except ArithmeticError:
            pass
        try:
            leaf = scores.requires_grad_()
            loss = loss_of(leaf, y, weight)
            return [loss.detach(), *torch.autograd.grad(loss.sum(), leaf)]
        finally:
            with loss_parallel():  # its end takes away what the error has left
                pass
    leaf = scores.redistribute(placements=placements).requires_grad_()
    kept = [placement if placement == Shard(0) and leaf.ndim > 1 else Replicate() for placement in placements]
    target = y.redistribute(placements=kept) if isinstance(y, DTensor) else y
    weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
    with ExitStack() as blocks:
        for _ in range(2 if before == "nested" else 1):
            blocks.enter_context(loss_parallel())
        loss = loss_of(leaf, target, weight)
        return [loss.detach(), *torch.autograd.grad(loss.sum(), leaf)]


def locally(placements: list[Any], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return ``2 * x + 1``, computed by ``local_map`` on local tensors with the given placements."""
    from torch.distributed.tensor.experimental import local_map

    if not isinstance(x, DTensor):
        return [2 * x + 1]
    mapped = local_map(
        lambda local: 2 * local + 1,
        out_placements=placements,
        in_placements=(placements,),
        redistribute_inputs=True,
    )
    return [mapped(x)]


def rewrapped(grows: bool, /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return ``x``, or ``2 * x``, taken to local tensors and back by ``from_local`` with its shape and strides.

    What grows is no factor of a product, of which each rank has one.
    """
    if not isinstance(x, DTensor):
        return [x * 2 if grows else x.view_as(x)]
    kinds = [getattr(placement, "reduce_op", "") if grows else "" for placement in x.placements]
    kept = [Replicate() if kind == "product" else one for kind, one in zip(kinds, x.placements, strict=True)]
    local = x.redistribute(placements=kept).to_local()
    stride = torch.empty(x.shape, device="meta").stride()
    given: dict[str, Any] = {"run_check": False, "shape": x.shape, "stride": stride}
    return [DTensor.from_local(local * 2 if grows else local, x.device_mesh, kept, **given)]


def penalised(way: str, placements: list[Any], /, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradient of a gradient's square, as a gradient penalty has it, of a function of ``x`` and of ``y``.

    Parameters
    ----------
    way
        How ``x`` comes to the function: by ``from_local``, by ``redistribute``, or ``as it is``.
    placements
        Those of ``from_local`` and ``redistribute``.
    """

    def penalty(leaf: Any, taken: Any) -> Any:
        (gradient,) = torch.autograd.grad(((taken @ y) ** 3).sum(), leaf, create_graph=True)
        return torch.autograd.grad((gradient**2).sum(), leaf)[0]

    if not isinstance(x, DTensor):
        leaf = x.detach().requires_grad_()
        return [penalty(leaf, leaf)]
    mesh: Any = x.device_mesh
    held: Any = x.detach()
    if way != "from_local":
        leaf = held.requires_grad_()
        return [penalty(leaf, leaf.redistribute(placements=placements) if way == "redistribute" else leaf)]
    held = held.redistribute(placements=placements)
    given: dict[str, Any] = {"run_check": False, "shape": x.shape, "stride": torch.empty(x.shape).stride()}
    local = held.to_local().clone(memory_format=torch.contiguous_format).requires_grad_()
    found = penalty(local, DTensor.from_local(local, mesh, placements, **given))
    return [DTensor.from_local(found.contiguous(), mesh, placements, **given)]


def placed_gradients(way: str, kinds: list[str], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradient of a weighted sum of ``x``, whose placements the caller says. It is the weights.

    Parameters
    ----------
    way
        Which function takes ``grad_placements``: ``to_local``, ``full_tensor`` or ``from_local``.
    kinds
        For each mesh dim on which ``x`` is replicated ``sum`` or ``avg``, if the gradient is to be pending there. Ranks
        then weigh the sum by other numbers. ``from the end`` counts the dim of a shard so.
    """
    weights = torch.arange(1, x.numel() + 1, dtype=x.dtype).view(x.shape)
    if not isinstance(x, DTensor):
        return [weights]
    from torch.distributed.tensor import Partial, Shard, distribute_tensor

    mesh, share = x.device_mesh, 1
    held: Any = x.detach()
    if way == "from_local":
        held = held.redistribute(placements=[Replicate() if one.is_partial() else one for one in held.placements])
    laid: list[Any] = [Replicate() if one.is_partial() else one for one in held.placements]
    placed = list(laid)
    for mesh_dim, kind in enumerate(kinds):
        if kind == "from the end":
            dim = getattr(placed[mesh_dim], "dim", None)
            if way == "full_tensor":
                placed[mesh_dim] = Replicate()
            elif dim is not None and type(placed[mesh_dim]) is Shard:
                placed[mesh_dim] = Shard(dim - x.ndim)
        elif kind and (held.placements[mesh_dim].is_replicate() or way == "full_tensor"):
            placed[mesh_dim] = Partial(kind)
            size, rank = mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)
            share *= (size if kind == "avg" else 1) * (1 if size == 1 else (3, -2, *[0] * size)[rank])
        elif way == "full_tensor":
            placed[mesh_dim] = Replicate()
    leaf = held.requires_grad_()
    if way == "full_tensor":
        whole = leaf.full_tensor(grad_placements=placed)
        return [*torch.autograd.grad((whole * weights * share).sum(), leaf)]
    if way == "to_local":
        own = distribute_tensor(weights, mesh, laid, src_data_rank=None).to_local()
        return [*torch.autograd.grad((leaf.to_local(grad_placements=placed) * own * share).sum(), leaf)]
    given: dict[str, Any] = {"run_check": False, "shape": x.shape, "stride": weights.stride()}
    local = held.detach().to_local().contiguous().requires_grad_()
    made = DTensor.from_local(local, mesh, laid, grad_placements=placed, **given)
    gradient: Any = torch.autograd.grad((made.full_tensor() * weights).sum(), local)[0]
    return [DTensor.from_local(gradient.contiguous(), mesh, placed, **given)]


def on_flattened_mesh(targets: list[list[Any]], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return ``x`` after redistributions on a mesh that knows itself flattened, where one collective does for two."""
    if not isinstance(x, DTensor):
        return [x.view_as(x)]
    mesh: Any = x.device_mesh
    if "flattened" not in vars(mesh):  # kept with the mesh, because the groups of a mesh stay for ever
        mesh.flattened = torch.distributed.device_mesh.DeviceMesh(
            mesh.device_type, mesh.mesh, mesh_dim_names=tuple("abc"[: mesh.ndim])
        )
        if mesh.ndim > 1:
            mesh.flattened._flatten("flat")
    stride = torch.empty(x.shape, device="meta").stride()
    moved = DTensor.from_local(
        x.to_local().contiguous(), mesh.flattened, x.placements, run_check=False, shape=x.shape, stride=stride
    )
    for target in targets:
        moved = moved.redistribute(placements=target)
    local = moved.to_local()
    return [DTensor.from_local(local, mesh, moved.placements, run_check=False, shape=x.shape, stride=stride)]


for _program in (
    accumulated,
    clipped,
    locally,
    on_flattened_mesh,
    optimised,
    parallel_loss,
    penalised,
    placed_gradients,
    rewrapped,
    scaled,
):
    declares(f"{__name__}.{_program.__name__}")
