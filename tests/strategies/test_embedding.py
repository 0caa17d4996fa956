"""The cases of torch's own tests of sharded embeddings, forward and backward, on real ranks."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from strategies.embedding.inputs import EMBEDDING, LOOKUP
from strategies.tensors import filled
from verifier.calls.result import Crash, Verification, WrongValue
from verifier.calls.verifier import Verifier
from verifier.core.case import OpCase
from verifier.core.verdict import Phase, VerdictKind
from verifier.findings.failures import first_report

MESH = "4"

COLUMN_WISE = [
    ((5, 4), (17, 12), None),
    ((6, 7, 6), (21, 11), None),
    ((8, 6, 5, 4), (23, 13), None),
    ((8, 6, 5, 4, 7), (23, 16), None),
    ((4,), (15, 14), None),
    ((34,), (15, 14), 10),
    ((8, 6, 5, 4), (23, 13), 12),
]
ROW_WISE = [((5, 12), (16, 22), None), ((6, 7, 6), (13, 22), None), ((34,), (15, 14), 10)]


def lookup(indices: tuple[int, ...], table: tuple[int, int], padding_idx: int | None, **flags: object) -> OpCase:
    """Return a lookup of drawn rows, the padding row among them."""
    generator = torch.Generator().manual_seed(sum(indices))
    ids = torch.randint(0, table[0], indices, generator=generator)
    if padding_idx is not None:
        ids.view(-1)[::5] = padding_idx
        flags["padding_idx"] = padding_idx
    # float64, in which the sums of some thousand cotangents are exact
    weight = filled(table, torch.float64, 0).requires_grad_()
    return OpCase(EMBEDDING, LOOKUP, (), {"weight": weight, "input": ids, **flags}, "embedding")


def communicates_nothing(result: Verification, phase: Phase) -> bool:
    """Return whether nothing was sent, by torch's own count and by what DTensor planned."""
    planned = [step.collective for step in result.redistributions(phase)]
    return result.collectives(phase) == {} and planned == [None] * len(planned)


@pytest.mark.parametrize(("indices", "table", "padding_idx"), COLUMN_WISE)
def test_column_wise(
    verify: Verifier, indices: tuple[int, ...], table: tuple[int, int], padding_idx: int | None
) -> None:
    case = lookup(indices, table, padding_idx)
    result = verify(case, mesh=MESH, placements={"weight": "S(1)"}, trace=True)
    assert result.counts == {VerdictKind.PASS: 1}
    assert result.placements() == [f"S({len(indices)})"]
    assert communicates_nothing(result, Phase.FORWARD)
    assert result.collectives(Phase.GATHER) == {"all_gather_into_tensor": 1}
    assert result.placements("weight.grad 0") == ["R"]  # of a cotangent that is replicated


@pytest.mark.parametrize(("indices", "table", "padding_idx"), ROW_WISE)
def test_row_wise(verify: Verifier, indices: tuple[int, ...], table: tuple[int, int], padding_idx: int | None) -> None:
    case = lookup(indices, table, padding_idx)
    result = verify(case, mesh=MESH, placements={"weight": "S(0)"}, trace=True)
    assert result.counts == {VerdictKind.PASS: 1}
    assert result.placements() == ["MaskP(sum)"]
    assert communicates_nothing(result, Phase.FORWARD)
    assert result.collectives(Phase.GATHER) == {"all_reduce": 1}
    assert [step.collective for step in result.redistributions(Phase.GATHER)] == ["all_reduce"]


@pytest.mark.parametrize("weight", ["S(0)", "S(1)"])
def test_all_three_cotangents_are_tried(verify: Verifier, weight: str) -> None:
    result = verify(lookup((5, 4), (17, 12), None), mesh=MESH, placements={"weight": weight})
    (observation,) = result.observations
    (replicated,), (sharded,), (partial,) = observation.trial.cotangents
    assert replicated[0].is_replicate()
    assert sharded[0].is_shard()
    assert partial[0].is_partial()
    for number in range(3):
        assert len(result.placements(f"weight.grad {number}")) == 1


