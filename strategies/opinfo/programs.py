"""Programs around one aten overload, where what outlives a single call would show.

Each needs torch alone, so that its source can stand in a reproduction. ``op`` is the overload under test, as
``aten.mul.Tensor``; its arguments come by the names in its schema, so that a table of placements has those. A program
returns every tensor that it makes on its way, in a flat list: the first wrong one says where it went wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from strategies.opinfo.simpler_programs import PLAINER
from verifier.core.case import OpCase
from verifier.planning.boundary import declares
from verifier.programs import simplifies

__all__ = [
    "after_exception",
    "called_twice",
    "consumed",
    "one_for_two",
    "produced",
    "sampled",
    "written_copy",
    "written_view",
]


def one_for_two(op: str, given: str, also: str, /, **arguments: Any) -> list[torch.Tensor]:
    """Return what ``op`` makes of one tensor in two places: the argument ``given`` is passed as ``also`` as well.

    Where both are the same argument, it is a list, and comes twice as long.
    """
    call: Any = torch.ops
    for part in op.split("."):
        call = getattr(call, part)
    both = arguments[given] * 2 if given == also else arguments[given]
    result = call(**{**arguments, also: both})
    return [t for t in (result if isinstance(result, list | tuple) else [result]) if isinstance(t, torch.Tensor)]


def consumed(op: str, consumers: list[list[Any]], /, fresh: Any = None, **arguments: Any) -> list[torch.Tensor]:
    """Return what ``op`` makes, and what each of ``consumers`` makes of its first tensor.

    A consumer is ``[overload, argument, ...]``. Among its arguments ``"result"`` stands for the first tensor of ``op``,
    ``"last"`` for what the consumer before has made, ``"fresh"`` for another tensor of that shape.
    """
    call: Any = torch.ops
    for part in op.split("."):
        call = getattr(call, part)
    made = call(**arguments)
    made = [t for t in (made if isinstance(made, list | tuple) else [made]) if isinstance(t, torch.Tensor)]
    values = {"result": made[0], "last": made[0], "fresh": fresh}
    for name, *given in consumers:
        consumer: Any = torch.ops
        for part in name.split("."):
            consumer = getattr(consumer, part)
        given = [
            [values[item] if isinstance(item, str) else item for item in one]
            if isinstance(one, list)
            else values[one]
            if isinstance(one, str)
            else one
            for one in given
        ]
        values["last"] = consumer(*given)
        made.append(values["last"])
    return made


def produced(op: str, name: str, producer: list[Any], /, **arguments: Any) -> list[torch.Tensor]:
    """Return what ``op`` makes where another op has made its argument ``name``, and may have left it pending.

    The producer is ``[overload, argument, ...]`` and makes it out of what is given under that name.
    """
    before: Any = torch.ops
    for part in producer[0].split("."):
        before = getattr(before, part)
    call: Any = torch.ops
    for part in op.split("."):
        call = getattr(call, part)
    value = before(arguments[name], *producer[1:])
    result = call(**{**arguments, name: value})
    return [
        value,
        *(t for t in (result if isinstance(result, list | tuple) else [result]) if isinstance(t, torch.Tensor)),
    ]


def called_twice(op: str, others: list[list[Any]], /, **arguments: Any) -> list[torch.Tensor]:
    """Return what ``op`` makes, and what it makes of the same tensors where ``others``, ``[name, value]``, differ."""
    call: Any = torch.ops
    for part in op.split("."):
        call = getattr(call, part)
    made: list[torch.Tensor] = []
    for changed in ({}, dict(others)):
        result = call(**{**arguments, **changed})
        made += [t for t in (result if isinstance(result, list | tuple) else [result]) if isinstance(t, torch.Tensor)]
    return made


def after_exception(op: str, name: str, between: bool, /, unfit: Any, **arguments: Any) -> list[torch.Tensor]:
    """Return what ``op`` makes after it has refused ``unfit`` as its argument ``name``; if ``between``, also before."""
    call: Any = torch.ops
    for part in op.split("."):
        call = getattr(call, part)
    made: list[torch.Tensor] = []
    for turn in range(2):
        if turn or between:
            result = call(**arguments)
            made += [
                t for t in (result if isinstance(result, list | tuple) else [result]) if isinstance(t, torch.Tensor)
            ]
        if not turn:
            try:
                call(**{**arguments, name: unfit})
            except Exception:  # noqa: BLE001 - whatever it raises, the next call must not know of it
                continue
    return made


def written_view(op: str, name: str, factor: int, /, **arguments: Any) -> list[torch.Tensor]:
    """Return a copy of the argument ``name`` and the views that ``op`` makes of it, after each has been multiplied."""
    call: Any = torch.ops
    for part in op.split("."):
        call = getattr(call, part)
    base = arguments[name].clone()
    result = call(**{**arguments, name: base})
    views = [t for t in (result if isinstance(result, list | tuple) else [result]) if isinstance(t, torch.Tensor)]
    for view in views:
        view.mul_(factor)
    return [base, *views]


def written_copy(op: str, names: list[str], /, **arguments: Any) -> list[torch.Tensor]:
    """Return what ``op`` makes where it writes to copies of the arguments ``names``, and the copies.

    What a gradient is wanted of cannot be written to, its copy can.
    """
    call: Any = torch.ops
    for part in op.split("."):
        call = getattr(call, part)
    copies: dict[str, Any] = {
        name: [t.clone() for t in arguments[name]]
        if isinstance(arguments[name], list | tuple)
        else arguments[name].clone()
        for name in names
    }
    result = call(**{**arguments, **copies})
    made = [t for t in (result if isinstance(result, list | tuple) else [result]) if isinstance(t, torch.Tensor)]
    written = [t for copy in copies.values() for t in (copy if isinstance(copy, list) else [copy])]
    return [*made, *(t for t in written if not any(t is other for other in made))]


def sampled(op: str, options: list[Any], promise: list[Any], seed: int, /, input: torch.Tensor) -> list[torch.Tensor]:
    """Return ``input`` four times, each doubled where random numbers are not what ``op`` promises.

    In the order of the results: replicas hold the same numbers; all are in the range, for dropout the result is the
    input where the mask has it, scaled, and so is a gradient, which is 0 for other ops; their mean is as promised;
    and so is their variance. Both are so within six standard errors, the variance of what has rare large numbers within
    twelve.

    Parameters
    ----------
    promise
        ``[low, high, mean, deviation, kurtosis]``; ``"input"`` for the mean is that of each element by itself.
    seed
        Every rank seeds its generator with the same numbers, as DTensor asks.
    """
    call: Any = torch.ops
    for part in op.split("."):
        call = getattr(call, part)
    low, high, mean, deviation, kurtosis = promise
    rounds = -(-4608 // input.numel())
    drawn: list[Any] = []
    kept: list[Any] = []
    gradients: list[Any] = []
    with torch.random.fork_rng(devices=[]):
        for turn in range(rounds):
            torch.manual_seed(seed + turn)
            target = {"out": torch.zeros_like(input)} if op.endswith("out") else {}
            with torch.set_grad_enabled(not target and turn < 2):
                leaf = input.detach().requires_grad_()
                result = call(leaf.clone(), *options, **target)
                made = result if isinstance(result, list | tuple) else [result]
                if made[0].requires_grad and "NotImplemented" not in made[0].grad_fn.name():
                    gradients += torch.autograd.grad(made[0], leaf, 3 * torch.ones_like(made[0]))
            drawn.append(made[-1].detach())
            if len(made) > 1:
                kept.append(made[0].detach())
    differ, shards, source = False, 1, input
    wholes: list[Any] = []
    for made in (drawn, kept, gradients):
        if not made or not isinstance(made[0], DTensor):
            wholes.append(torch.stack(made).double() if made else None)
            continue
        # one tensor of all rounds, put together from what each rank holds, so that it is gathered once
        mesh = made[0].device_mesh
        placements = [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in made[0].placements]
        local = torch.stack([one.to_local() for one in made])
        shape = torch.Size([len(made), *made[0].shape])
        stride = torch.empty(shape, device="meta").stride()
        stacked = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
        for mesh_dim, placement in enumerate(placements):
            if placement == Replicate():  # each rank gives some rounds: what comes back is a mixture of the replicas
                cut = [Shard(0) if other == mesh_dim else p for other, p in enumerate(placements)]
                mixture = stacked.redistribute(placements=cut).redistribute(placements=placements)
                differ |= not torch.equal(mixture.to_local(), local)
            elif made is drawn:
                shards *= mesh.size(mesh_dim)
        wholes.append(stacked.full_tensor().double())
        source = input.full_tensor() if isinstance(input, DTensor) else input
    numbers, results, slopes = wholes
    outside = not bool(((numbers >= low) & (numbers <= high)).all())
    if results is not None:
        outside |= not torch.allclose(results, source.double() * numbers / mean)
    if slopes is not None:
        expected = torch.zeros_like(slopes) if results is None else 3 * numbers[: len(slopes)] / mean
        outside |= not torch.allclose(slopes, expected)
    scaled = (numbers - (source.double() if mean == "input" else mean)) / deviation
    # the shards may hold the same numbers, which are as good as one of them; rare large ones sway the variance
    count, errors = numbers.numel() / shards, 6 if kurtosis < 4 else 12
    off = bool(scaled.mean().abs() > 6 * count**-0.5)
    spread = bool((scaled.square().mean() - 1).abs() > errors * ((kurtosis - 1) / count) ** 0.5)
    return [input * (1 + fault) for fault in (differ, outside, off, spread)]


def _calls(case: OpCase) -> list[str]:
    """Return the overloads that the arguments of a program name, as dotted paths."""
    arguments: Any = case.args
    names = [arguments[0]]
    if case.call == f"{__name__}.consumed":
        names += [name for name, *_ in arguments[1]]
    if case.call == f"{__name__}.produced":
        names.append(arguments[2][0])
    return [f"torch.ops.{name}" for name in names]


for _program in (one_for_two, consumed, produced, called_twice, after_exception, written_copy, written_view):
    simplifies(f"{__name__}.{_program.__name__}", PLAINER[_program.__name__])
    declares(f"{__name__}.{_program.__name__}", _calls)
declares(f"{__name__}.sampled", _calls)
