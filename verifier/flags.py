"""What tells the findings of a program apart besides the options that its calls set: values, and facts of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from verifier.cases import OpCase

__all__ = ["facts_of", "tell_apart_by"]

_facts: dict[str, Callable[[OpCase], Iterable[str]]] = {}


def tell_apart_by(call: str, facts: Callable[[OpCase], Iterable[str]]) -> None:
    """Declare that calls of the program at the dotted path ``call`` are told apart by ``facts`` of a case.

    They should be few and each the sign of a defect: two failures of which different facts hold are two findings unless
    minimising shows that they are one.
    """
    _facts[call] = facts


def facts_of(case: OpCase) -> frozenset[str]:
    """Return the facts of a case that its program declares; none for an op of torch.

    >>> facts_of(OpCase("aten.mm.default", "torch.mm"))
    frozenset()
    """
    found = _facts.get(case.call)
    return frozenset() if found is None else frozenset(found(case))
