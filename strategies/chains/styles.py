"""Programs of what a user gives to parallel styles, to local_map, to rules of his own and to other entry points.

Each imports only torch, so that its source can stand in a reproduction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from strategies.chains.entry_points import named
from verifier.planning.boundary import declares

__all__ = [
    "asked_for_explicitly",
    "called_by_keyword",
    "distributed_module",
    "laid_out_otherwise",
    "mapped",
    "registered",
]


def laid_out_otherwise(style: str, said: Any, wanted: Any, own: Any, local: bool, /, x: torch.Tensor) -> list[Any]:
    """Return twice what a style for inputs or outputs makes of a DTensor that is not placed as the style says.

    Parameters
    ----------
    style
        ``PrepareModuleInput`` or ``PrepareModuleOutput``.
    said
        The layout of the style.
    wanted
        Its desired layout.
    own
        The placement of what the module gets or returns.
    local
        Whether the style gives local tensors.

    Raises
    ------
    AssertionError
        If a local tensor has not the shape that the desired layout gives it.
    """
    if not isinstance(x, DTensor):
        return [x.detach() * 2]
    from torch.distributed.tensor import distribute_tensor, parallel

    mesh: Any = named(x.device_mesh)["abc"[x.device_mesh.ndim - 1]]
    held: Any = x.detach()
    whole = held.full_tensor()
    of = style.removeprefix("PrepareModule").lower()
    options: dict[str, Any] = {f"{of}_layouts": said, f"desired_{of}_layouts": wanted, "use_local_output": local}
    module: Any = parallel.parallelize_module(torch.nn.Identity(), mesh, getattr(parallel, style)(**options))
    found: Any = module(distribute_tensor(whole, mesh, [own]))
    if not isinstance(found, DTensor):
        alike = found.shape == distribute_tensor(whole, mesh, [wanted]).to_local().shape
        everyone: list[Any] = [None] * mesh.size()
        torch.distributed.all_gather_object(everyone, alike, group=mesh.get_group())
        if not all(everyone):  # pytest would give an assert names that scripts lack
            raise AssertionError("the local tensor is not laid out as the style says")
        given: dict[str, Any] = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
        found = DTensor.from_local(found, mesh, [wanted], **given)
    found = (found * 2).full_tensor().contiguous()
    return [DTensor.from_local(found, x.device_mesh, [Replicate()] * x.device_mesh.ndim, run_check=False)]


def called_by_keyword(style: str, options: dict[str, Any], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the result of a layer under a parallel style that gets its input by keyword, or a list of results.

    Parameters
    ----------
    style
        The style of the layer, or of a module without parameters if it is ``PrepareModuleInput``; ``named`` or ``list``
        for a module that returns a named tuple or a list of results under ``PrepareModuleOutput``.
    """
    from collections import namedtuple

    pair: Any = namedtuple("pair", ("first", "last"))

    class Returned(torch.nn.Module):
        def forward(self, input: torch.Tensor) -> Any:
            found = [input * 2, input * 3]
            return found[0] if style == "PrepareModuleInput" else pair(*found) if style == "named" else found

    given: Any = x.detach()
    columns = given.shape[1]
    module: Any = torch.nn.LayerNorm(columns) if style == "SequenceParallel" else torch.nn.Linear(columns, columns)
    module = Returned() if style in ("list", "named", "PrepareModuleInput") else module.to(given.dtype)
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            values = (torch.arange(parameter.numel()) * 7 + number).remainder(5).sub(2)
            parameter.copy_(values.view(parameter.shape) / 4)
    if isinstance(x, DTensor):
        from torch.distributed.tensor import distribute_tensor, parallel

        mesh = named(x.device_mesh)["abc"[x.device_mesh.ndim - 1]]
        kind = "PrepareModuleOutput" if style in ("list", "named") else style
        module = parallel.parallelize_module(module, mesh, getattr(parallel, kind)(**options))
        given = distribute_tensor(given.full_tensor(), mesh, [Replicate()])
    found = module(input=given)
    results = [found.first, found.last] if style == "named" else list(found) if style == "list" else [found]
    if not isinstance(x, DTensor):
        return [one.detach() for one in results]
    everywhere = [Replicate()] * x.device_mesh.ndim
    wholes = [one.full_tensor() if isinstance(one, DTensor) else one for one in results]
    return [DTensor.from_local(one.detach().contiguous(), x.device_mesh, everywhere, run_check=False) for one in wholes]


