"""Programs of weights under ``fully_shard`` that change between the passes of training.

Each imports only torch, so that its source can stand in a reproduction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from verifier.planning.boundary import declares

__all__ = ["across", "changed"]


def on_two_dims(mesh: Any) -> Any:
    """Return the mesh of the same ranks that has two named dims, the last of which is as large as that of ``mesh``.

    The last dim has one rank if ``mesh`` has one dim. It is kept with the mesh, because groups stay for ever.
    """
    if "on_two_dims" not in vars(mesh):
        ranks = mesh.mesh.reshape(-1, mesh.shape[-1] if mesh.ndim > 1 else 1)
        mesh.on_two_dims = torch.distributed.device_mesh.DeviceMesh(
            mesh.device_type, ranks, mesh_dim_names=("first", "last")
        )
    return mesh.on_two_dims


def changed(options: dict[str, Any], events: list[str], /, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Return two weights and their gradients after passes of training, between which something changes.

    Parameters
    ----------
    options
        ``hybrid`` if one mesh dim has replicas of the shards, ``dim`` for the dim that is sharded, ``apart`` if each
        weight is reduced by itself, ``fewer`` if half of the ranks keep the shards after a forward pass, ``written`` if
        the forward pass limits the weights, ``precise`` if gradients are of another dtype than the weights.
    events
        ``train`` is a pass with gradients that are reduced, ``wait`` one with gradients that are not yet. ``zero``
        takes the gradients back, ``hook`` doubles those that follow, ``halve`` halves them by a divisor. ``double`` and
        ``float`` give the weights another dtype. ``shown`` reads the weights after a forward pass without gradients.
        ``step`` is one of an optimiser.
    """

    class Weight(torch.nn.Module):
        def __init__(self, weight: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(weight.clone())

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            if "written" in options:
                with torch.no_grad():
                    self.weight.clamp_(max=1)
            return torch.nn.functional.linear(given, self.weight)

    class Weights(torch.nn.Module):
        def __init__(self, first: Any, second: Any) -> None:
            super().__init__()
            self.first, self.second = Weight(first), Weight(second)

        def forward(self, given: torch.Tensor) -> Any:
            return self.first(given).sum() + self.second(given).sum() * 2

    mesh: Any = x.device_mesh if isinstance(x, DTensor) else None
    tensors: list[Any] = [x.detach(), y.detach()]
    model: Any = Weights(*(tensors if mesh is None else [one.full_tensor() for one in tensors]))
    if "precise" in options:
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float64
    sharded: list[Any] = []
    if mesh is not None:
        from torch.distributed.fsdp import fully_shard

        pair = on_two_dims(mesh)
        rest: Any = pair if "hybrid" in options else pair["last" if mesh.ndim > 1 else "first"]
        fewer = rest.size(-1) // 2
        resharded: Any = fewer if "fewer" in options and fewer > 1 and rest.size(-1) == 2 * fewer else None
        sharded = [model.first, model.second, model] if "apart" in options else [model]
        for module in sharded:
            placed: Any = {"shard_placement_fn": lambda weight: Shard(options.get("dim", 0))}
            fully_shard(module, mesh=rest, reshard_after_forward=resharded, **placed)
    found: list[Any] = []
    divisor, dtype = 1.0, x.dtype
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for number, event in enumerate(events):
        if event in ("double", "float"):
            dtype = torch.float64 if event == "double" else torch.float32
            model.to(dtype)
        elif event == "zero":
            model.zero_grad()
        elif event == "step":
            optimiser.step()
        elif event == "hook":
            for module in sharded:
                module.reshard()
            for parameter in model.parameters():
                parameter.register_hook(lambda gradient: gradient * 2)
        elif event == "halve":
            divisor = divisor * 2
            for module in sharded:
                module.set_gradient_divide_factor(divisor * rest.size())
                module.set_force_sum_reduction_for_comms(True)
        given = torch.arange(1.0, x.shape[1] + 1, dtype=dtype)[None] * (number + 1)
        if event in ("train", "wait"):
            for module in sharded:
                synced = module.set_requires_all_reduce if "hybrid" in options else module.set_requires_gradient_sync
                synced(event == "train")
            made = model(given)
            (made if sharded else made / divisor).backward()
        elif event == "shown":
            with torch.no_grad():
                model(given)
            found += [one.full_tensor() if isinstance(one, DTensor) else one for one in model.parameters()]
            found = [one.detach().clone() for one in found]
    for module in sharded:
        module.reshard()
    for parameter in model.parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found += [one.full_tensor() if isinstance(one, DTensor) else one for one in (parameter.detach(), gradient)]
    if mesh is None:
        return [one.detach() for one in found]
    everywhere = [Replicate()] * mesh.ndim
    return [DTensor.from_local(one.detach().contiguous(), mesh, everywhere, run_check=False) for one in found]


def across(precision: list[Any], passes: list[list[float]], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradient of a weight that the ranks of one mesh dim share and those of the other shard.

    Each rank that shares the weight has a row of the input, and all rows are alike.

    Parameters
    ----------
    precision
        The dtypes of parameters and of reductions, if they are not those of the weight.
    passes
        For each backward pass, what the rows of the result get as gradients. The other rows get 0.
    """
    from torch.distributed.tensor import distribute_tensor

    class Weight(torch.nn.Module):
        def __init__(self, weight: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(weight)

        def forward(self, given: Any) -> Any:
            return given * self.weight

    mesh: Any = x.device_mesh if isinstance(x, DTensor) else None
    rows = max(map(len, passes)) if mesh is None else mesh.size()
    if mesh is None:
        model: Any = Weight(x.detach()[0].clone())
    else:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        pair = on_two_dims(mesh)
        shared, shards = (pair["last"], pair["first"]) if mesh.ndim > 1 else (pair["first"], pair["last"])
        given: Any = x.detach()
        model = Weight(distribute_tensor(given.full_tensor()[0].clone(), shared, [Replicate()]))
        fully_shard(model, mesh=shards, mp_policy=MixedPrecisionPolicy(*precision))
        rows = shared.size()
    for numbers in passes:
        low = precision[0] if mesh is not None and precision else x.dtype
        gradient = torch.zeros(rows, x.shape[1], dtype=low)
        given = torch.arange(1.0, x.shape[1] + 1, dtype=low).expand(rows, -1).contiguous()
        for row, number in enumerate(numbers):
            gradient[row] = number
        if mesh is not None:
            given, gradient = (distribute_tensor(one, shared, [Shard(0)]) for one in (given, gradient))
        model(given).backward(gradient)
    made = model.weight.grad
    if mesh is None:
        return [made]
    whole = made.full_tensor().contiguous()
    return [DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)]


for _program in (across, changed):
    declares(f"{__name__}.{_program.__name__}")
