"""Calls of ops, as evidence from which rules are derived, and derived rules as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from verifier.core.case import MeshSpec, OpCase
from verifier.deriving.learning.evidence import CallEvidence, gather
from verifier.deriving.learning.generalise import Derivation
from verifier.deriving.learning.held_out import Here
from verifier.rules.options import CheckOptions
from verifier.rules.samples import Sample, Values
from verifier.torch_internals.names import OpOverload

__all__ = ["OPTIONS", "SIZES", "aten", "evidence", "here", "reductions", "said", "way"]

aten = torch.ops.aten
OPTIONS = CheckOptions((MeshSpec((2,)), MeshSpec((3,))), blank=True, cap=1024)
SIZES = ((5, 7, 4), (2, 3, 5), (6, 4, 9))


class Way:
    """One way of calling an op; the arguments are made from the extents of each size."""

    not_testable = claims_only = ""

    def __init__(self, op: OpOverload, make: Callable[..., tuple[object, ...]], kwargs: dict[str, object]) -> None:
        self.op, self.origin, self._overload = str(op), f"{make.__code__.co_firstlineno}", op
        self._make, self._kwargs = make, kwargs

    def draw(self, size: int, draw: int, values: Values = Values.USUAL) -> OpCase | None:
        if values is not Values.USUAL or size >= len(SIZES):
            return None
        generator = torch.Generator().manual_seed(7 * size + draw)

        def tensor(*shape: int) -> torch.Tensor:
            return torch.randint(-3, 5, shape, generator=generator).double()

        return OpCase(self.op, f"torch.ops.{self.op}", self._make(tensor, *SIZES[size]), self._kwargs)


def way(op: OpOverload, make: Callable[..., tuple[object, ...]], **kwargs: object) -> Way:
    return Way(op, make, kwargs)


def evidence(*ways: Way) -> list[CallEvidence]:
    return list(gather(ways, OPTIONS))


def here(some: Sequence[Sample]) -> list[Here]:
    return [Here(sample, OPTIONS) for sample in some]


def said(made: Derivation) -> set[str]:
    """Return the rules as text: placements of slots, of results, and conditions."""

    def part(one: object) -> str:
        return f"S({one.text})" if hasattr(one, "text") else str(one)

    return {
        f"{', '.join(map(part, rule.inputs))} -> {', '.join(map(part, rule.outputs))}"
        + "".join(f" if {test.text}" for test in rule.tests)
        for rule in made.rules
    }


@cache
def reductions() -> list[CallEvidence]:
    op = aten.sum.dim_IntList
    ways = [
        way(op, lambda tensor, a, b, c, dims=dims, keep=keep: (tensor(a, b, c), list(dims), keep))
        for dims in ((0,), (1,), (-1,), (0, 2))
        for keep in (False, True)
    ]
    return evidence(*ways)
