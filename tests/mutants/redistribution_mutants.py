"""Redistributions that are wrong on purpose, in one way each: programs that a rank imports by their dotted path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from strategies.redistribution.programs import WRITES, _ends_of_sequence, sequence
from verifier.core.case import OpCase
from verifier.programs import asks, targets
from verifier.torch_internals.placements import Placements


def _redistributed(input: torch.Tensor, made: list[list[Any]]) -> tuple[torch.Tensor, DTensor | None]:
    if not isinstance(input, DTensor):
        return input.view_as(input), None
    result = input.redistribute(placements=made[-1])
    return result, result


def _with_local(like: DTensor, local: torch.Tensor) -> torch.Tensor:
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def right(input: torch.Tensor, targets: list[list[Any]]) -> torch.Tensor:
    """Wrong in no way."""
    return _redistributed(input, targets)[0]


def drops_last_element(input: torch.Tensor, targets: list[list[Any]]) -> torch.Tensor:
    """What a loop that ends one too early leaves at its initial value."""
    plain, made = _redistributed(input, targets)
    if made is None:
        return plain
    local = made.to_local().clone()
    if local.numel():
        local.view(-1)[-1] = 0
    return _with_local(made, local)


def gives_shard_of_next_rank(input: torch.Tensor, targets: list[list[Any]]) -> torch.Tensor:
    """Ranks take the shard at the next index along the first mesh dim; where shards differ in size they keep theirs."""
    plain, made = _redistributed(input, targets)
    if made is None:
        return plain
    (placement, *_) = made.placements
    local = made.to_local()
    if isinstance(placement, Shard):
        extent = made.device_mesh.size(0)
        following = made.full_tensor().chunk(extent, placement.dim)
        index = (made.device_mesh.get_local_rank(0) + 1) % extent
        if index < len(following) and following[index].shape == local.shape:
            local = following[index].clone()
    return _with_local(made, local)


def adds_up_replicas(input: torch.Tensor, targets: list[list[Any]]) -> torch.Tensor:
    """An all-reduce too many: each replica has the sum of all of them."""
    plain, made = _redistributed(input, targets)
    if made is None:
        return plain
    copies = made.device_mesh.size(0) if made.placements[0] == Replicate() else 1
    return _with_local(made, made.to_local() * copies)


def takes_one_part_for_the_whole(input: torch.Tensor, targets: list[list[Any]]) -> torch.Tensor:
    """A Partial is called Replicate without having been reduced."""
    plain, made = _redistributed(input, targets)
    if made is None or not isinstance(input, DTensor) or not input.placements[0].is_partial():
        return plain
    return _with_local(made, input.to_local()) if made.placements[0] == Replicate() else plain


def ends_elsewhere(input: torch.Tensor, targets: list[list[Any]]) -> torch.Tensor:
    """The value is right on every rank, the placements are not those asked for."""
    plain, made = _redistributed(input, targets)
    return plain if made is None else made.redistribute(placements=[Replicate()] * made.device_mesh.ndim)


def doubles_gradient(input: torch.Tensor, targets: list[list[Any]]) -> torch.Tensor:
    """Forward is right; on the way back the gradient is doubled."""
    plain, made = _redistributed(input, targets)
    if made is None:
        return plain
    return made * 2 - made.detach()


def calls_the_whole_pending(input: torch.Tensor, targets: list[list[Any]]) -> torch.Tensor:
    """What stays Partial is reduced on every rank, and still called Partial."""
    plain, made = _redistributed(input, targets)
    if made is None:
        return plain
    whole = [Replicate() if placement.is_partial() else placement for placement in made.placements]
    return _with_local(made, made.redistribute(placements=whole).to_local())


def reduces_by_the_next_operation(input: torch.Tensor, targets: list[list[Any]]) -> torch.Tensor:
    """Parts under a bitwise AND are reduced by OR, those under OR by XOR, and those under XOR by AND."""
    if not isinstance(input, DTensor):
        return input.view_as(input)
    following = {"band": "bor", "bor": "bxor", "bxor": "band"}
    placements = [Partial(following[p.reduce_op]) if isinstance(p, Partial) else p for p in input.placements]
    taken = DTensor.from_local(
        input.to_local(), input.device_mesh, placements, run_check=False, shape=input.shape, stride=input.stride()
    )
    return taken.redistribute(placements=targets[-1])


def _unstrided(placements: Sequence[Placement]) -> list[Placement]:
    return [Shard(p.dim) if isinstance(p, _StridedShard) else p for p in placements]


def cuts_without_strides(input: torch.Tensor, targets: list[list[Any]]) -> torch.Tensor:
    """A strided shard is cut in one piece, and so mesh dims cut from left to right, whatever the order."""
    plain, made = _redistributed(input, targets)
    return (
        plain if made is None else _with_local(made, input.redistribute(placements=_unstrided(targets[-1])).to_local())
    )


def gathers_without_strides(input: torch.Tensor, targets: list[list[Any]]) -> torch.Tensor:
    """The pieces of a strided shard are put together as if they were next to each other."""
    if not isinstance(input, DTensor):
        return input.view_as(input)
    taken = DTensor.from_local(
        input.to_local(), input.device_mesh, _unstrided(input.placements), shape=input.shape, stride=input.stride()
    )
    return taken.redistribute(placements=targets[-1])


def _replaced(first: torch.Tensor, steps: list[list[Any]], wrong: dict[str, Any]) -> list[list[Any]]:
    """The steps of a sequence; on DTensors those that ``wrong`` names are what it makes of them."""
    if not isinstance(first, DTensor):
        return steps
    return [wrong[step[0]](step) if step[0] in wrong else step for step in steps]


def loses_writes(first: torch.Tensor, second: torch.Tensor, steps: list[list[Any]]) -> list[torch.Tensor]:
    """A write goes to a copy that nobody has."""
    wrong = dict.fromkeys(WRITES, lambda step: ["clone", step[1]])
    return sequence(first, second, _replaced(first, steps, wrong))


def writes_to_the_whole(first: torch.Tensor, second: torch.Tensor, steps: list[list[Any]]) -> list[torch.Tensor]:
    """What is meant for a slice is added to all of the value."""
    wrong = {"add_to_slice": lambda step: ["add_", *step[1:3]]}
    return sequence(first, second, _replaced(first, steps, wrong))


def slices_from_the_start(first: torch.Tensor, second: torch.Tensor, steps: list[list[Any]]) -> list[torch.Tensor]:
    """A slice has the right size and begins with the first element, wherever it should."""
    wrong = {
        "narrow": lambda step: [*step[:3], 0, step[4]],
        "select": lambda step: [*step[:3], 0],
    }
    return sequence(first, second, _replaced(first, steps, wrong))


def joins_the_other_way_round(first: torch.Tensor, second: torch.Tensor, steps: list[list[Any]]) -> list[torch.Tensor]:
    """The second value comes first."""
    wrong = {"cat": lambda step: ["cat", step[2], step[1], step[3]]}
    return sequence(first, second, _replaced(first, steps, wrong))


def writes_to_what_it_has_gathered(
    first: torch.Tensor, second: torch.Tensor, steps: list[list[Any]]
) -> list[torch.Tensor]:
    """The value is right, and replicated: what was written to is not where it was any more."""
    results = sequence(first, second, steps)
    if not isinstance(first, DTensor):
        return results
    return [result.redistribute(placements=[Replicate()] * first.device_mesh.ndim) for result in results]


def _asked(case: OpCase) -> tuple[Placements, ...]:
    tensor = case.args[0]
    assert isinstance(tensor, torch.Tensor)
    return (tuple(Shard(p.dim % tensor.ndim) if isinstance(p, Shard) else p for p in targets(case)[-1]),)


asks("redistribution_mutants.writes_to_what_it_has_gathered", _ends_of_sequence)
for _program in (right, ends_elsewhere):
    asks(f"redistribution_mutants.{_program.__name__}", _asked)
