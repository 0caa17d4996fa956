"""Placements as text; needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verifier.torch_internals.placements import Placements

__all__ = [
    "BITWISE_REDUCTIONS",
    "REDUCTIONS",
    "format_placements",
    "placement_order",
    "split_placements",
]

REDUCTIONS = ("sum", "avg", "product", "min", "max")
"""Reductions that DTensor's rules use."""
BITWISE_REDUCTIONS = ("band", "bor", "bxor")
"""Further reductions, of integers, that only redistributions support."""


def format_placements(placements: Placements) -> str:
    """Return the placements as DTensor prints them: ``S(0)`` on one mesh dim, ``(S(0), R)`` on several.

    >>> from torch.distributed.tensor import Partial, Replicate, Shard
    >>> format_placements((Shard(0),)), format_placements((Replicate(), Partial("max")))
    ('S(0)', '(R, P(max))')
    """
    texts = [str(placement) for placement in placements]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def split_placements(text: str) -> tuple[str, ...]:
    """Return the text of the placement on each mesh dim, as :func:`format_placements` printed them.

    The text may have placements that the verifier does not model, because a redistribution may pass through them.

    >>> split_placements("(S(0), MaskP(sum, None, 0))"), split_placements("_S(0, 2)"), split_placements("()")
    (('S(0)', 'MaskP(sum, None, 0)'), ('_S(0, 2)',), ())
    """
    text = text.strip()
    inner = text[1:-1] if text.startswith("(") and text.endswith(")") else text
    parts, depth = [""], 0
    for letter in inner:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return tuple(part.strip() for part in parts if part.strip())


def placement_order(text: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key for placements, by mesh dim: R, then S by tensor dim, then Partial, then the rest.

    >>> sorted(["P(sum)", "S(10)", "S(2)", "R"], key=placement_order)
    ['R', 'S(2)', 'S(10)', 'P(sum)']
    """
    return tuple(
        (0 if part == "R" else 1 if part.startswith("S(") else 2 if part.startswith("P(") else 3, part.rjust(12))
        for part in split_placements(text)
    )
