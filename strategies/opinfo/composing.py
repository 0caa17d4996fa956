"""Turns a call of an overload into a program around it, with drawn arguments that torch accepts.

The results of a program are finite, not all equal, and not so close to a discontinuity that rounding decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import torch

from strategies.opinfo.calls.call import Call, Parameter, attempt, parameters, quiet
from strategies.opinfo.samples.argument_spellings import with_value
from strategies.opinfo.samples.informative import is_finite, is_inexact, is_telling
from strategies.opinfo.second_calls import (
    SECOND_CALL,
    changes,
    checks_no_sizes,
    exchanged,
    holds_tensor,
    other_arguments,
)
from verifier.core.case import MeshSpec, OpCase
from verifier.core.ops import resolve
from verifier.programs import joins
from verifier.torch_internals.names import OpOverload, pytree
from verifier.torch_internals.ops import is_composite

__all__ = ["COMPOSITIONS", "INFERENCE", "SECOND_CALL", "WRITTEN_COPY", "WRITTEN_VIEW", "composed", "in_a_row"]

_PROGRAMS = "strategies.opinfo.programs."
INFERENCE = "inference mode"
WRITTEN_COPY = "write to a copy"
WRITTEN_VIEW = "write to a view"
_CLEAR = 1e-3
"""Fraction of the largest magnitude: rounding may change the sign or the order of values that are closer than this."""

_Program = tuple[str, tuple[object, ...], dict[str, object]]
"""The name of a program, and its arguments."""
_Compose = Callable[[Call, MeshSpec, Random], _Program | None]


def composed(case: OpCase, kind: str, mesh: MeshSpec, seed: int) -> OpCase | None:
    """Return a program of ``kind``, one of :data:`COMPOSITIONS`, around a plain call; None if there is none.

    Parameters
    ----------
    case
        The plain call; its arguments require no gradient.
    seed
        Chooses among the programs of this kind.
    """
    op = resolve(case.call)
    assert isinstance(op, OpOverload), f"{case.call} is no plain call"
    call = Call(op, case.args, case.kwargs)
    with quiet():
        made = COMPOSITIONS[kind](call, mesh, Random(f"{seed} {kind}"))
        if made is None:
            return None
        name, args, kwargs = made
        program = replace(
            case, call=_PROGRAMS + name, args=args, kwargs=kwargs, exact=False, tags=case.tags | {kind}
        )  # fmt: skip
        return program if is_telling(program, constant=kind == WRITTEN_COPY) else None


def _written(call: Call) -> list[Parameter]:
    return [parameter for parameter in parameters(call.op) if parameter.written]


def _tensor_parameters(call: Call) -> list[str]:
    return [p.name for p in parameters(call.op) if not p.out and isinstance(call.values.get(p.name), torch.Tensor)]


# ---------------------------------------------------------------------------------------------------- one tensor twice
def _one_for_two(call: Call, mesh: MeshSpec, rng: Random) -> _Program | None:
    written = _written(call)
    # only pointwise ops have a defined result if they write to memory that they read
    if written and (torch.Tag.pointwise not in call.op.tags or any(p.out for p in written)):
        return None
    values = call.values
    kinds = {name: _kind_of(value) for name, value in values.items()}
    pairs = [
        (given, also)
        for place, given in enumerate(values)
        for also in list(values)[place + 1 :]
        if kinds[given] is not None and kinds[given] == kinds[also]
    ]
    pairs += [(n, n) for n, value in values.items() if isinstance(value, list | tuple) and len(kinds[n] or ()) > 1]
    for given, also in rng.sample(pairs, len(pairs)):
        rest = {name: value for name, value in values.items() if name != also}
        if given == also:
            listed: Any = values[given]
            rest[given] = list(listed[: len(listed) // 2])
        program = (str(call.op), given, also), rest
        both = listed[: len(listed) // 2] * 2 if given == also else values[given]
        changed = with_value(call, also, both)
        if changed is not None and attempt(changed) is not None:
            return "one_for_two", *program
    return None


def _kind_of(value: object) -> tuple[object, ...] | None:
    """Return shapes and dtypes of a tensor or of a list of tensors; None for anything else."""
    if isinstance(value, torch.Tensor):
        return (None, (value.shape, value.dtype))
    if isinstance(value, list | tuple) and value and all(isinstance(item, torch.Tensor) for item in value):
        return tuple((item.shape, item.dtype) for item in value)
    return None


# --------------------------------------------------------------------------------------------- what the result goes to
def _consumed(call: Call, mesh: MeshSpec, rng: Random) -> _Program | None:
    made = None if _written(call) else attempt(call)
    if not made or not made[0].numel() or not is_finite(made[0]):
        return None
    result = made[0]
    fresh = _fresh(result, rng)
    consumers: list[list[object]] = []
    values = {"result": result, "last": result, "fresh": fresh}
    for _ in range(rng.choice((1, 2, 2))):
        on = rng.choice(("result", "last"))
        for consumer in rng.sample(offered := list(_consumers(values[on], on, rng)), len(offered)):
            outcome = _consume(consumer, values)
            if outcome is not None and consumer not in consumers and _has_no_cancellation(outcome, values[on]):
                consumers.append(consumer)
                values["last"] = outcome
                break
    if not consumers:
        return None
    kwargs = dict(call.values)
    if any("fresh" in consumer for consumer in consumers):
        kwargs["fresh"] = fresh
    return "consumed", (str(call.op), consumers), kwargs


def _fresh(like: torch.Tensor, rng: Random) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.getrandbits(31))
    magnitude = torch.randint(1, 4, like.shape, generator=generator)
    if like.dtype == torch.bool:
        return magnitude > 2
    if like.is_floating_point() or like.is_complex():
        magnitude = magnitude * (torch.randint(0, 2, like.shape, generator=generator) * 2 - 1)
    return magnitude.to(like.dtype)


def _consumers(value: torch.Tensor, on: str, rng: Random) -> Iterator[list[object]]:
    """Yield ops that take ``value`` and whose results do not depend on rounding."""
    floating, number = value.is_floating_point(), value.dtype != torch.bool
    if value.ndim:
        dim = rng.randrange(value.ndim)
        yield ["aten.cat.default", [on, on], dim]
        yield ["aten.sum.dim_IntList", on, [dim]]
        if value.ndim > 1:
            yield ["aten.transpose.int", on, 0, value.ndim - 1]
        if floating:
            yield ["aten.mean.dim", on, [dim]]
        if number and not value.is_complex() and (not floating or _has_no_ties(value)):
            yield ["aten.amax.default", on, [dim]]
    if not number:
        yield ["aten.logical_not.default", on]
        return
    yield ["aten.neg.default", on]
    yield ["aten.add.Tensor", on, on]
    if on == "result":
        yield ["aten.mul.Tensor", on, "fresh"]
    if floating and float(value.abs().min()) > _CLEAR * float(value.abs().max()):
        yield ["aten.relu.default", on]


def _has_no_ties(value: torch.Tensor) -> bool:
    """Return whether no two elements are nearly equal, so that rounding does not change which element is largest."""
    ordered = value.flatten().sort().values
    return len(ordered) < 2 or float(ordered.diff().min()) > _CLEAR * float(value.abs().max())


def _consume(consumer: list[object], values: dict[str, torch.Tensor]) -> torch.Tensor | None:
    name, *given = consumer
    args: Any = pytree.tree_map_only(str, values.__getitem__, tuple(given))
    op: Any = resolve(f"torch.ops.{name}")
    try:
        outcome: torch.Tensor = op(*args)
    except (RuntimeError, IndexError, TypeError):  # no kernel for the dtype
        return None
    return outcome


def _has_no_cancellation(outcome: torch.Tensor, of: torch.Tensor) -> bool:
    """Return whether the terms did not cancel so far that only rounding errors are left."""
    if not outcome.numel() or not is_inexact(of):
        return bool(outcome.numel())
    return float(outcome.abs().max()) * 8 >= float(of.abs().max())


# --------------------------------------------------------------------------------------------- what an argument is from
def _produced(call: Call, mesh: MeshSpec, rng: Random) -> _Program | None:
    if _written(call):
        return None
    names = [name for name in _tensor_parameters(call) if _can_be_produced(call.values[name])]
    if not names:
        return None
    name = rng.choice(names)
    value: Any = call.values[name]
    producer, before = rng.choice(list(_producers(value, mesh, rng)))
    return "produced", (str(call.op), name, producer), {**call.values, name: before}


def _can_be_produced(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or not value.numel():
        return False
    if value.dtype not in (torch.float64, torch.float32, torch.int64) or not is_finite(value):
        return False
    # the producer adds and subtracts numbers, which must not add a rounding error to the op's own
    return not value.is_floating_point() or bool((8 * value == (8 * value).round()).all())


def _producers(value: torch.Tensor, mesh: MeshSpec, rng: Random) -> Iterator[tuple[list[object], torch.Tensor]]:
    """Yield ops whose result is ``value``, each with its input; most return a Partial if the input is sharded."""
    part = _fresh(value, rng)
    yield ["aten.sum.dim_IntList", [0]], torch.stack([value - part, part])
    yield ["aten.neg.default"], -value
    # a row for each rank, because the op refuses empty shards
    rows = [value - (rank + 1) for rank in range(mesh.world_size - 1)]
    yield ["aten.amax.default", [0]], torch.stack([*rows, value])
    if value.is_floating_point():
        yield ["aten.mean.dim", [0]], torch.stack([value - part, value + part])
    if value.ndim > 1:
        yield ["aten.transpose.int", 0, value.ndim - 1], value.transpose(0, -1).contiguous()


# ------------------------------------------------------------------------------------------------------------ two calls
def _called_twice(call: Call, mesh: MeshSpec, rng: Random) -> _Program | None:
    first = attempt(call)
    if first is None or any(parameter.out for parameter in _written(call)):
        return None
    swaps = [] if checks_no_sizes(call) else [pair for pair in exchanged(call) if attempt(pair[2]) is not None]
    if swaps and rng.random() < 0.5:
        name, also, _ = rng.choice(swaps)
        return "called_both_ways", (str(call.op), name, also), call.values
    found: dict[str, list[tuple[bool, list[list[object]]]]] = {}
    for name, changed in other_arguments(call):
        second = attempt(changed)
        if second is not None and (others := changes(call, changed)):
            found.setdefault(name, []).append((_same(first, second), others))
    if not found:
        return None
    # each argument is as likely as any other, however many values it may have
    offered = found[rng.choice(list(found))]
    different = [others for same, others in offered if not same] or [others for _, others in offered]
    return "called_twice", (str(call.op), rng.choice(different)), call.values


def in_a_row(first: OpCase, second: OpCase) -> OpCase | None:
    """Return the program that calls ``first`` and then ``second``, both with the tensors of ``second``.

    The result is None if the calls do not differ in a number or text, or if they write to ``out`` arguments.
    """
    calls = []
    for case in (first, second):
        op = resolve(case.call)
        if not isinstance(op, OpOverload):
            return None
        calls.append(Call(op, case.args, case.kwargs))
    after = calls[1]
    if any(parameter.out for parameter in _written(after)):
        return None
    defaults = {parameter.name: parameter.default for parameter in parameters(after.op) if parameter.has_default}
    old, new = (
        {name: value for name, value in {**defaults, **call.values}.items() if not holds_tensor(value)}
        for call in calls
    )
    if old.keys() != new.keys():
        return None
    changed = [name for name in new if old[name] != new[name] or type(old[name]) is not type(new[name])]
    if not changed:
        return None
    others = [[name, new[name]] for name in changed]
    values = {**after.values, **{name: old[name] for name in changed}}
    return replace(
        second, call=f"{_PROGRAMS}called_twice", args=(str(after.op), others), kwargs=values, exact=False,
        tags=second.tags | {SECOND_CALL},
    )  # fmt: skip


def _same(these: list[torch.Tensor], those: list[torch.Tensor]) -> bool:
    return len(these) == len(those) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(these, those, strict=True)
    )


# ------------------------------------------------------------------------------------------------------- an exception
def _after_exception(call: Call, mesh: MeshSpec, rng: Random) -> _Program | None:
    # A kernel that does not check sizes would write out of bounds. What does not fit the whole tensor may fit a shard,
    # to which some ranks then write before the others raise.
    if checks_no_sizes(call) or _written(call):
        return None
    offered = list(_unfit(call))
    for name, unfit in rng.sample(offered, len(offered)):
        changed = with_value(call, name, unfit)
        if changed is not None and attempt(changed) is None:
            return "after_exception", (str(call.op), name, rng.random() < 0.5), {**call.values, "unfit": unfit}
    return None


def _unfit(call: Call) -> Iterator[tuple[str, object]]:
    """Yield arguments, by name, that may not fit the others."""
    written = {parameter.name for parameter in _written(call)}
    for name in _tensor_parameters(call):
        value: Any = call.values[name]
        if name not in written:
            for dim in range(value.ndim):
                if value.shape[dim] > 2:
                    yield name, value.narrow(dim, 0, value.shape[dim] - 1).clone()
    for parameter in parameters(call.op):
        if parameter.name.startswith("dim") and type(call.values.get(parameter.name)) is int:
            yield parameter.name, 9


# ----------------------------------------------------------------------------------------------------- inference mode
def _inferred(call: Call, mesh: MeshSpec, rng: Random) -> _Program | None:
    # of other ops DTensor sees the same call in every mode
    if not is_composite(call.op) or _written(call):
        return None
    return "inferred", (str(call.op), rng.random() < 0.75), call.values


# ------------------------------------------------------------------------------------------------- writing to a copy
def _written_copy(call: Call, mesh: MeshSpec, rng: Random) -> _Program | None:
    written = _written(call)
    values = call.values
    names = [p.name for p in written if _kind_of(values.get(p.name)) is not None]
    if any(p.out for p in written) or not any(map(_may_want, pytree.tree_leaves([values[name] for name in names]))):
        return None  # a plain call tests the same
    return "written_copy", (str(call.op), names), values


def _may_want(value: object) -> bool:
    return isinstance(value, torch.Tensor) and is_inexact(value)


# ---------------------------------------------------------------------------------------------------- writing to views
def _written_view(call: Call, mesh: MeshSpec, rng: Random) -> _Program | None:
    # composite ops return a view only if they can
    if is_composite(call.op) or _written(call):
        return None
    names = [a.name for a in call.op._schema.arguments if a.alias_info is not None and not a.alias_info.is_write]
    if len(names) != 1 or not isinstance(base := call.values.get(names[0]), torch.Tensor) or base.dtype == torch.bool:
        return None
    made: Any = call.op(*call.args, **call.kwargs)
    views = [view for view in pytree.tree_leaves(made) if isinstance(view, torch.Tensor) and view.numel()]
    if not views or not all(view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr() for view in views):
        return None
    if any(map(_overlaps, views)):
        return None
    return "written_view", (str(call.op), names[0], 3), call.values


def _overlaps(view: torch.Tensor) -> bool:
    """Return whether elements share memory, as in overlapping windows, where the result of a write is undefined."""
    places = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(view.shape, view.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * stride
    return len(set(places.flatten().tolist())) < view.numel()


COMPOSITIONS: dict[str, _Compose] = {
    "one tensor twice": _one_for_two,
    "result used twice": _consumed,
    "pending argument": _produced,
    SECOND_CALL: _called_twice,
    "after an exception": _after_exception,
    INFERENCE: _inferred,
    WRITTEN_COPY: _written_copy,
    WRITTEN_VIEW: _written_view,
}
"""The kinds of programs, by the tag that their cases have."""

joins("opinfo", in_a_row)
