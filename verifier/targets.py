"""Placements among the arguments of a call: the targets of redistributions that a program makes by itself.

A program takes a target as a list of placements, one per mesh dim. That is all that storing, printing, comparing and
moving a case to a smaller mesh need to know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch.distributed.tensor.placement_types import Placement

from verifier.cases import OpCase, Placements

__all__ = ["Move", "asked_placements", "asks", "explicit_moves", "keep_mesh_dims", "moves", "targets"]

Asked = Callable[[OpCase], tuple[Placements | None, ...]]

Move = tuple[int | Placements, Placements]
"""A redistribution that a program asks for: from where to where. A number is that of a tensor argument, which begins
where the combination places it."""

_asked: dict[str, Asked] = {}
_moves: dict[str, Callable[[OpCase], tuple[Move, ...]]] = {}


def asks(call: str, asked: Asked) -> None:
    """Declare that the program at the dotted path ``call`` asks for placements of its results.

    ``asked`` returns them for each result of a case, None for a result whose placements DTensor may choose. Results
    that are placed otherwise get the verdict WRONG_PLACEMENT.
    """
    _asked[call] = asked


def asked_placements(case: OpCase) -> tuple[Placements | None, ...]:
    """Return the placements that the call asks for, one entry for each result; empty if it asks for none."""
    asked = _asked.get(case.call)
    return () if asked is None else asked(case)


def moves(call: str, found: Callable[[OpCase], tuple[Move, ...]]) -> None:
    """Declare which redistributions the program at the dotted path ``call`` asks for, as far as their source is known.

    What begins where DTensor has placed the result of an op is left out.
    """
    _moves[call] = found


def explicit_moves(case: OpCase) -> tuple[Move, ...]:
    """Return the redistributions that the call asks for; empty if it declares none."""
    found = _moves.get(case.call)
    return () if found is None else found(case)


def targets(case: OpCase) -> tuple[Placements, ...]:
    """Return the lists of placements among the arguments of ``case``, in order.

    >>> from torch.distributed.tensor import Replicate, Shard
    >>> targets(OpCase("op", "call", (None, [[Shard(0)], [Replicate()]])))
    ((Shard(dim=0),), (Replicate(),))
    """
    return tuple(_targets([*case.args, *case.kwargs.values()]))


def keep_mesh_dims(case: OpCase, kept: tuple[int, ...]) -> OpCase:
    """Return ``case`` with those mesh dims only in each target, as for a mesh that has no others."""
    args = tuple(_kept(value, kept) for value in case.args)
    return replace(case, args=args, kwargs={name: _kept(value, kept) for name, value in case.kwargs.items()})


def _is_target(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, Placement) for item in value)


def _targets(values: Iterable[Any]) -> Iterable[Placements]:
    for value in values:
        if _is_target(value):
            yield tuple(value)
        elif isinstance(value, list | tuple):
            yield from _targets(value)


def _kept(value: Any, kept: tuple[int, ...]) -> Any:
    if _is_target(value):
        return type(value)(value[mesh_dim] for mesh_dim in kept)
    if isinstance(value, list | tuple):
        return type(value)(_kept(item, kept) for item in value)
    return value
