"""Programs of tensor parallelism: inputs that are kept in shards, weights that each rank has of its own, checks.

Each imports only torch, so that its source can stand in a reproduction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from strategies.chains.entry_points import named
from verifier.planning.boundary import declares

__all__ = [
    "beside_the_mesh",
    "checked_on_submeshes",
    "fully_sharded",
    "miscounted",
    "resharded",
    "sharded_in_turns",
    "with_own_weights",
]


def resharded(model: str, dim: int, recomputed: bool, hidden: int, /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the result of a small model under ``input_reshard``, and the gradients of its input and its weights.

    Parameters
    ----------
    model
        ``split``, whose layers are under ``ColwiseParallel`` and ``RowwiseParallel``; or ``replicated`` on all ranks.
    dim
        The dim of what is saved for the backward pass, of which each rank keeps a shard.
    recomputed
        Whether activations are computed again in the backward pass, so that only the input is saved.
    hidden
        The number of columns between the layers.
    """
    nn = torch.nn
    columns = x.shape[1]
    first: Any = nn.LayerNorm(columns) if model == "replicated" else nn.Linear(columns, hidden)
    last = nn.Linear(columns if model == "replicated" else hidden, columns)
    network: Any = nn.Sequential(first, nn.Tanh(), last).to(x.dtype)
    with torch.no_grad():
        for number, parameter in enumerate(network.parameters()):
            values = (torch.arange(parameter.numel()) * 7 + number).remainder(5).sub(2)
            parameter.copy_(values.view(parameter.shape) / 4)
    given: Any = x.detach()
    if isinstance(x, DTensor):
        from torch.distributed.tensor import parallel
        from torch.distributed.tensor.parallel.input_reshard import input_reshard
        from torch.utils.checkpoint import checkpoint

        mesh = named(x.device_mesh)["abc"[x.device_mesh.ndim - 1]]
        plan: Any = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
        network = parallel.parallelize_module(network, mesh, plan) if model == "split" else network
        if recomputed:
            whole = network.forward
            network.forward = lambda x: checkpoint(whole, x, use_reentrant=False)
        network = input_reshard(network, mesh, dim)
        given = given.full_tensor()
    given = given.clone().requires_grad_()
    result = network(given)
    (result * result.detach()).sum().backward()
    weights = [one for name, one in network.named_parameters() if name.endswith("weight")]
    found: list[Any] = [result.detach(), given.grad, *(one.grad for one in weights)]
    if not isinstance(x, DTensor):
        return found
    wholes = [one.full_tensor() if isinstance(one, DTensor) else one for one in found]
    everywhere = [Replicate()] * x.device_mesh.ndim
    return [DTensor.from_local(one.contiguous(), x.device_mesh, everywhere, run_check=False) for one in wholes]


