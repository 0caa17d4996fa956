"""What the family of TorchRec's layouts draws: every layout, into every other, and calls that the local op admits."""

from __future__ import annotations

from collections import Counter

from drawing import DRAWING
from hypothesis import given, settings

from strategies.torchrec.family import FAMILY
from strategies.torchrec.layouts import LAYOUTS
from verifier.core.case import MeshSpec, OpCase
from verifier.oracle.reference import make_reference
from verifier.planning.families import DrawContext


def test_every_layout_and_class_of_input_is_drawn_and_legal() -> None:
    seen: Counter[str] = Counter()
    targets: Counter[object] = Counter()

    @settings(DRAWING, max_examples=200)
    @given(case=FAMILY.cases(DrawContext(MeshSpec((4,)), FAMILY.dtypes, FAMILY.ops)))
    def draw(case: OpCase) -> None:
        assert make_reference(case).raised is None
        layout, target = case.kwargs["layout"], case.kwargs["target"]
        assert isinstance(layout, list)
        assert isinstance(target, list)
        assert case.op == f"layout.{layout[0]}"
        seen.update({case.op, *case.tags})
        targets[target[0]] += 1

    draw()
    tags = {"several chunks on a rank", "rank without chunks", "chunks of several sizes", "empty bag"}
    assert set(seen) == {*FAMILY.ops, *tags}
    assert targets.keys() == LAYOUTS.keys()
