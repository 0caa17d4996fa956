"""Programs of redistributions and ops, for plain tensors and for DTensors.

Each imports only torch, so that its source can stand in a reproduction. A target is a list of placements, one per mesh
dim. On a plain tensor a redistribution is the identity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from verifier.core.case import OpCase
from verifier.planning.boundary import declares
from verifier.programs import Move, asks, moves, targets, tell_apart_by
from verifier.torch_internals.placements import Placements
from verifier.torch_internals.redistributing.probes import ASKED, PROGRAM

__all__ = ["CHAIN", "SEQUENCE", "STEPS", "VIEWS", "WRITES", "chain", "operands", "sequence", "spelled"]

CHAIN = "strategies.redistribution.programs.chain"
SEQUENCE = "strategies.redistribution.programs.sequence"

WRITES = ("add_", "mul_", "add_to_slice")
"""Names of the steps that write to their first value."""

VIEWS = ("flatten", "narrow", "reshape", "select", "t", "transpose", "unsqueeze", "view")
STEPS = frozenset({"redistribute", "clone", "neg", "sum", "add", "mm", "mul", "square", "cat", *VIEWS, *WRITES})
"""Names of the steps of sequences. A file cannot make a sequence call other methods of a tensor."""

_OF_TWO = ("add", "mul", "mm", "cat", *WRITES)


def operands(step: list[Any]) -> tuple[int, ...]:
    """Return the positions of the values that ``step`` takes; a float instead of the second position is a number.

    >>> operands(["sum", 2, 0]), operands(["add_", 2, 0]), operands(["add_", 2, 3.0])
    ((2,), (2, 0), (2,))
    """
    name, first, *rest = step
    second = rest[:1] if name in _OF_TWO else []
    return (first, *(position for position in second if not isinstance(position, float)))


def chain(input: torch.Tensor, targets: list[list[Any]]) -> torch.Tensor:
    """Return ``input`` after one redistribution to each of ``targets``, in order."""
    result = input if isinstance(input, DTensor) else input.view_as(input)
    for target in targets:
        if isinstance(result, DTensor):
            result = result.redistribute(placements=target)
    return result


def sequence(first: torch.Tensor, second: torch.Tensor, steps: list[list[Any]]) -> list[torch.Tensor]:
    """Return the values that no later step takes.

    A step is ``[name, position, ...]`` and makes a new value from earlier values. Value 0 is ``first``, value 1 is
    ``second``. ``["redistribute", 0, target]`` redistributes value 0, ``["add", 0, 1]`` adds two values,
    ``["sum", 2, 0]`` reduces a value, ``["cat", 0, 1, 0]`` concatenates two. Other names are methods of a tensor.

    ``["add_", 2, 1]`` and ``["mul_", 2, 3.0]`` write to value 2, which then also has the next number.
    ``["add_to_slice", 2, 3.0, 0, 1, 4]`` adds to 4 rows of value 2, from row 1 on. These steps do not clone: a write to
    value 0 writes to the argument ``first``.
    """
    values, used = [first, second], {0, 1}
    for name, *arguments in steps:
        of_two = name in ("add", "mul", "mm", "cat", "add_", "mul_", "add_to_slice")
        taken = arguments[: 2 if of_two else 1]
        used.update(position for position in taken if not isinstance(position, float))
        found: list[Any] = [one if isinstance(one, float) else values[one] for one in taken]
        value, *others = found
        rest = arguments[len(taken) :]
        if name == "redistribute":
            value = value.redistribute(placements=rest[0]) if isinstance(value, DTensor) else value.view_as(value)
        elif name == "add_to_slice":
            value.narrow(*rest).add_(*others)
        elif name == "cat":
            value = torch.cat([value, *others], *rest)
        else:
            value = getattr(value, name)(*others, *rest)
        values.append(value)
    return [value for position, value in enumerate(values) if position not in used]


def spelled(target: Placements, ndim: int) -> Placements:
    """Return ``target`` as DTensor normalises it, with tensor dims that count from the front."""
    return tuple(Shard(p.dim % ndim) if isinstance(p, Shard) else p for p in target)


def _end_of_chain(case: OpCase) -> tuple[Placements | None, ...]:
    tensor, made = case.args[0], targets(case)
    assert isinstance(tensor, torch.Tensor)
    return (spelled(made[-1], tensor.ndim) if made else None,)


def _moves_of_chain(case: OpCase) -> tuple[Move, ...]:
    tensor, made = case.args[0], targets(case)
    assert isinstance(tensor, torch.Tensor)
    ends = [spelled(target, tensor.ndim) for target in made]
    return tuple(zip((0, *ends), ends, strict=False))


def _ends_of_sequence(case: OpCase) -> tuple[Placements | None, ...]:
    """Return the targets of the results; a value keeps its placements if a later step writes to it."""
    steps: Any = case.args[2]
    made: list[Placements | None] = [None, None]
    used = {0, 1}
    for step in steps:
        used.update(operands(step))
        kept = made[step[1]] if step[0] in WRITES else None
        made.append(tuple(step[2]) if step[0] == "redistribute" else kept)
    return tuple(target for position, target in enumerate(made) if position not in used)


def _moves_of_sequence(case: OpCase) -> tuple[Move, ...]:
    steps: Any = case.args[2]
    sources: list[int | Placements | None] = [0, 1]
    found: list[Move] = []
    for step in steps:
        placed = tuple(step[2]) if step[0] == "redistribute" else None
        source = sources[step[1]]
        if placed is not None and source is not None:
            found.append((source, placed))
        sources.append(placed if placed is not None or step[0] not in WRITES else source)
    return tuple(found)


def _check_steps(case: OpCase) -> tuple[str, ...]:
    steps: Any = case.args[2]
    for name, *_ in steps:
        if name not in STEPS:
            raise ValueError(f"{name!r} is no step of a sequence")
    return ()


def _asked_of_planners(case: OpCase) -> tuple[str, ...]:
    """Return the property that the program asks for, because each is a defect of its own."""
    return (f"asks for {case.kwargs.get('asked')}",)


def _check_asked(case: OpCase) -> tuple[str, ...]:
    if case.kwargs.get("asked") not in ASKED:
        raise ValueError(f"{case.kwargs.get('asked')!r} is no property of planners")
    return ()


declares(PROGRAM, _check_asked)
tell_apart_by(PROGRAM, _asked_of_planners)
asks(PROGRAM, lambda _: (None,))
declares(CHAIN)
declares(SEQUENCE, _check_steps)
asks(CHAIN, _end_of_chain)
asks(SEQUENCE, _ends_of_sequence)
moves(CHAIN, _moves_of_chain)
moves(SEQUENCE, _moves_of_sequence)