def with_own_weights(key: str, style: str, source: int | None, /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return twice the parameters of a layer, the weight ``x`` and a column of it, under a parallel style.

    Ranks start with other numbers where the layer does not take theirs.

    Parameters
    ----------
    key
        The name of the layer in the plan, empty for the module itself; or ``no plan``, where the style is given alone.
    source
        The rank whose parameters all ranks take. None if each takes its own.
    """
    weight: Any = x.detach()
    rows, columns = weight.shape
    layer: Any = torch.nn.Linear(columns, rows).to(weight.dtype)
    if isinstance(x, DTensor):
        from torch.distributed.tensor import parallel

        weight = weight.full_tensor()
        mesh = named(x.device_mesh)["abc"[x.device_mesh.ndim - 1]]
        rank, size, dim = mesh.get_local_rank(), mesh.size(), 0 if style == "ColwiseParallel" else 1
    with torch.no_grad():
        for parameter, value in ((layer.weight, weight), (layer.bias, weight[:, 0])):
            parameter.copy_(value)
            if not isinstance(x, DTensor):
                continue
            wrong = torch.ones_like(parameter)
            if source is not None:
                wrong *= float(rank != source % size)
            elif parameter.ndim > dim:
                pieces = torch.arange(parameter.shape[dim]).chunk(size)
                wrong.index_fill_(dim, pieces[rank] if rank < len(pieces) else pieces[0][:0], 0)
            else:
                wrong *= 0
            parameter += wrong
    if isinstance(x, DTensor):
        module = layer
        for name in reversed([] if key in ("", "no plan") else key.split(".")):
            module = torch.nn.ModuleDict({"inner" if name == "*" else name: module})
        plan: Any = getattr(parallel, style)()
        parallel.parallelize_module(module, mesh, plan if key == "no plan" else {key: plan}, src_data_rank=source)
    found: list[Any] = [layer.weight.detach() * 2, layer.bias.detach() * 2]
    if not isinstance(x, DTensor):
        return found
    everywhere = [Replicate()] * x.device_mesh.ndim
    wholes = [one.full_tensor().contiguous() for one in found]
    return [DTensor.from_local(one, x.device_mesh, everywhere, run_check=False) for one in wholes]


def checked_on_submeshes(difference: str, /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return twice ``x``, of which ``from_local`` makes replicas on each row of the mesh, and checks them.

    Parameters
    ----------
    difference
        How the rows differ: their tensors have another ``shape`` or ``dtype``, or the first row is ``alone``.
    """
    if not isinstance(x, DTensor):
        return [x.detach() * 2]
    mesh: Any = x.device_mesh
    held: Any = x.detach()
    whole = held.full_tensor()
    rest, row = named(mesh)["abc"[mesh.ndim - 1]], mesh.get_local_rank(0) if mesh.ndim > 1 else 0
    local = torch.cat([whole] * (row + 1)) if difference == "shape" else whole
    local = local.to(torch.complex128) if difference == "dtype" and row else local
    found: Any = local
    if difference != "alone" or not row:
        found = DTensor.from_local(local, rest, [Replicate()], run_check=True).full_tensor()
    found = (found.real if found.is_complex() else found)[: len(whole)].to(whole.dtype) * 2
    return [DTensor.from_local(found.contiguous(), mesh, [Replicate()] * mesh.ndim, run_check=False)]


def beside_the_mesh(path: str, given: list[Any], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return twice what a function makes of ``x`` on a mesh without the last rank, which calls it as well."""
    function: Any = torch
    for part in path.split(".")[1:]:
        function = getattr(function, part)
    if not isinstance(x, DTensor):
        return [function(x.detach(), *given) * 2]
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh: Any = x.device_mesh
    if "smaller" not in vars(mesh):  # kept with the mesh, because groups stay for ever
        mesh.smaller = torch.distributed.device_mesh.DeviceMesh(mesh.device_type, mesh.mesh.flatten()[:-1])
    held: Any = x.detach()
    held = held.full_tensor()
    found = function(distribute_tensor(held.clone(), mesh.smaller, [Shard(0)]), *given).full_tensor() * 2
    found = found if mesh.smaller.get_coordinate() is not None else function(held, *given) * 2
    return [DTensor.from_local(found.contiguous(), mesh, [Replicate()] * mesh.ndim, run_check=False)]


def miscounted(entry: str, more: int, /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return twice ``x``, which an entry point has refused to place by another number of placements than mesh dims.

    Parameters
    ----------
    entry
        ``redistribute``, ``from_local`` or ``distribute_tensor``.
    more
        How many placements there are more than mesh dims.

    Raises
    ------
    AssertionError
        If the entry point takes the placements.
    """
    if not isinstance(x, DTensor):
        return [x.detach() * 2]
    from torch.distributed.tensor import distribute_tensor

    mesh: Any = x.device_mesh
    held: Any = x.detach()
    whole = held.full_tensor()
    placements: Any = [Replicate()] * (mesh.ndim + more)
    try:
        if entry == "redistribute":
            held.redistribute(placements=placements)
        elif entry == "from_local":
            DTensor.from_local(whole, mesh, placements, run_check=False)
        else:
            distribute_tensor(whole, mesh, placements)
    except (IndexError, ValueError, RuntimeError):
        return [DTensor.from_local(whole * 2, mesh, [Replicate()] * mesh.ndim, run_check=False)]
    raise AssertionError("as many placements as mesh dims are needed, and others were taken")


def _with_gradients(found: list[Any], model: torch.nn.Module, mesh: Any) -> list[Any]:
    """Return what was found and the whole gradients of a model, replicated on the mesh if there is one."""
    for parameter in model.parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found.append((gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).detach())
    if mesh is None:
        return found
    return [DTensor.from_local(one, mesh, [Replicate()] * mesh.ndim, run_check=False) for one in found]


def fully_sharded(
    precision: list[Any], options: dict[str, Any], used: list[bool], /, x: torch.Tensor, y: torch.Tensor
) -> list[torch.Tensor]:
    """Return what two weights make of each of several inputs, and their gradients, trained under ``fully_shard``.

    The gradients are added up, and reduced after the last input alone.

    Parameters
    ----------
    precision
        The dtypes of parameters and of reductions, if they are not those of the weights.
    options
        Keywords of ``fully_shard``.
    used
        For each input, whether it takes the second weight as well.
    """

    class Weights(torch.nn.Module):
        def __init__(self, *weights: Any) -> None:
            super().__init__()
            self.first, self.second = (torch.nn.Parameter(one.clone()) for one in weights)

        def forward(self, given: torch.Tensor, both: bool) -> torch.Tensor:
            found = torch.nn.functional.linear(given, self.first)
            return found * torch.nn.functional.linear(given, self.second) if both else found

    mesh: Any = x.device_mesh if isinstance(x, DTensor) else None
    weights: list[Any] = [x.detach(), y.detach()]
    if mesh is None:
        model: Any = Weights(*weights)
    else:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        model = Weights(*(one.full_tensor() for one in weights))
        rest = named(mesh)["abc"[mesh.ndim - 1]]
        fully_shard(model, mesh=rest, mp_policy=MixedPrecisionPolicy(*precision), **options)
    found: list[Any] = []
    for number, both in enumerate(used):
        if mesh is not None:
            model.set_requires_gradient_sync(number == len(used) - 1)
        made = model(torch.full((1, x.shape[1]), number + 1.0, dtype=x.dtype), both).to(x.dtype)
        made.sum().backward()
        found.append(made.detach())
    return _with_gradients(found, model, mesh)


def sharded_in_turns(
    hybrid: bool,
    apart: bool,
    dim: int,
    deferred: str,
    precision: list[Any],
    turns: list[str],
    unused: bool = False,
    /,
    *,
    x: torch.Tensor,
    y: torch.Tensor,
) -> list[torch.Tensor]:
    """Return the gradients of two weights under ``fully_shard``, of which each input takes some.

    What is made of an input in inference mode comes first.

    Parameters
    ----------
    hybrid
        Whether the ranks of one mesh dim keep replicas of the shards.
    apart
        Whether each weight is reduced by itself, not with the other.
    dim
        The dim of the weights that is sharded.
    deferred
        What happens after the last input alone: ``all_reduce``, ``gradient_sync`` or nothing.
    precision
        The dtypes of parameters and of reductions, if they are not those of the weights.
    turns
        For each input, the letters of the weights that it takes, in capitals in inference mode. Before ``frozen``, no
        weight wants a gradient.
    unused
        Whether a weight that an input does not take is reduced as well.
    """

    class Weight(torch.nn.Module):
        def __init__(self, weight: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(weight.clone())

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(given, self.weight)

    class Weights(torch.nn.Module):
        def __init__(self, first: Any, second: Any) -> None:
            super().__init__()
            self.a, self.b = Weight(first), Weight(second)

        def forward(self, given: torch.Tensor, taken: str) -> Any:
            return sum(getattr(self, letter)(given).sum() for letter in taken.lower())

    mesh: Any = x.device_mesh if isinstance(x, DTensor) else None
    weights: list[Any] = [x.detach(), y.detach()]
    model: Any = Weights(*(weights if mesh is None else [one.full_tensor() for one in weights]))
    groups: Any = (model.a, model.b, model) if apart else (model,)
    if mesh is not None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torch.distributed.tensor import Shard

        rest = named(mesh)["abc"[mesh.ndim - 1]]
        if hybrid:
            if "replicated" not in vars(mesh):  # kept with the mesh, because groups stay for ever
                ranks = mesh.mesh.reshape(-1, mesh.shape[-1] if mesh.ndim > 1 else 1)
                mesh.replicated = torch.distributed.device_mesh.DeviceMesh(
                    mesh.device_type, ranks, mesh_dim_names=("replicas", "shards")
                )
            rest = mesh.replicated
        policy = MixedPrecisionPolicy(*precision)
        for module in groups:
            fully_shard(module, mesh=rest, mp_policy=policy, shard_placement_fn=lambda weight: Shard(dim))
        model.set_reduce_scatter_unused_params(unused)
    found: list[Any] = []
    model.requires_grad_("frozen" not in turns)
    for number, taken in enumerate(turns):
        if taken == "frozen":
            for module in groups if mesh is not None else ():
                module.reshard()
            model.requires_grad_(True)
            continue
        if mesh is not None and deferred:
            getattr(model, f"set_requires_{deferred}")(number == len(turns) - 1)
        given = torch.arange(1.0, x.shape[1] + 1, dtype=x.dtype)[None] * (number + 1)
        with torch.inference_mode(taken.isupper()):
            made = model(given, taken)
        if taken.isupper():
            found.append(made.to(x.dtype).clone())
        elif "frozen" not in turns[number:]:
            made.to(x.dtype).backward()
    for module in groups if mesh is not None else ():
        module.reshard()
    return _with_gradients(found, model, mesh)


_PROGRAMS = (
    beside_the_mesh, checked_on_submeshes, fully_sharded, miscounted, resharded, sharded_in_turns, with_own_weights,
)  # fmt: skip
for _program in _PROGRAMS:
    declares(f"{__name__}.{_program.__name__}")
