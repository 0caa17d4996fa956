"""What to try in place of a case: the calls that a program makes, by themselves, or two calls as one program.

What fails without its program is no finding about it; what fails only after another call is one about both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from verifier.cases import Combination, OpCase, Placements, Trial

__all__ = ["SimplerCall", "is_composed", "joined", "joins", "simpler_calls", "simplifies"]


@dataclass(frozen=True)
class SimplerCall:
    """A call that a program makes, by itself: the case, and how its tensors are placed.

    ``outputs`` are the numbers of those results of the program that come from this call, in order.
    """

    case: OpCase
    combination: Combination
    outputs: tuple[int, ...] = ()


Simplify = Callable[[Trial, Mapping[int, Placements]], Iterable[SimplerCall]]

Join = Callable[[OpCase, OpCase], OpCase | None]

_simplify: dict[str, Simplify] = {}
_join: dict[str, Join] = {}


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


def joins(family: str, join: Join) -> None:
    """Declare how two plain calls of one op by ``family`` become a program of both.

    ``join`` is given the first call and the second. Its program makes both with the tensors of the second, whose
    results come after those of the first; it returns None where more than numbers and texts tells the two apart.
    """
    _join[family] = join


def joined(first: OpCase, second: OpCase) -> OpCase | None:
    """Return a program that calls ``first`` and then ``second``; None if there is none for their family."""
    join = _join.get(second.family)
    return None if join is None or first.family != second.family or first.op != second.op else join(first, second)
