"""Redistributions as edges between placements."""

from __future__ import annotations

from collections.abc import Iterator

from verifier.core.case import OpCase
from verifier.core.placement_text import BITWISE_REDUCTIONS, REDUCTIONS, split_placements
from verifier.programs import explicit_moves
from verifier.torch_internals.placements import Combination, Placements

__all__ = [
    "edges_between",
    "possible_edges",
    "resolved_moves",
]

_TENSOR_DIMS = 3
"""Edges are counted for tensors of up to this number of dims."""


def resolved_moves(case: OpCase, combination: Combination) -> tuple[tuple[Placements, Placements], ...]:
    """Return the redistributions that ``case`` asks for if its arguments have the placements of ``combination``."""
    return tuple(
        (combination[source] if isinstance(source, int) else source, target) for source, target in explicit_moves(case)
    )


def possible_edges() -> frozenset[str]:
    """Return every edge on one mesh dim, of tensors of up to three dims.

    >>> len(possible_edges()), "P(sum) -> S(1)" in possible_edges(), "R -> R" in possible_edges()
    (210, True, False)
    """
    letters = ["R", *(f"P({reduction})" for reduction in (*REDUCTIONS, *BITWISE_REDUCTIONS))]
    letters += [f"{kind}({dim})" for kind in ("S", "_S") for dim in range(_TENSOR_DIMS)]
    return frozenset(f"{source} -> {target}" for source in letters for target in letters if source != target)


def edges_between(source: str, target: str) -> Iterator[str]:
    """Yield the edges between placements, given as text: one for each mesh dim on which the placement changes.

    >>> list(edges_between("(S(0), R, _S(1, 2))", "(R, R, S(1))"))
    ['S(0) -> R', '_S(1) -> S(1)']
    """
    for first, last in zip(split_placements(source), split_placements(target), strict=True):
        if first != last:
            yield f"{_letter(first)} -> {_letter(last)}"


def _letter(text: str) -> str:
    return text.partition(",")[0] + ")" if text.startswith("_S(") else text