@pytest.mark.parametrize("weight", ["S(0)", "S(1)", "R"])
def test_max_norm_is_refused(verify: Verifier, weight: str) -> None:
    case = lookup((5, 4), (17, 12), None, max_norm=3.0)
    result = verify(case, mesh=MESH, placements={"weight": weight}, allow_nothing=True)
    assert result.counts == {VerdictKind.UNSUPPORTED: 1}
    for report in result.observations[0].reports:
        assert report is not None
        assert report.raised is not None
        assert (report.raised.type, report.raised.phase) == ("NotImplementedError", Phase.FORWARD)


def test_row_wise_crashes_where_a_rank_has_no_row(verify: Verifier) -> None:
    """17 rows on 8 ranks are cut 3, 3, 3, 3, 3, 2, 0, 0. A defect of torch 2.13."""
    with pytest.raises(Crash, match="ranks 6, 7 raised RuntimeError: index_select") as caught:
        verify(lookup((5,), (17, 4), None), mesh="8", placements={"weight": "S(0)"})
    failure = caught.value.failure
    report = first_report(failure.observation)
    assert report is not None
    assert report.raised is not None
    assert report.raised.message.startswith("index_select(): self indexing axis dim should be positive")
    assert failure.verdict.phase is Phase.FORWARD
    assert "aten.embedding.default(weight=f64[17, 4] S(0), input=i64[5] R)" in str(caught.value)


def test_row_wise_passes_where_every_rank_has_a_row(verify: Verifier) -> None:
    result = verify(lookup((5,), (16, 4), None), mesh="8", placements={"weight": "S(0)"})
    assert result.counts == {VerdictKind.PASS: 1}


def test_shards_on_two_mesh_dims(verify: Verifier) -> None:
    texts = ("R", "S(0)", "S(1)")
    letters = [(first, second) for first in texts for second in texts]
    combinations = [(w, ("R", "R")) for w in letters if w.count("S(0)") == 1]
    combinations += [(w, i) for w, i in product(letters, letters) if "S(0)" not in w]
    case = lookup((4, 2), (8, 4), None)
    result = verify(case, mesh="2x2", combinations=combinations, cotangents=[("S(1)", "S(0)")])
    assert result.counts == {VerdictKind.PASS: 4 + 4 * 9}


@pytest.mark.parametrize(
    ("weight", "indices", "phase", "message"),
    [
        ("(S(0), S(0))", "(R, R)", Phase.FORWARD, "MaskBuffer has been materialized with conflicting data"),
        ("(S(0), R)", "(R, S(0))", Phase.GATHER, "The shape of the mask"),
        ("(S(1), S(0))", "(S(1), R)", Phase.GATHER, "The shape of the mask"),
    ],
)
def test_row_wise_crashes_beside_another_cut(
    verify: Verifier, weight: str, indices: str, phase: Phase, message: str
) -> None:
    """One mask serves one mesh dim, and ids of the shape that they had when it was made. A defect of torch 2.13."""
    with pytest.raises(Crash, match=message) as caught:
        verify(lookup((4, 2), (8, 4), None), mesh="2x2", placements=[weight, indices], cotangents=None)
    assert caught.value.failure.verdict.phase is phase


def test_ids_are_masked_before_they_are_reduced(verify: Verifier) -> None:
    """A redistribution on the first mesh dim masks the parts of ids that the second has yet to reduce.

    A defect of torch 2.13.
    """
    placements = {"weight": "(S(0), R)", "input": "(R, P(min))"}
    with pytest.raises(WrongValue):
        verify(lookup((4, 2), (8, 4), None), mesh="2x2", placements=placements, cotangents=None)
    swapped = {"weight": "(R, S(0))", "input": "(P(min), R)"}
    result = verify(lookup((4, 2), (8, 4), None), mesh="2x2", placements=swapped, cotangents=None)
    assert result.counts == {VerdictKind.PASS: 1}
