"""Programs of redistributions and ops, which do the same to plain tensors and to DTensors.

Each needs torch alone, so that its source can stand in a reproduction. A target is a list of placements, one per mesh
dim. On a plain tensor a redistribution is the identity: whatever the placements, the value stays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from verifier.core.case import OpCase
from verifier.planning.boundary import declares
from verifier.programs import Move, asks, moves, targets
from verifier.torch_internals.placements import Placements

__all__ = ["CHAIN", "SEQUENCE", "STEPS", "VIEWS", "WRITES", "chain", "operands", "sequence", "spelled"]

CHAIN = "strategies.redistribution.programs.chain"
SEQUENCE = "strategies.redistribution.programs.sequence"

WRITES = ("add_", "mul_", "add_to_slice")
"""Names of the steps that write to the value that they name first."""

VIEWS = ("flatten", "narrow", "reshape", "select", "t", "transpose", "unsqueeze", "view")
STEPS = frozenset({"redistribute", "clone", "neg", "sum", "add", "mm", "mul", "square", "cat", *VIEWS, *WRITES})
"""Names of the steps that sequences have: of a file no other method of a value is called."""

_OF_TWO = ("add", "mul", "mm", "cat", *WRITES)


def operands(step: list[Any]) -> tuple[int, ...]:
    """Return the positions of the values that ``step`` takes; a float in the place of the second is a number.

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
    """Return what ``steps`` make and no later step takes.

    A step is ``[name, position, ...]`` and makes a new value out of earlier ones; they are numbered from 0 for
    ``first`` and 1 for ``second``. ``["redistribute", 0, target]`` places value 0 otherwise, ``["add", 0, 1]`` adds two
    values, ``["sum", 2, 0]`` reduces one, ``["cat", 0, 1, 0]`` joins two. The other names, too, are methods of a
    tensor.

    ``["add_", 2, 1]`` writes to value 2, which then has the next number as well, and so does ``["mul_", 2, 3.0]``,
    where a float is a number. ``["add_to_slice", 2, 3.0, 0, 1, 4]`` adds to 4 rows of value 2, from row 1 on. Neither
    clones for itself: who writes to ``first`` writes to the argument.
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
    """Return ``target`` as DTensor spells it: tensor dims count from the front."""
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
    """What is written to stays where it is, so a redistributed value that is written to keeps its placements."""
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


declares(CHAIN)
declares(SEQUENCE, _check_steps)
asks(CHAIN, _end_of_chain)
asks(SEQUENCE, _ends_of_sequence)
moves(CHAIN, _moves_of_chain)
moves(SEQUENCE, _moves_of_sequence)
