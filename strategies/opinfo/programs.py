"""Programs around one aten overload, which show state that outlives a single call.

Each imports only torch, so that its source can stand in a reproduction. ``op`` is the overload under test, as
``aten.mul.Tensor``. Its arguments come by the names in its schema, so that placement tables show these names. A program
returns every intermediate tensor in a flat list, so that the first wrong tensor shows which step failed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from strategies.kernels import SCALED_MM, STAND_INS, attention, rms_norm, scaled_mm  # noqa: F401 - kernels of ops here
from strategies.opinfo.simpler_programs import PLAINER
from verifier.core.case import OpCase
from verifier.planning.boundary import declares
from verifier.programs import simplifies, starts_afresh

__all__ = [
    "after_exception",
    "called_both_ways",
    "called_twice",
    "consumed",
    "inferred",
    "one_for_two",
    "produced",
    "sampled",
    "written_copy",
    "written_view",
]


def one_for_two(op: str, given: str, also: str, /, **arguments: Any) -> list[torch.Tensor]:
    """Return the results of ``op`` with the tensor of argument ``given`` passed as ``also``, too.

    If both name the same argument, it is a list, and is passed twice as long.
    """
    call: Any = torch.ops
    for part in op.split("."):
        call = getattr(call, part)
    both = arguments[given] * 2 if given == also else arguments[given]
    result = call(**{**arguments, also: both})
    return [t for t in (result if isinstance(result, list | tuple) else [result]) if isinstance(t, torch.Tensor)]


def consumed(op: str, consumers: list[list[Any]], /, fresh: Any = None, **arguments: Any) -> list[torch.Tensor]:
    """Return the results of ``op``, and the results of each of ``consumers`` on the first tensor of ``op``.

    A consumer is ``[overload, argument, ...]``. Among its arguments ``"result"`` stands for the first tensor of ``op``,
    ``"last"`` for the result of the previous consumer, ``"fresh"`` for another tensor of the same shape.
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
    """Return the results of ``op`` after another op has produced its argument ``name``, perhaps as a Partial.

    The producer is ``[overload, argument, ...]``. Its input is the given argument ``name``.
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


def called_twice(op: str, others: list[list[Any]], cast: Any = None, /, **arguments: Any) -> list[torch.Tensor]:
    """Return the results of ``op``, and its results on the same tensors with ``others``, pairs ``[name, value]``.

    If ``cast`` is a dtype, the results of the second call follow once more, cast to it. DTensor decides how to cast by
    the dtype that it has kept of a tensor.
    """
    call: Any = torch.ops
    for part in op.split("."):
        call = getattr(call, part)
    made: list[torch.Tensor] = []
    for changed in ({}, dict(others)):
        result = call(**{**arguments, **changed})
        second = [t for t in (result if isinstance(result, list | tuple) else [result]) if isinstance(t, torch.Tensor)]
        made += second
    return made if cast is None else made + [tensor.to(cast) for tensor in second]


def called_both_ways(op: str, name: str, also: str, /, **arguments: Any) -> list[torch.Tensor]:
    """Return the results of ``op``, and its results with the arguments ``name`` and ``also`` exchanged.

    If both name one argument, it is a list. The second call has it the other way round, or behind a None if it has no
    None.
    """
    call: Any = torch.ops
    for part in op.split("."):
        call = getattr(call, part)
    first, second = arguments.get(name), arguments.get(also)
    changed: dict[str, Any] = {name: second, also: first}
    if name == also:
        listed: Any = first
        changed = {name: [*reversed(listed)] if any(item is None for item in listed) else [None, *listed]}
    made: list[torch.Tensor] = []
    for other in ({}, changed):
        result = call(**{**arguments, **other})
        made += [t for t in (result if isinstance(result, list | tuple) else [result]) if isinstance(t, torch.Tensor)]
    return made


def after_exception(op: str, name: str, between: bool, /, unfit: Any, **arguments: Any) -> list[torch.Tensor]:
    """Return the results of ``op`` after it has refused ``unfit`` as argument ``name``; if ``between``, also before."""
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


def inferred(op: str, inside: bool, /, **arguments: Any) -> list[torch.Tensor]:
    """Return the results of ``op`` in inference mode, where a composite op reaches DTensor whole.

    Its tensors were made outside of inference mode, or are copied inside if ``inside``.
    """
    call: Any = torch.ops
    for part in op.split("."):
        call = getattr(call, part)
    with torch.inference_mode():
        held = {
            name: [t.clone() if inside and isinstance(t, torch.Tensor) else t for t in value]
            if isinstance(value, list | tuple)
            else value.clone()
            if inside and isinstance(value, torch.Tensor)
            else value
            for name, value in arguments.items()
        }
        result = call(**held)
    made = [t for t in (result if isinstance(result, list | tuple) else [result]) if isinstance(t, torch.Tensor)]
    return [t.clone() for t in made]


def written_view(op: str, name: str, factor: int, /, **arguments: Any) -> list[torch.Tensor]:
    """Return a copy of the argument ``name`` and its views by ``op``, after each of them was multiplied in place."""
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
    """Return the results of ``op`` on copies of the arguments ``names``, which it writes to, and the copies.

    A leaf that requires a gradient cannot be written to; a copy can.
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
    """Return ``input`` four times, one for each promise of ``op``, doubled if the random numbers break the promise.

    1. Replicas hold the same numbers.
    2. All numbers are in the range. For dropout, result and gradient are instead the scaled input under the mask.
       Other ops have a gradient of 0.
    3. The mean is as promised, within six standard errors.
    4. The variance is as promised, within six standard errors, or twelve if large numbers are rare.

    Parameters
    ----------
    promise
        ``[low, high, mean, deviation, kurtosis]``; ``"input"`` as the mean is the mean of each element separately.
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
    pending = isinstance(input, DTensor) and any(p.is_partial() for p in input.placements)
    with torch.random.fork_rng(devices=[]):
        for turn in range(rounds):
            torch.default_generator.manual_seed(seed + turn)  # torch.manual_seed takes a millisecond
            if input.is_cuda:
                torch.cuda.manual_seed(seed + turn)
            target = {"out": torch.zeros_like(input)} if op.endswith("out") else {}
            with torch.set_grad_enabled(not target and not pending and turn < 2):
                leaf = input.detach().requires_grad_()
                given = leaf.clone()
                if pending and isinstance(leaf, DTensor):  # a clone would be reduced
                    local = leaf.to_local().clone()
                    whole: Any = {"shape": leaf.shape, "stride": leaf.stride()}  # of uneven shards nothing tells it
                    given = DTensor.from_local(local, leaf.device_mesh, leaf.placements, run_check=False, **whole)
                result = call(given, *options, **target)
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
        # one tensor of the local tensors of all rounds, so that it is gathered once
        mesh = made[0].device_mesh
        placements = [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in made[0].placements]
        local = torch.stack([one.to_local() for one in made])
        shape = torch.Size([len(made), *made[0].shape])
        stride = torch.empty(shape, device="meta").stride()
        stacked = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
        for mesh_dim, placement in enumerate(placements):
            if placement == Replicate():  # each rank gives some rounds, so the result mixes the replicas
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
    # all shards may hold the same numbers, which then count once; rare large numbers affect the variance
    count, errors = numbers.numel() / shards, 6 if kurtosis < 4 else 12
    off = bool(scaled.mean().abs() > 6 * count**-0.5)
    spread = bool((scaled.square().mean() - 1).abs() > errors * ((kurtosis - 1) / count) ** 0.5)
    return [input * (1 + fault) for fault in (differ, outside, off, spread)]


def _calls(case: OpCase) -> list[str]:
    """Return the overloads among the arguments of a program, as dotted paths."""
    arguments: Any = case.args
    names = [arguments[0]]
    if case.call == f"{__name__}.consumed":
        names += [name for name, *_ in arguments[1]]
    if case.call == f"{__name__}.produced":
        names.append(arguments[2][0])
    return [f"torch.ops.{name}" for name in names]


for _program in (
    one_for_two, consumed, produced, called_twice, called_both_ways, after_exception, inferred, written_copy,
    written_view,
):  # fmt: skip
    simplifies(f"{__name__}.{_program.__name__}", PLAINER[_program.__name__])
    declares(f"{__name__}.{_program.__name__}", _calls)
declares(f"{__name__}.sampled", _calls)
for _path in (*STAND_INS.values(), SCALED_MM):
    declares(_path)
for _program in (called_twice, called_both_ways):
    starts_afresh(f"{__name__}.{_program.__name__}")
