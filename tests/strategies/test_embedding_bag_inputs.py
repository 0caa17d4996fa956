"""What the family of embedding bags draws: every class of input, all of it legal but what says that it is not."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from drawing import DRAWING
from hypothesis import Phase, find, given, settings

from strategies.embedding_bag import FAMILY
from strategies.embedding_bag.inputs import FORWARD_ONLY, INPUT_CLASSES, SCALED, TRAINED
from verifier.core.case import MeshSpec, OpCase
from verifier.oracle.reference import make_reference
from verifier.planning.families import DrawContext, select_ops

CONTEXT = DrawContext(MeshSpec((3,)), (torch.float64, torch.float16), (TRAINED, FORWARD_ONLY))
HOW = settings(DRAWING, max_examples=400)


def test_every_class_of_input_is_drawn_and_legal() -> None:
    seen: Counter[str] = Counter()

    @HOW
    @given(case=FAMILY.cases(CONTEXT))
    def draw(case: OpCase) -> None:
        seen.update(case.tags)
        reference = make_reference(case)
        assert (reference.raised is not None) is ("out-of-range ids" in case.tags), reference.raised
        weight = case.kwargs["weight"]
        assert isinstance(weight, torch.Tensor)
        assert case.op == (TRAINED if weight.requires_grad else FORWARD_ONLY)

    draw()
    assert set(seen) == INPUT_CLASSES


@pytest.mark.parametrize("op", [TRAINED, FORWARD_ONLY])
def test_one_op_is_drawn_where_one_is_asked_for(op: str) -> None:
    @settings(HOW, max_examples=40)
    @given(case=FAMILY.cases(DrawContext(MeshSpec((2, 2)), (torch.float32,), (op,))))
    def draw(case: OpCase) -> None:
        assert case.op == op

    draw()


def test_shrinks_to_one_bag_of_one_row() -> None:
    case = find(
        FAMILY.cases(CONTEXT), lambda case: case.kwargs["mode"] == "sum", settings=settings(HOW, phases=list(Phase))
    )
    weight, ids = case.kwargs["weight"], case.kwargs["input"]
    assert isinstance(weight, torch.Tensor)
    assert isinstance(ids, torch.Tensor)
    assert (tuple(weight.shape), ids.tolist(), len(case.kwargs)) == ((1, 1), [0], 4)


def test_the_reference_of_scaled_gradients_counts_by_itself() -> None:
    """Ids 1, 1 and 3: aten's own gradient on a CPU divides row 3 by 2 (pytorch issue #190063)."""
    from strategies.embedding_bag.programs import scaled

    weight = torch.arange(8.0).reshape(4, 2).requires_grad_()
    ids, offsets = torch.tensor([1, 1, 3]), torch.tensor([0])
    out = scaled(weight, ids, offsets)
    assert torch.equal(out, torch.nn.functional.embedding_bag(ids, weight, offsets, mode="sum"))
    (gradient,) = torch.autograd.grad(out.sum(), weight)
    assert gradient[:, 0].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert f"{scaled.__module__}.{scaled.__name__}" == SCALED


def test_is_drawn_where_it_is_named() -> None:
    families = {FAMILY.name: FAMILY}
    assert select_ops(["embedding_bag"], families) == {"embedding_bag": (TRAINED, FORWARD_ONLY)}  # type: ignore[arg-type]
    assert select_ops(["aten._embedding_bag.default"], families) == {"embedding_bag": (TRAINED,)}  # type: ignore[arg-type]
    assert select_ops([], families) == {}  # type: ignore[arg-type]
