"""Placements as text, and text as placements."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from verifier.torch_internals.placements import BITWISE_REDUCTIONS, REDUCTIONS, Placements

__all__ = [
    "format_placements",
    "parse_placement",
    "parse_placements",
    "placement_parsers",
    "split_placements",
]


def format_placements(placements: Placements) -> str:
    """Return the placements as DTensor prints them: ``S(0)`` on one mesh dim, ``(S(0), R)`` on several.

    >>> format_placements((Shard(0),)), format_placements((Replicate(), Partial("max")))
    ('S(0)', '(R, P(max))')
    """
    texts = [str(placement) for placement in placements]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


placement_parsers: list[Callable[[str], Placement | None]] = []
"""Read the placements that only torch's private modules have; the one module that may import those adds to this."""


def parse_placement(text: str) -> Placement:
    """Return the placement that ``text`` names: ``R``, ``S(0)``, ``S(-1)`` or ``P(sum)``.

    Raises
    ------
    ValueError
        If the text is none of these.

    >>> parse_placement("S(1)"), parse_placement("P(max)")
    (Shard(dim=1), Partial(max))
    """
    text = text.strip()
    if re.search(r"\d{10}", text):
        raise ValueError(f"placement {text[:40]!r} has a number of ten digits or more")
    if text == "R":
        return Replicate()
    if match := re.fullmatch(r"S\((-?\d+)\)", text):
        return Shard(int(match[1]))
    if (match := re.fullmatch(r"P\((\w+)\)", text)) and match[1] in (*REDUCTIONS, *BITWISE_REDUCTIONS):
        return Partial(match[1])
    for parse in placement_parsers:
        if (special := parse(text)) is not None:
            return special
    raise ValueError(f"placement {text!r} is none of R, S(dim) and P({'|'.join((*REDUCTIONS, *BITWISE_REDUCTIONS))})")


def parse_placements(text: str) -> Placements:
    """Return what :func:`format_placements` printed.

    >>> parse_placements("(S(0), R)")
    (Shard(dim=0), Replicate())
    """
    return tuple(parse_placement(part) for part in split_placements(text))


def split_placements(text: str) -> list[str]:
    """Return the text of each placement in what :func:`format_placements` printed, one per mesh dim.

    >>> split_placements("(_S(0, 2), R)"), split_placements("MaskP(sum)")
    (['_S(0, 2)', 'R'], ['MaskP(sum)'])
    """
    text = text.strip()
    inner = text[1:-1] if text.startswith("(") and text.endswith(")") else text
    return [part.strip() for part in re.split(r",(?![^(]*\))", inner)]
