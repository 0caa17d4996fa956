"""Parses placements from text."""

from __future__ import annotations

import re

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from verifier.core.placement_text import BITWISE_REDUCTIONS, REDUCTIONS, split_placements
from verifier.torch_internals.placements import Placements, special_placement

__all__ = [
    "parse_placement",
    "parse_placements",
]


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
    if (special := special_placement(text)) is not None:
        return special
    raise ValueError(f"placement {text!r} is none of R, S(dim) and P({'|'.join((*REDUCTIONS, *BITWISE_REDUCTIONS))})")


def parse_placements(text: str) -> Placements:
    """Return the placements that :func:`format_placements` printed.

    >>> parse_placements("(S(0), R)")
    (Shard(dim=0), Replicate())
    """
    parts = split_placements(text)
    if not parts:
        raise ValueError(f"{text!r} names no placement")
    return tuple(parse_placement(part) for part in parts)
