"""Simpler calls to try in place of a program: what fails without the program is no finding about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from verifier.cases import Combination, OpCase, Placements, Trial

__all__ = ["SimplerCall", "is_composed", "simpler_calls", "simplifies"]


@dataclass(frozen=True)
class SimplerCall:
    """A call that a program makes, by itself: the case, and how its tensors are placed.

    ``outputs`` are the numbers of those results of the program that come from this call, in order.
    """

    case: OpCase
    combination: Combination
    outputs: tuple[int, ...] = ()


Simplify = Callable[[Trial, Mapping[int, Placements]], Iterable[SimplerCall]]

_simplify: dict[str, Simplify] = {}


def simplifies(call: str, simplify: Simplify) -> None:
    """Declare that the program at the dotted path ``call`` is made of calls that can be tried one by one.

    ``simplify`` is given a trial, and the placements of those results of the program that are known, by their number;
    it returns the calls, the overload under test first.
    """
    _simplify[call] = simplify


def is_composed(case: OpCase) -> bool:
    """Return whether the case calls a program that can be taken apart."""
    return case.call in _simplify


def simpler_calls(trial: Trial, placed: Mapping[int, Placements]) -> tuple[SimplerCall, ...]:
    """Return the calls that the program of ``trial`` makes, by themselves; empty if it is not one of which is known."""
    simplify = _simplify.get(trial.case.call)
    return () if simplify is None else tuple(simplify(trial, placed))