def distributed_module(model: str, sharded: bool, /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return two results of a module that ``distribute_module`` distributes, and what SGD has made of it.

    That is the value and the gradient of each parameter, in each place that it has, and the buffer.

    Parameters
    ----------
    model
        ``tied`` with a weight in two places, ``frozen`` or ``plain``.
    sharded
        Whether the user's function shards the rows of the first bias, and hands over shards of the inputs.
    """

    class Scaled(torch.nn.Module):
        def __init__(self, columns: int) -> None:
            super().__init__()
            self.register_buffer("scale", torch.full((columns,), 0.5), persistent=False)

        def forward(self, value: Any) -> Any:
            return value * self.scale

    given: Any = x.detach()
    columns = given.shape[1]
    layers: list[Any] = [torch.nn.Linear(columns, columns), Scaled(columns), torch.nn.Linear(columns, columns)]
    with torch.no_grad():
        for number, parameter in enumerate([*layers[0].parameters(), *layers[2].parameters()]):
            values = (torch.arange(parameter.numel()) * 7 + number).remainder(5).sub(2)
            parameter.copy_(values.view(parameter.shape) / 4)
    if model == "tied":
        layers[2].weight = layers[0].weight
    network: Any = torch.nn.Sequential(*layers).to(given.dtype)
    if model == "frozen":
        layers[2].requires_grad_(False)
    if isinstance(x, DTensor):
        from torch.distributed.tensor import distribute_module, distribute_tensor

        mesh = named(x.device_mesh)["abc"[x.device_mesh.ndim - 1]]
        given = given.full_tensor()

        def partition(name: str, module: Any, mesh: Any) -> None:
            if name == "0":
                bias = distribute_tensor(module.bias.data, mesh, [Shard(0)])
                module.register_parameter("bias", torch.nn.Parameter(bias))

        def inputs(_: Any, values: Any, mesh: Any) -> Any:
            return (distribute_tensor(values[0], mesh, [Shard(0) if sharded else Replicate()]),)

        network = distribute_module(
            network, mesh, partition if sharded else None, inputs, lambda _, found, mesh: found.full_tensor()
        )
    optimizer = torch.optim.SGD([one for one in network.parameters() if one.requires_grad], lr=0.25)
    results = []
    for _ in range(2):
        optimizer.zero_grad()
        results.append(network(given))
        results[-1].mean().backward()
        optimizer.step()
    held = [one for _, one in network.named_parameters(remove_duplicate=False)]
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in held]
    found = [*results, *held, *gradients, network[1].scale]
    if not isinstance(x, DTensor):
        return [one.detach() for one in found]
    everywhere = [Replicate()] * x.device_mesh.ndim
    wholes = [(one.full_tensor() if isinstance(one, DTensor) else one).detach().contiguous() for one in found]
    return [DTensor.from_local(one, x.device_mesh, everywhere, run_check=False) for one in wholes]


def mapped(kind: str, placements: list[Any], /, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Return the product of two tensors by a function of local tensors.

    Parameters
    ----------
    kind
        ``keyword`` where the second tensor is given by keyword, ``tuple`` where placements are a tuple, as those of a
        DTensor are, ``list`` where they are a list.
    """
    if not isinstance(x, DTensor) or not isinstance(y, DTensor):
        return [x.detach() * y.detach()]
    from torch.distributed.tensor.experimental import local_map

    given: list[Any] = [x.detach(), y.detach()]
    pair = [one.redistribute(placements=placements) for one in given]
    wanted: Any = tuple(placements) if kind == "tuple" else placements
    product: Any = local_map(lambda one, other: one * other, out_placements=wanted)
    return [product(pair[0], other=pair[1]) if kind == "keyword" else product(*pair)]


def registered(kind: str, first: Any, second: Any, /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return two sums of ``x`` by an op with a rule of the user's, or the op alone.

    Parameters
    ----------
    kind
        The type of the argument that says which dim is summed: ``int[]``, ``bool``, ``float``, ``str``, ``int``. Or
        ``first`` for a rule of one of torch's own ops that has one, and ``later`` for one of an op that ran before.

    Raises
    ------
    AssertionError
        If the rule was not asked.
    """

    def dim_of(said: Any) -> int:
        return int(said[0]) if isinstance(said, list) else int(said)

    aten: Any = torch.ops.aten
    held: Any = x.detach()
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    registries = [value for value in vars(propagator).values() if isinstance(value, dict)]
    if kind in ("first", "later"):
        op: Any = aten.special_entr.default if kind == "first" else aten._log_softmax.default
        given: list[Any] = [] if kind == "first" else [1, False]
    else:
        name = "summed_" + {"int[]": "list"}.get(kind, kind)
        space: Any = torch.ops.verifier_programs
        libraries: Any = torch.library
        if not hasattr(space, name):
            library: Any = libraries.Library("verifier_programs", "FRAGMENT")
            library.define(f"{name}(Tensor x, {kind} dim) -> Tensor")
            library.impl(name, lambda x, dim: x.sum(dim_of(dim)), "CompositeExplicitAutograd")
            libraries.kept = [*getattr(libraries, "kept", []), library]
        op = getattr(space, name).default
        given = []
    if not isinstance(x, DTensor):
        return [op(held, *given)] if kind in ("first", "later") else [op(held, one) for one in (first, second)]
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor.experimental import register_sharding

    asked: list[Any] = []

    def rule(x: Any, *said: Any) -> Any:
        asked.append(said)
        rules: list[Any] = [([Replicate()], [Replicate(), *[None] * len(said)])]
        if kind in ("first", "later"):
            return rules
        dim = dim_of(said[0])
        for other in range(x.ndim):
            made = Partial() if other == dim else Shard(other - (other > dim))
            rules.append(([made], [Shard(other), None]))
        return rules

    before = [dict(one) for one in registries]
    try:
        if kind == "later":
            op(held, *given)
        register_sharding(op)(rule)
        found = [op(held, *given)] if kind in ("first", "later") else [op(held, one) for one in (first, second)]
    finally:
        for one, known in zip(registries, before, strict=True):
            one.clear()
            one.update(known)
        propagator.propagate_op_sharding.cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()
    if not asked:  # pytest would give an assert names that scripts lack
        raise AssertionError("the registered rule was not asked")
    return found


def asked_for_explicitly(path: str, given: list[Any], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return what a function makes of ``x``, without communication or by a tensor that was replicated before.

    Raises
    ------
    AssertionError
        If the function communicates where ``ExplicitRedistributionContext`` forbids this.
    """
    function: Any = torch
    for part in path.split(".")[1:]:
        function = getattr(function, part)
    if not isinstance(x, DTensor):
        return [function(x.detach(), *given)]
    from torch.distributed.tensor import debug

    held: Any = x.detach()
    modes: Any = debug
    mode, tensors = modes.CommDebugMode(), vars(torch.distributed)["tensor"]
    try:
        with mode, tensors._utils.ExplicitRedistributionContext():
            found = function(held, *given)
    except RuntimeError as error:
        if "ExplicitRedistributionContext" not in str(error):
            raise
        return [function(held.redistribute(placements=[Replicate()] * x.device_mesh.ndim), *given)]
    if mode.get_total_counts():
        raise AssertionError("ranks have communicated where only explicit redistributions may")
    return [found]


for _program in (asked_for_explicitly, called_by_keyword, distributed_module, laid_out_otherwise, mapped, registered):
    declares(f"{__name__}.{_program.__name__}")
