"""Programs of redistributions and ops, which do the same to plain tensors and to DTensors.

Each needs torch alone, so that its source can stand in a reproduction. A target is a list of placements, one per mesh
dim. On a plain tensor a redistribution is the identity: whatever the placements, the value stays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from verifier.cases import OpCase, Placements
from verifier.targets import asks, targets

__all__ = ["CHAIN", "OPERANDS", "SEQUENCE", "chain", "sequence"]

CHAIN = "strategies.redistribution.programs.chain"
SEQUENCE = "strategies.redistribution.programs.sequence"

OPERANDS = {"add": 2, "mul": 2, "mm": 2}
"""How many values a step of this name consumes, where it is not one."""


def chain(input: torch.Tensor, targets: list[list[Any]]) -> torch.Tensor:
    """Return ``input`` after one redistribution to each of ``targets``, in order."""
    result = input if isinstance(input, DTensor) else input.view_as(input)
    for target in targets:
        if isinstance(result, DTensor):
            result = result.redistribute(placements=target)
    return result


def sequence(first: torch.Tensor, second: torch.Tensor, steps: list[list[Any]]) -> list[torch.Tensor]:
    """Return what ``steps`` make and no later step consumes.

    A step is ``[name, position, ...]`` and makes a new value out of earlier ones; they are numbered from 0 for
    ``first`` and 1 for ``second``. ``["redistribute", 0, target]`` places value 0 otherwise, ``["add", 0, 1]`` adds two
    values, ``["sum", 2, 0]`` reduces one. The other names, too, are methods of a tensor.
    """
    values, used = [first, second], {0, 1}
    for name, *arguments in steps:
        count = 2 if name in ("add", "mul", "mm") else 1
        used.update(arguments[:count])
        value, *others = [values[position] for position in arguments[:count]]
        if name != "redistribute":
            value = getattr(value, name)(*others, *arguments[count:])
        elif isinstance(value, DTensor):
            value = value.redistribute(placements=arguments[1])
        else:
            value = value.view_as(value)
        values.append(value)
    return [value for position, value in enumerate(values) if position not in used]


def _spelled(target: Placements, ndim: int) -> Placements:
    """Return ``target`` as DTensor spells it: tensor dims count from the front."""
    return tuple(Shard(p.dim % ndim) if isinstance(p, Shard) else p for p in target)


def _end_of_chain(case: OpCase) -> tuple[Placements | None, ...]:
    tensor, made = case.args[0], targets(case)
    assert isinstance(tensor, torch.Tensor)
    return (_spelled(made[-1], tensor.ndim) if made else None,)


def _ends_of_sequence(case: OpCase) -> tuple[Placements | None, ...]:
    steps: Any = case.args[2]
    made: list[Placements | None] = [None, None]
    used = {0, 1}
    for name, *arguments in steps:
        used.update(arguments[: OPERANDS.get(name, 1)])
        made.append(tuple(arguments[1]) if name == "redistribute" else None)
    return tuple(target for position, target in enumerate(made) if position not in used)


asks(CHAIN, _end_of_chain)
asks(SEQUENCE, _ends_of_sequence)
