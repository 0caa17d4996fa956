"""Programs of DTensor's entry points that no op reaches: factories, initialisers, submeshes, parallel styles.

Each imports only torch, so that its source can stand in a reproduction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from verifier.planning.boundary import declares

__all__ = [
    "beside_numbers",
    "copied",
    "distributed",
    "drawn",
    "exchanged",
    "implicitly",
    "inferred",
    "initialised",
    "made",
    "on_submeshes",
    "over_two_meshes",
    "prepared",
    "reordered",
    "styled",
    "taken",
    "unwrapped",
    "written_to_plain",
]


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


def beside_numbers(path: str, number: float, late: bool, /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return what a function makes of ``x`` with a number, and with a plain tensor without dims that holds it.

    Parameters
    ----------
    late
        Whether the number comes after the tensor. The dims in front keep decisions apart from those of other calls.
    """
    function: Any = torch
    for part in path.split(".")[1:]:
        function = getattr(function, part)
    held = torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else torch.int64)
    given = x.detach()
    value = given[None, None] if late else given[None, None, None]
    return [function(value, one) for one in ([held, number] if late else [number, held])]


def written_to_plain(path: str, kind: str, /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return twice what a function writes to a plain tensor of one element, or of three where it writes to the second.

    Parameters
    ----------
    path
        The function: it gets all of ``x``, or its sum if it writes in place.
    kind
        ``out``, ``in place``, or ``an item``.
    """
    function: Any = torch
    for part in path.split(".")[1:]:
        function = getattr(function, part)
    given = x.detach()
    plain = torch.ones([3] if kind == "an item" else [], dtype=x.dtype)
    if kind == "out":
        found = function(given, list(range(x.ndim)), out=plain)
    else:
        function(plain[1] if kind == "an item" else plain, given.sum())
        found = plain
    if isinstance(x, DTensor) and not isinstance(found, DTensor):
        found = DTensor.from_local(found, x.device_mesh, [Replicate()] * x.device_mesh.ndim, run_check=False)
    return [found * 2]


def distributed(path: str, given: list[Any], placements: list[Any], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return twice what ``distribute_tensor`` makes of a function's result on a plain tensor, such as a view of it."""
    function: Any = torch
    for part in path.split(".")[1:]:
        function = getattr(function, part)
    if not isinstance(x, DTensor):
        return [function(x.detach(), *given) * 2]
    held: Any = x.detach()
    found = function(held.full_tensor(), *given)
    return [torch.distributed.tensor.distribute_tensor(found, x.device_mesh, placements) * 2]


def initialised(name: str, given: list[Any], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return a copy of ``x`` that the initialiser ``torch.nn.init.NAME`` has filled."""
    copied = x.detach().clone()
    getattr(torch.nn.init, name)(copied, *given)
    return [copied]


def drawn(path: str, given: list[Any], seed: int, /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return numbers and what a random op draws for a replica of ``x`` with a generator, less what a plain one gets.

    The second result is about the number that the generator gives next.
    """
    function: Any = torch
    for part in path.split(".")[1:]:
        function = getattr(function, part)
    held: Any = x.detach()
    mesh: Any = x.device_mesh if isinstance(x, DTensor) else None
    whole = held if mesh is None else held.full_tensor()
    ours, plain = (torch.Generator(x.device).manual_seed(seed) for _ in range(2))
    expected = [function(whole.clone(), *given, generator=plain)]
    if mesh is not None:
        held = held.redistribute(placements=[Replicate()] * mesh.ndim)
    found = [function(held.clone(), *given, generator=ours)]
    if x.device.type == "cpu":  # elsewhere DTensor counts in steps of its own
        expected += [torch.rand(1, generator=plain)]
        found += [torch.rand(1, generator=ours)]

    def numbers(like: torch.Tensor) -> torch.Tensor:
        return torch.arange(1, like.numel() + 1, device=like.device).view(like.shape)

    if mesh is None:
        return [one - other + numbers(one) for one, other in zip(found, expected, strict=True)]

    def replica(one: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(one, mesh, [Replicate()] * mesh.ndim, run_check=False)

    found = [found[0], *map(replica, found[1:])]
    return [one - replica(other) + replica(numbers(other)) for one, other in zip(found, expected, strict=True)]


def exchanged(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Return twice a copy of ``x`` whose ``data`` have been set to those of ``y``, and its sum."""
    held = x.detach().clone()
    held.data = y.detach().clone()
    return [held * 2, held.sum()]


def taken(checked: bool, placements: list[Any], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return what is left in the caller's tensor, ``x`` and another number on each rank, once a DTensor is made of it.

    Parameters
    ----------
    checked
        Whether ``from_local`` makes it, and checks replicas. Else ``distribute_tensor`` does.
    """
    if not isinstance(x, DTensor):
        return [x.detach() * 1]
    mesh, everywhere = x.device_mesh, [Replicate()] * x.device_mesh.ndim
    number = mesh.get_local_rank(mesh.ndim - 1)
    held: Any = x.detach()
    own = held.full_tensor() + number
    if checked:
        DTensor.from_local(own, mesh, everywhere, run_check=True)
    else:
        torch.distributed.tensor.distribute_tensor(own, mesh, placements)
    return [DTensor.from_local(own - number, mesh, everywhere, run_check=False)]


def unwrapped(x: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradient of a weighted sum of ``x``, whose local tensors ``from_local`` takes. It is the weights.

    The gradients of the parts of an average, a maximum or a minimum sum up to that of the whole. Each part of a sum has
    that of the whole, and so it is taken to be of a product.
    """
    weights = torch.arange(1, x.numel() + 1, dtype=x.dtype).view(x.shape)
    if not isinstance(x, DTensor):
        return [weights]
    mesh, shape = x.device_mesh, x.shape
    held: Any = x.detach()
    parts = held.to_local().clone(memory_format=torch.contiguous_format).requires_grad_()
    given: dict[str, Any] = {"run_check": False, "shape": shape, "stride": torch.empty(shape, device="meta").stride()}
    whole = DTensor.from_local(parts, mesh, x.placements, **given)
    gradient: Any = torch.autograd.grad((whole.full_tensor() * weights).sum(), parts)[0]
    pending = [getattr(placement, "reduce_op", "") for placement in x.placements]
    kept = [
        Replicate() if op in ("sum", "product") else torch.distributed.tensor.Partial() if op else placement
        for op, placement in zip(pending, x.placements, strict=True)
    ]
    return [DTensor.from_local(gradient, mesh, kept, **given)]


def inferred(path: str, given: list[Any], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return what a function makes in inference mode of ``x``, a tensor that was made outside of it."""
    function: Any = torch
    for part in path.split(".")[1:]:
        function = getattr(function, part)
    held = x.detach()
    with torch.inference_mode():
        found = function(held, *given)
    return [one.clone() for one in ([found] if isinstance(found, torch.Tensor) else found)]


def copied(path: str, given: list[Any], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return twice the deep copies of what a function makes of ``x``, such as a view of some of its elements."""
    from copy import deepcopy

    function: Any = torch
    for part in path.split(".")[1:]:
        function = getattr(function, part)
    found = function(x.detach(), *given)
    return [deepcopy(one) * 2 for one in ([found] if isinstance(found, torch.Tensor) else found)]


def reordered(order: list[int], placements: list[Any], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return twice ``x`` and two of its reductions, computed on a mesh whose ranks stand in another order."""
    if not isinstance(x, DTensor):
        return [x.detach() * 2, x.detach().sum(0), x.detach().cumsum(0)]
    mesh: Any = x.device_mesh
    others: Any = vars(mesh).setdefault("reordered", {})  # kept with the mesh, because groups stay for ever
    if tuple(order) not in others:
        ranks = mesh.mesh.flatten()[torch.tensor(order)].view(mesh.mesh.shape)
        others[tuple(order)] = torch.distributed.device_mesh.DeviceMesh(mesh.device_type, ranks)
    held: Any = x.detach()
    whole = held.full_tensor()
    moved = torch.distributed.tensor.distribute_tensor(whole, others[tuple(order)], placements, src_data_rank=None)
    found: list[Any] = [moved * 2, moved.sum(0), moved.cumsum(0)]
    found = [one.full_tensor().contiguous() for one in found]
    return [DTensor.from_local(one, mesh, [Replicate()] * mesh.ndim, run_check=False) for one in found]


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


def implicitly(before: str, path: str, turned: bool, /, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Return what a function makes of ``x`` and of the plain tensor ``y`` under ``implicit_replication``.

    Parameters
    ----------
    before
        ``nested`` for another block inside, which has ended; ``raised`` for one that an error has ended.
    turned
        Whether the plain tensor comes first.

    Raises
    ------
    AssertionError
        If the function is refused after the inner block, and in a block of its own it is not.
    """
    from contextlib import nullcontext

    from torch.distributed.tensor.experimental import implicit_replication

    function: Any = torch
    for part in path.split(".")[1:]:
        function = getattr(function, part)
    plain = y.full_tensor() if isinstance(y, DTensor) else y
    pair = [x.detach(), plain.detach()][:: -1 if turned else 1]
    block = implicit_replication if isinstance(x, DTensor) else nullcontext
    with block():
        alone = function(*pair)
    with block():
        if before == "nested":
            with block():
                pass
        elif before == "raised":
            try:
                with block():
                    raise ArithmeticError
            except ArithmeticError:
                pass
        try:
            return [alone, function(*pair)]
        except RuntimeError as error:
            raise AssertionError("implicit_replication has ended before its block") from error


def over_two_meshes(kind: str, options: dict[str, Any], /, **tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return parameters and gradients after a step, where the last parameter is on a submesh, as experts' weights are.

    Parameters
    ----------
    kind
        Of the optimiser of ``torch.optim`` that makes the step; or ``clip_grad_norm_``, whose norm comes first.
    tensors
        ``p0``, ``p1`` … are parameters, and ``g0``, ``g1`` … are their gradients.
    """
    names = [name for name in tensors if name.startswith("p")]
    mesh: Any = next((one.device_mesh for one in tensors.values() if isinstance(one, DTensor)), None)

    def placed(name: str) -> Any:
        held: Any = tensors[name].detach().clone()
        if name[1:] != names[-1][1:] or not isinstance(held, DTensor) or not held.ndim:
            return held
        from torch.distributed.tensor import Shard, distribute_tensor

        rest = named(mesh)["abc"[mesh.ndim - 1]]
        return distribute_tensor(held.full_tensor(), rest, [Shard(0)], src_data_rank=None)

    parameters = [placed(name).requires_grad_() for name in names]
    for name, parameter in zip(names, parameters, strict=True):
        parameter.grad = placed(f"g{name[1:]}")
    found: list[Any] = []
    if kind == "clip_grad_norm_":
        found.append(torch.nn.utils.clip_grad_norm_(parameters, **options))
    else:
        getattr(torch.optim, kind)(parameters, **options).step()
    found += [*(one.detach() for one in parameters), *(one.grad for one in parameters)]
    if mesh is None:
        return found
    wholes = [one.full_tensor() if isinstance(one, DTensor) else one for one in found]
    return [DTensor.from_local(one.contiguous(), mesh, [Replicate()] * mesh.ndim, run_check=False) for one in wholes]


def prepared(kind: str, options: dict[str, Any], count: int, /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return twice each result of a module whose results ``PrepareModuleOutput`` has placed.

    Parameters
    ----------
    kind
        ``a tensor`` or ``a tuple``: what the module returns.
    options
        Keywords of ``PrepareModuleOutput``.
    count
        The number of results. The module gets a DTensor, placed on the last mesh dim as the layouts say.
    """

    class Multiplied(torch.nn.Module):
        def forward(self, value: torch.Tensor) -> Any:
            results = tuple(value * (2 + number) for number in range(count))
            return results if kind == "a tuple" else results[0]

    module: Any = Multiplied()
    given: Any = x.detach()
    if isinstance(x, DTensor):
        from torch.distributed.tensor import distribute_tensor, parallel

        mesh = named(x.device_mesh)["abc"[x.device_mesh.ndim - 1]]
        module = parallel.parallelize_module(module, mesh, parallel.PrepareModuleOutput(**options))
        given = distribute_tensor(given.full_tensor(), mesh, options["output_layouts"][:1])
    results = module(given)
    found = [results[number] * 2 for number in range(count)] if kind == "a tuple" else [results * 2]
    if not isinstance(x, DTensor):
        return found
    wholes = [one.full_tensor() if isinstance(one, DTensor) else one for one in found]
    everywhere = [Replicate()] * x.device_mesh.ndim
    return [DTensor.from_local(one.contiguous(), x.device_mesh, everywhere, run_check=False) for one in wholes]


def styled(model: str, styles: dict[str, list[Any]], sizes: list[int], /, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the result of a small model under parallel styles, gradients of its weights, and who wants one.

    Parameters
    ----------
    model
        ``perceptron``, ``frozen``, ``normed``, ``nested``, ``padded``, ``tied``, ``parametrized`` or ``adapted``, where
        a layer has another beside it.
    styles
        For each module the name of a style and its options.
    """
    from torch.distributed.tensor import parallel

    nn = torch.nn

    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    class Adapted(nn.Linear):
        def __init__(self, columns: int, rows: int) -> None:
            super().__init__(columns, rows)
            self.beside = nn.Linear(columns, rows)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = super().forward(value) + self.beside(value)
            return found

    columns, hidden = sizes
    layers: list[Any]
    if model in ("padded", "tied"):
        padding = 1 if model == "padded" else None
        layers = [nn.Embedding(hidden, columns, padding_idx=padding), nn.Linear(columns, hidden, bias=False)]
        layers[1].weight = layers[0].weight if model == "tied" else layers[1].weight
    elif model in ("normed", "nested"):
        norm = nn.LayerNorm(columns)
        layers = [nn.Sequential(norm) if model == "nested" else norm, nn.Linear(columns, hidden)]
    else:
        kind: Any = Adapted if model == "adapted" else nn.Linear
        layers = [kind(columns, hidden), kind(hidden, columns)]
    for layer in layers if model == "parametrized" else ():
        nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    network: Any = nn.Sequential(*layers).to(x.dtype if x.is_floating_point() else torch.float64)
    with torch.no_grad():
        for number, parameter in enumerate(network.parameters()):
            parameter.copy_((torch.arange(parameter.numel()) * 7 + number).remainder(5).sub(2).view(parameter.shape))
    if model in ("frozen", "normed"):
        next(network.parameters()).requires_grad_(False)
    given: Any = x.detach()
    if isinstance(x, DTensor):
        mesh = named(x.device_mesh)["abc"[x.device_mesh.ndim - 1]]
        plan = {name: getattr(parallel, style)(**options) for name, (style, options) in styles.items()}
        network = parallel.parallelize_module(network, mesh, plan)
        pending = any(placement.is_partial() for placement in x.placements)
        kept = [Replicate()] if pending or x.device_mesh.ndim > 1 else x.placements
        given = torch.distributed.tensor.distribute_tensor(given.full_tensor(), mesh, kept)
    result = network(given)
    (result * result.detach()).sum().backward()
    wanted = [float(parameter.requires_grad) for parameter in network.parameters()]
    flags = torch.tensor(wanted + [0.0] * (4 - len(wanted)), dtype=torch.float64) + 1
    weights = [one for name, one in network.named_parameters(remove_duplicate=False) if name.endswith("weight")]
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in weights]
    found: list[Any] = [result.detach(), *gradients, flags]
    if not isinstance(x, DTensor):
        return found
    wholes = [one.full_tensor().detach() if isinstance(one, DTensor) else one for one in found]
    everywhere = [Replicate()] * x.device_mesh.ndim
    return [DTensor.from_local(one.contiguous(), x.device_mesh, everywhere, run_check=False) for one in wholes]


for _program in (
    beside_numbers,
    copied,
    distributed,
    drawn,
    exchanged,
    implicitly,
    inferred,
    initialised,
    made,
    on_submeshes,
    over_two_meshes,
    prepared,
    reordered,
    styled,
    taken,
    unwrapped,
    written_to_plain,
):
    declares(f"{__name__}.{_program.__name__}")
