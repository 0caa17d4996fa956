"""Programs around one aten overload, where what outlives a single call would show.

Each needs torch alone, so that its source can stand in a reproduction. ``op`` is the overload under test, as
``aten.mul.Tensor``; its arguments come by the names in its schema, so that a table of placements has those. A program
returns every tensor that it makes on its way, in a flat list: the first wrong one says where it went wrong.
"""

from __future__ import annotations

from typing import Any

import torch

from strategies.opinfo.plainer import PLAINER
from verifier.simpler_calls import simplifies

__all__ = ["after_exception", "called_twice", "consumed", "one_for_two", "produced", "written_view"]


def one_for_two(op: str, given: str, also: str, /, **arguments: Any) -> list[torch.Tensor]:
    """Return what ``op`` makes of one tensor in two places: the argument ``given`` is passed as ``also`` as well.

    Where both are the same argument, it is a list, and comes twice as long.
    """
    call: Any = torch.ops
    for part in op.split("."):
        call = getattr(call, part)
    both = arguments[given] * 2 if given == also else arguments[given]
    result = call(**{**arguments, also: both})
    return [t for t in (result if isinstance(result, list | tuple) else [result]) if isinstance(t, torch.Tensor)]


def consumed(op: str, consumers: list[list[Any]], /, fresh: Any = None, **arguments: Any) -> list[torch.Tensor]:
    """Return what ``op`` makes, and what each of ``consumers`` makes of its first tensor.

    A consumer is ``[overload, argument, ...]``. Among its arguments ``"result"`` stands for the first tensor of ``op``,
    ``"last"`` for what the consumer before has made, ``"fresh"`` for another tensor of that shape.
    """
    call: Any = torch.ops
    for part in op.split("."):
        call = getattr(call, part)
    made = call(**arguments)
    made = [t for t in (made if isinstance(made, list | tuple) else [made]) if isinstance(t, torch.Tensor)]
    values = {"result": made[0], "last": made[0], "fresh": fresh}
    for name, *given in consumers:
        consumer: Any = torch.ops
        for part in name.split("."):
            consumer = getattr(consumer, part)
        given = [
            [values[item] if isinstance(item, str) else item for item in one]
            if isinstance(one, list)
            else values[one]
            if isinstance(one, str)
            else one
            for one in given
        ]
        values["last"] = consumer(*given)
        made.append(values["last"])
    return made


def produced(op: str, name: str, producer: list[Any], /, **arguments: Any) -> list[torch.Tensor]:
    """Return what ``op`` makes where another op has made its argument ``name``, and may have left it pending.

    The producer is ``[overload, argument, ...]`` and makes it out of what is given under that name.
    """
    before: Any = torch.ops
    for part in producer[0].split("."):
        before = getattr(before, part)
    call: Any = torch.ops
    for part in op.split("."):
        call = getattr(call, part)
    value = before(arguments[name], *producer[1:])
    result = call(**{**arguments, name: value})
    return [
        value,
        *(t for t in (result if isinstance(result, list | tuple) else [result]) if isinstance(t, torch.Tensor)),
    ]


def called_twice(op: str, others: list[list[Any]], /, **arguments: Any) -> list[torch.Tensor]:
    """Return what ``op`` makes, and what it makes of the same tensors where ``others``, ``[name, value]``, differ."""
    call: Any = torch.ops
    for part in op.split("."):
        call = getattr(call, part)
    made: list[torch.Tensor] = []
    for changed in ({}, dict(others)):
        result = call(**{**arguments, **changed})
        made += [t for t in (result if isinstance(result, list | tuple) else [result]) if isinstance(t, torch.Tensor)]
    return made


def after_exception(op: str, name: str, between: bool, /, unfit: Any, **arguments: Any) -> list[torch.Tensor]:
    """Return what ``op`` makes after it has refused ``unfit`` as its argument ``name``; if ``between``, also before."""
    call: Any = torch.ops
    for part in op.split("."):
        call = getattr(call, part)
    made: list[torch.Tensor] = []
    for turn in range(2):
        if turn or between:
            result = call(**arguments)
            made += [
                t for t in (result if isinstance(result, list | tuple) else [result]) if isinstance(t, torch.Tensor)
            ]
        if not turn:
            try:
                call(**{**arguments, name: unfit})
            except Exception:  # noqa: BLE001 - whatever it raises, the next call must not know of it
                continue
    return made


def written_view(op: str, name: str, factor: int, /, **arguments: Any) -> list[torch.Tensor]:
    """Return a copy of the argument ``name`` and the views that ``op`` makes of it, after each has been multiplied."""
    call: Any = torch.ops
    for part in op.split("."):
        call = getattr(call, part)
    base = arguments[name].clone()
    result = call(**{**arguments, name: base})
    views = [t for t in (result if isinstance(result, list | tuple) else [result]) if isinstance(t, torch.Tensor)]
    for view in views:
        view.mul_(factor)
    return [base, *views]


for _program in (one_for_two, consumed, produced, called_twice, after_exception, written_view):
    simplifies(f"{__name__}.{_program.__name__}", PLAINER[_program.__name__])
