"""The single calls of the programs around an overload, to find which call causes a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.opinfo.calls.call import Call, parameters
from verifier.core.arguments import tensor_arguments
from verifier.core.case import OpCase, Trial
from verifier.core.ops import resolve
from verifier.oracle.reference import make_reference
from verifier.placements.alphabet import Alphabet
from verifier.programs import SimplerCall
from verifier.torch_internals.names import OpOverload, pytree
from verifier.torch_internals.placements import Combination, Placements

__all__ = ["PLAINER"]

Known = Mapping[int, Placements]


def _plain_case(program: OpCase, op: str, values: Mapping[str, object]) -> OpCase | None:
    """Return the call of the overload ``op`` with arguments by name; None if one is missing."""
    overload = resolve(f"torch.ops.{op}")
    assert isinstance(overload, OpOverload), f"{op} is no overload"
    call = Call.of(overload, values)
    if call is None:
        return None
    return OpCase(op, f"torch.ops.{op}", call.args, call.kwargs, program.family, program.exact)


def _simpler(
    program: Trial, case: OpCase | None, known: Mapping[int, Placements], outputs: tuple[int, ...] = ()
) -> Iterator[SimplerCall]:
    """Yield ``case`` with the placements of ``known`` (by identity of tensors), or else of the program.

    A tensor without known placements is replicated.
    """
    if case is None:
        return
    given = {
        id(tensor): placements
        for tensor, placements in zip(_tensors(program.case), program.combination, strict=True)
    } | dict(known)  # fmt: skip
    everywhere: Placements = (Replicate(),) * program.mesh.ndim
    combination: Combination = tuple(given.get(id(tensor), everywhere) for tensor in _tensors(case))
    for tensor, placements in zip(_tensors(case), combination, strict=True):
        if not Alphabet.legal(placements) or not all(Alphabet.admits(p, tensor.ndim, tensor.dtype) for p in placements):
            return
    yield SimplerCall(case, combination, outputs)


def _tensors(case: OpCase) -> list[torch.Tensor]:
    return tensor_arguments(case.args, case.kwargs)


def _count(case: OpCase | None) -> int:
    return 0 if case is None else len(make_reference(case).outputs)


def _one_for_two(trial: Trial, placed: Known) -> Iterator[SimplerCall]:
    case = trial.case
    op, given, also = map(str, case.args)
    # equal values in another tensor, to test the same arguments without one tensor passed twice
    copies: Any = pytree.tree_map_only(torch.Tensor, _copy, case.kwargs[given])
    values = {**case.kwargs, also: copies}
    if given == also:
        values[also] = [*case.kwargs[given], *copies]  # type: ignore[misc]
    places = _placements_of(trial, case.kwargs[given])
    known = dict(zip(map(id, pytree.tree_leaves(copies)), places, strict=True))
    yield from _simpler(trial, _plain_case(case, op, values), known)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _placements_of(trial: Trial, tree: object) -> list[Placements]:
    by_id = dict(zip(map(id, _tensors(trial.case)), trial.combination, strict=True))
    return [by_id[id(leaf)] for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _consumed(trial: Trial, placed: Known) -> Iterator[SimplerCall]:
    case = trial.case
    op: Any
    consumers: Any
    op, consumers = case.args
    values = {name: value for name, value in case.kwargs.items() if name != "fresh"}
    plain = _plain_case(case, op, values)
    count = _count(plain)
    yield from _simpler(trial, plain, {}, tuple(range(count)))
    results = [tensor.detach() for tensor in make_reference(case).outputs]
    last = 0
    for number, (name, *given) in enumerate(consumers, count):
        made = {"result": _copy(results[0]), "last": _copy(results[last]), "fresh": case.kwargs.get("fresh")}
        known = {
            id(made[key]): placed[place] for key, place in (("result", 0), ("last", last)) if place in placed
        }  # fmt: skip
        if any(tensor.requires_grad for tensor in _tensors(case)):
            for key in ("result", "last"):
                value = made[key]
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    value.requires_grad_()
        args = pytree.tree_map_only(str, lambda text, made=made: made[text], tuple(given))  # type: ignore[misc]
        consumer = OpCase(name, f"torch.ops.{name}", args, {}, case.family, case.exact)
        yield from _simpler(trial, consumer, known, (number,))
        last = number


def _produced(trial: Trial, placed: Known) -> Iterator[SimplerCall]:
    case = trial.case
    op: Any
    name: Any
    producer: Any
    op, name, producer = case.args
    before: Any = case.kwargs[name]
    alone = OpCase(producer[0], f"torch.ops.{producer[0]}", (before, *producer[1:]), {}, case.family, case.exact)
    value = make_reference(alone).outputs[0].detach().clone().requires_grad_(before.requires_grad)
    plain = _plain_case(case, op, {**case.kwargs, name: value})
    count = _count(plain)
    (given,) = _placements_of(trial, before)
    pending = placed.get(0) or tuple(_after(producer, placement, before.ndim) for placement in given)
    yield from _simpler(trial, plain, {id(value): pending}, tuple(range(1, 1 + count)))
    yield from _simpler(trial, alone, {}, (0,))


def _after(producer: list[Any], placement: Placement, ndim: int) -> Placement:
    """Return the placement of the result of a producer (see :mod:`strategies.opinfo.composing`)."""
    name = producer[0]
    if name.startswith(("aten.sum.", "aten.amax.", "aten.mean.")):
        kind = {"sum": "sum", "amax": "max", "mean": "avg"}[name.split(".")[1]]
        if isinstance(placement, Shard):
            return Shard(placement.dim - 1) if placement.dim else Partial(kind)
        return placement if placement == Partial(kind) else Replicate()
    if name.startswith("aten.transpose.") and isinstance(placement, Shard):
        ends = {0: ndim - 1, ndim - 1: 0}
        return Shard(ends.get(placement.dim, placement.dim))
    return placement


def _called_twice(trial: Trial, placed: Known) -> Iterator[SimplerCall]:
    case = trial.case
    op: Any
    others: Any
    op, others, *_ = case.args
    first = _plain_case(case, op, case.kwargs)
    second = _plain_case(case, op, {**case.kwargs, **dict(others)})
    count = _count(first)
    yield from _simpler(trial, first, {}, tuple(range(count)))
    yield from _simpler(trial, second, {}, tuple(range(count, count + _count(second))))


def _called_both_ways(trial: Trial, placed: Known) -> Iterator[SimplerCall]:
    case = trial.case
    op: Any
    name: Any
    also: Any
    op, name, also = case.args
    given: Any = case.kwargs
    changed = {name: given.get(also), also: given.get(name)}
    if name == also:
        listed = given[name]
        changed = {name: [*reversed(listed)] if any(item is None for item in listed) else [None, *listed]}
    first, second = (_plain_case(case, op, {**given, **other}) for other in ({}, changed))
    count = _count(first)
    yield from _simpler(trial, first, {}, tuple(range(count)))
    yield from _simpler(trial, second, {}, tuple(range(count, count + _count(second))))


def _after_exception(trial: Trial, placed: Known) -> Iterator[SimplerCall]:
    case = trial.case
    op: Any = case.args[0]
    values = {name: value for name, value in case.kwargs.items() if name != "unfit"}
    plain = _plain_case(case, op, values)
    count = _count(plain)
    between: Any = case.args[2]
    for first in (0, count) if between else (0,):  # the cotangent of either call may show the defect
        yield from _simpler(trial, plain, {}, tuple(range(first, first + count)))


def _inferred(trial: Trial, placed: Known) -> Iterator[SimplerCall]:
    case = trial.case
    op: Any = case.args[0]
    plain = _plain_case(case, op, case.kwargs)
    yield from _simpler(trial, plain, {}, tuple(range(_count(plain))))


def _written_copy(trial: Trial, placed: Known) -> Iterator[SimplerCall]:
    case = trial.case
    op: Any = case.args[0]
    values: Any = pytree.tree_map_only(torch.Tensor, _detached, dict(case.kwargs))  # so that it can be written to
    known = dict(zip(map(id, tensor_arguments((), values)), trial.combination, strict=True))
    plain = _plain_case(case, op, values)
    yield from _simpler(trial, plain, known, tuple(range(_count(plain))))
    # the out-of-place overload has the same gradient, and often the same defect
    if (overload := _without_writing(op)) is not None:
        unwritten = _plain_case(case, overload, case.kwargs)
        yield from _simpler(trial, unwritten, {}, tuple(range(_count(unwritten))))


def _without_writing(op: str) -> str | None:
    """Return the out-of-place overload of the in-place ``op`` with the same parameters, or None."""
    written = resolve(f"torch.ops.{op}")
    assert isinstance(written, OpOverload)
    wanted = [(parameter.name, parameter.type) for parameter in parameters(written)]
    namespace, base, _ = op.split(".")
    packet = getattr(getattr(torch.ops, namespace), base.removesuffix("_"), None)
    for name in packet.overloads() if packet is not None else ():
        other = getattr(packet, name)
        taken = parameters(other)
        if [(p.name, p.type) for p in taken] == wanted and not any(p.written for p in taken):
            return str(other)
    return None


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _written_view(trial: Trial, placed: Known) -> Iterator[SimplerCall]:
    case = trial.case
    op: Any = case.args[0]
    plain = _plain_case(case, op, case.kwargs)
    yield from _simpler(trial, plain, {}, tuple(range(1, 1 + _count(plain))))
    for number, view in enumerate(make_reference(replace(case, args=(*case.args[:2], 1))).outputs[1:], 1):
        write = OpCase(
            "aten.mul_.Scalar", "torch.ops.aten.mul_.Scalar", (_copy(view), case.args[2]), {}, case.family, case.exact
        )
        if number in placed:
            yield from _simpler(trial, write, {id(write.args[0]): placed[number]}, (number,))


PLAINER: dict[str, Callable[[Trial, Known], Iterator[SimplerCall]]] = {
    "after_exception": _after_exception,
    "called_both_ways": _called_both_ways,
    "called_twice": _called_twice,
    "consumed": _consumed,
    "inferred": _inferred,
    "one_for_two": _one_for_two,
    "produced": _produced,
    "written_copy": _written_copy,
    "written_view": _written_view,
}
"""The single calls of each program, by its name; see :func:`verifier.programs.simplifies`."""
