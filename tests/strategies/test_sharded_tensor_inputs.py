"""What the family of lookups in a ShardedTensor draws: every class of input, legal unless it says that it is not."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from drawing import DRAWING
from hypothesis import find, given, settings

from strategies.sharded_tensor import FAMILY
from strategies.sharded_tensor.inputs import INPUT_CLASSES, OPS, has_sharded_tensor
from strategies.sharded_tensor.programs import BAG, span_of
from strategies.tensors import filled
from verifier.core.case import MeshSpec, OpCase
from verifier.oracle.reference import make_reference
from verifier.planning.families import DrawContext, Family, select_ops
from verifier.planning.trials import plan_case
from verifier.programs import facts_of

RANKS = 3
CONTEXT = DrawContext(MeshSpec((RANKS,)), (torch.float64, torch.bfloat16), OPS)
ILLEGAL = {
    "offsets of a wrong start",
    "out-of-range ids",
    "out-of-range padding_idx",
    "weights of samples under mean",
}


def test_every_class_of_input_is_drawn_and_legal() -> None:
    seen: Counter[str] = Counter()

    def check(case: OpCase) -> None:
        seen.update(case.tags)
        assert (make_reference(case).raised is not None) is bool(ILLEGAL & case.tags)
        ids, offsets = case.args[1], case.kwargs.get("offsets")
        assert isinstance(ids, torch.Tensor)
        batch = ids.shape[1] if ".training." in case.op else len(ids)
        assert (batch % RANKS == 0) is ("unequal batches" not in case.tags)
        if isinstance(offsets, list):
            bags = len(offsets) - ("include_last_offset" in case.kwargs)
            assert bags % RANKS == 0
            assert (bags > len(ids)) is ("more bags than ids" in case.tags)
        if isinstance(offsets, list) and "unequal batches" not in case.tags:
            starts = [span_of(bags, RANKS, rank)[0] for rank in range(1, RANKS)]
            assert [offsets[start] for start in starts] == [len(ids) // RANKS * rank for rank in range(1, RANKS)]

    pooled = tuple(op for op in OPS if "embedding_bag" in op)
    others = tuple(op for op in OPS if op not in pooled)
    for ops, examples in ((pooled, 500), (others, 500)):  # the rarest classes are 2 in 100 of either
        settings(DRAWING, max_examples=examples)(given(case=FAMILY.cases(replace(CONTEXT, ops=ops)))(check))()
    assert set(seen) == INPUT_CLASSES


@pytest.mark.parametrize("op", OPS)
def test_one_op_is_drawn_where_one_is_asked_for_and_is_replicated(op: str) -> None:
    mesh = MeshSpec((2,))
    case = find(FAMILY.cases(DrawContext(mesh, (torch.float32,), (op,))), lambda case: True)
    weight = case.args[0]
    assert isinstance(weight, torch.Tensor)
    assert (case.op, len(weight)) == (op, 1)
    plan = plan_case(case, make_reference(case), mesh, None, 0, alphabet=FAMILY.alphabet(case, mesh))
    assert plan.total == 1
    assert {str(placement) for places in plan.trials[0].combination for placement in places} == {"R"}


ONES = torch.ones(4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"padding_idx": -1}, {"padding_idx<0"}),
        ({"padding_idx": -5}, set()),  # as of 4: it is not in the table
        ({"padding_idx": -5, "offsets": [0, 0], "per_sample_weights": ONES}, set()),
        ({"padding_idx": -1, "offsets": [0, 3], "per_sample_weights": ONES}, {"padding_idx<0", "offsets"}),
        ({"offsets": [0, 0]}, {"offsets"}),
        ({"offsets": [0, 0], "mode": "mean"}, {"offsets", "mode=mean", "empty bag"}),
        ({"offsets": [0, 3], "padding_idx": 3}, {"offsets"}),
        ({"offsets": [0, 3], "padding_idx": 3, "mode": "max"}, {"offsets", "mode=max", "all-padding bag"}),
        ({"offsets": [0, 0, 1, 1, 2], "mode": "mean", "padding_idx": 1}, {"mode=mean", "more bags than ids"}),
        ({"offsets": [0, 2], "per_sample_weights": ONES.clone().requires_grad_()}, {"offsets", "per_sample_weights"}),
        ({"offsets": [0, 0], "per_sample_weights": ONES, "mode": "mean"}, {"mode=mean", "per_sample_weights"}),
    ],
)
def test_findings_are_told_apart_by_what_can_be_their_cause(options: dict[str, object], facts: set[str]) -> None:
    ids = torch.tensor([0, 1, 2, 3])
    case = OpCase(OPS[2], BAG, (filled((4, 3), torch.float64, 0), ids, 0, [0, 1]), options, FAMILY.name)
    assert facts_of(case) == facts


def test_weights_of_samples_are_a_cause_where_their_dtype_rounds_ids() -> None:
    ids, weights = torch.tensor([[257], [0]]), torch.ones(2, 1, dtype=torch.bfloat16)
    table = filled((258, 1), torch.bfloat16, 0)
    case = OpCase(OPS[2], BAG, (table, ids, 0, [0, 1]), {"per_sample_weights": weights}, FAMILY.name)
    assert facts_of(case) == {"per_sample_weights", "ids that the dtype rounds"}


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("op", OPS)
def test_no_shard_starts_beyond_the_end_of_the_table(op: str, ranks: int) -> None:
    @settings(DRAWING, max_examples=40)
    @given(case=FAMILY.cases(DrawContext(MeshSpec((ranks,)), CONTEXT.dtypes, (op,))))
    def draw(case: OpCase) -> None:
        weight, _, dim, _ = case.args
        assert isinstance(weight, torch.Tensor)
        assert isinstance(dim, int)
        assert has_sharded_tensor(weight.shape[dim], ranks)

    draw()


def test_on_meshes_of_several_dims_calls_have_no_options() -> None:
    @settings(DRAWING, max_examples=40)
    @given(case=FAMILY.cases(DrawContext(MeshSpec((2, 2)), (torch.float32,), OPS)))
    def draw(case: OpCase) -> None:
        assert not case.kwargs
        assert "unequal" not in case.op
        assert make_reference(case).raised is None

    draw()


def test_is_drawn_where_it_is_named_and_on_real_ranks() -> None:
    families: dict[str, Family] = {FAMILY.name: FAMILY}
    assert select_ops(["sharded_tensor"], families) == {"sharded_tensor": OPS}
    assert select_ops(["sharded_tensor.embedding.rows"], families) == {"sharded_tensor": (OPS[0],)}
    assert select_ops([], families) == {}
    simulated = DrawContext(MeshSpec((2,), "simulated"), (torch.float64,), OPS[:1])
    assert FAMILY.cases(simulated).is_empty
    assert [what for what, _ in FAMILY.left_out(simulated)] == [OPS[0]]
    assert not FAMILY.left_out(CONTEXT)


def test_a_part_is_cut_as_chunk_cuts_it() -> None:
    for size in range(8):
        pieces = [list(range(*span_of(size, RANKS, number))) for number in range(RANKS)]
        cut = [piece.tolist() for piece in torch.arange(size).chunk(RANKS)] if size else []
        assert [piece for piece in pieces if piece] == cut
