"""Which ops a pattern selects, of narrow families and of broad ones."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from verifier.core.case import OpCase
from verifier.planning.families import DrawContext, Family, NarrowFamily, matches, select_ops


@dataclass(frozen=True)
class Few(NarrowFamily):
    """A family that draws nothing."""

    name: str
    ops: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float64,)

    def cases(self, context: DrawContext) -> SearchStrategy[OpCase]:
        return st.nothing()


class Many(Few):
    """One with names of its own, and too many to draw them all at once."""

    @property
    def broad(self) -> bool:
        return True

    def select(self, pattern: str) -> tuple[str, ...]:
        return tuple(op for op in self.ops if matches(op, pattern) or fnmatch.fnmatchcase(op, pattern))


LOOKUP = "aten.embedding.default"
FAMILIES: dict[str, Family] = {
    "embedding": Few("embedding", (LOOKUP, "aten.embedding_dense_backward.default")),
    "all": Many("all", (LOOKUP, "aten.mm.default", "nn.functional.relu")),
}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ((), {"embedding": (LOOKUP, "aten.embedding_dense_backward.default")}),
        (("embedding",), {"embedding": (LOOKUP, "aten.embedding_dense_backward.default")}),
        ((LOOKUP,), {"embedding": (LOOKUP,)}),
        (("mm",), {"all": ("aten.mm.default",)}),
        (("nn.functional.*", "mm"), {"all": ("nn.functional.relu", "aten.mm.default")}),
        (("aten.*mm*",), {"all": ("aten.mm.default",)}),
        (("aten.embedding.*",), {"embedding": (LOOKUP,), "all": (LOOKUP,)}),
        (("m*",), {"all": ("aten.mm.default",)}),
        (
            ("[a-b]*",),
            {"embedding": (LOOKUP, "aten.embedding_dense_backward.default"), "all": (LOOKUP, "aten.mm.default")},
        ),
        (("all",), {"all": (LOOKUP, "aten.mm.default", "nn.functional.relu")}),
        (("mm", "mm"), {"all": ("aten.mm.default",)}),
    ],
)
def test_patterns_select(patterns: tuple[str, ...], expected: dict[str, tuple[str, ...]]) -> None:
    assert select_ops(patterns, FAMILIES) == expected


def test_both_kinds_are_families() -> None:
    assert all(isinstance(family, Family) for family in FAMILIES.values())


@pytest.mark.parametrize(
    ("pattern", "near"), [("nn.functional.relo", "nn.functional.relu"), ("embeding", "embedding"), ("al", "all")]
)
def test_an_unknown_pattern_names_the_nearest(pattern: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"no family and no op matches '{pattern}'; did you mean '{near}'?"):
        select_ops((pattern,), FAMILIES)
