"""Programs, which are calls made of several ops: what each program declares about its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.tensor.placement_types import Placement

from verifier.core.case import OpCase, Trial
from verifier.torch_internals.placements import Combination, Placements

__all__ = [
    "Move",
    "SecondCall",
    "SimplerCall",
    "asked_placements",
    "asks",
    "calls_again",
    "explicit_moves",
    "facts_of",
    "is_composed",
    "joined",
    "joins",
    "keep_mesh_dims",
    "moves",
    "needs_fresh_caches",
    "second_calls",
    "simpler_calls",
    "simplifies",
    "starts_afresh",
    "targets",
    "tell_apart_by",
]

_facts: dict[str, Callable[[OpCase], Iterable[str]]] = {}


def tell_apart_by(call: str, facts: Callable[[OpCase], Iterable[str]]) -> None:
    """Declare the ``facts`` of a case by which failures of the program at the dotted path ``call`` are distinguished.

    There should be few facts, each the sign of a defect. Two failures with different facts are two findings, unless
    minimising shows that they are one.
    """
    _facts[call] = facts


def facts_of(case: OpCase) -> frozenset[str]:
    """Return the facts that the case's program declares about it; none for an op of torch.

    >>> facts_of(OpCase("aten.mm.default", "torch.mm"))
    frozenset()
    """
    found = _facts.get(case.call)
    return frozenset() if found is None else frozenset(found(case))


@dataclass(frozen=True)
class SimplerCall:
    """A single call that a program makes: its case, and the placements of its tensors.

    ``outputs`` are the numbers of the program's results that come from this call, in order.
    """

    case: OpCase
    combination: Combination
    outputs: tuple[int, ...] = ()


Simplify = Callable[[Trial, Mapping[int, Placements]], Iterable[SimplerCall]]
Join = Callable[[OpCase, OpCase], OpCase | None]
_simplify: dict[str, Simplify] = {}
_join: dict[str, Join] = {}


def simplifies(call: str, simplify: Simplify) -> None:
    """Declare that the program at the dotted path ``call`` is made of calls that can be tried separately.

    ``simplify`` gets a trial and the known placements of the program's results, by their number. It returns the calls,
    the overload under test first.
    """
    _simplify[call] = simplify


def is_composed(case: OpCase) -> bool:
    """Return whether the case calls a program whose calls can be tried separately."""
    return case.call in _simplify


def simpler_calls(trial: Trial, placed: Mapping[int, Placements]) -> tuple[SimplerCall, ...]:
    """Return the single calls that the program of ``trial`` makes; empty if it declares none."""
    simplify = _simplify.get(trial.case.call)
    return () if simplify is None else tuple(simplify(trial, placed))


def joins(family: str, join: Join) -> None:
    """Declare how two plain calls of one op by ``family`` become one program.

    ``join`` gets the first call and the second. Its program makes both calls with the tensors of the second, and
    returns the results of the first, then of the second. It returns None if more than numbers and texts differs.
    """
    _join[family] = join


def joined(first: OpCase, second: OpCase) -> OpCase | None:
    """Return a program that calls ``first`` and then ``second``; None if there is none for their family."""
    join = _join.get(second.family)
    return None if join is None or first.family != second.family or first.op != second.op else join(first, second)


@dataclass(frozen=True)
class SecondCall:
    """Two calls of one op on the same tensors: the case of each, and the program that makes both in order.

    ``changed`` is the name of the argument that differs. The program returns the results of the first call, then those
    of the second. ``controls`` are programs that make the first call twice, and the second call twice: if they pass and
    the program fails, then what is wrong is that one call follows the other.
    """

    changed: str
    first: OpCase
    second: OpCase
    program: OpCase
    controls: tuple[OpCase, ...]


_again: list[Callable[[OpCase], Iterable[SecondCall]]] = []


def calls_again(again: Callable[[OpCase], Iterable[SecondCall]]) -> None:
    """Declare a function that returns second calls beside a plain call of any op: before it, or after it."""
    _again.append(again)


def second_calls(case: OpCase) -> Iterator[SecondCall]:
    """Yield the pairs of calls, of which one is ``case``, that installed families declare."""
    for again in _again:
        yield from again(case)


_afresh: set[str] = set()


def starts_afresh(call: str) -> None:
    """Declare that DTensor has to forget its cached decisions before the program at the dotted path ``call``."""
    _afresh.add(call)


def needs_fresh_caches(case: OpCase) -> bool:
    """Return whether the case is of a program that shows what DTensor's cache keeps from one call to the next."""
    return case.call in _afresh


Asked = Callable[[OpCase], tuple[Placements | None, ...]]
Move = tuple[int | Placements, Placements]
"""A redistribution that a program asks for: source and target placements. A number stands for a tensor argument, whose
source placements are those of the combination."""
_asked: dict[str, Asked] = {}
_moves: dict[str, Callable[[OpCase], tuple[Move, ...]]] = {}


def asks(call: str, asked: Asked) -> None:
    """Declare that the program at the dotted path ``call`` asks for placements of its results.

    ``asked`` returns placements for each result of a case, or None if DTensor may choose them. A result with other
    placements gets the verdict WRONG_PLACEMENT.
    """
    _asked[call] = asked


def asked_placements(case: OpCase) -> tuple[Placements | None, ...]:
    """Return the placements that the call asks for, one entry for each result; empty if it asks for none."""
    asked = _asked.get(case.call)
    return () if asked is None else asked(case)


def moves(call: str, found: Callable[[OpCase], tuple[Move, ...]]) -> None:
    """Declare which redistributions the program at the dotted path ``call`` asks for.

    Redistributions of an op's result are left out, because DTensor chooses their source placements.
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
    """Return ``case`` with only the ``kept`` mesh dims in each target, as for a mesh without the others."""
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
        return type(value)(value[mesh_dim] for mesh_dim in kept if mesh_dim < len(value))  # it may list too few
    if isinstance(value, list | tuple):
        return type(value)(_kept(item, kept) for item in value)
    return value
