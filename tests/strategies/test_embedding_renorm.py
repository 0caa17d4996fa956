"""``max_norm`` under our own strategies: rows of a table are scaled in place, alike wherever they are."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from strategies.embedding.inputs import EMBEDDING, LOOKUP
from strategies.models.losses import next_token_loss
from strategies.models.plans import embedding_parallel
from strategies.models.transformer import Transformer, TransformerSize
from strategies.tensors import filled
from verifier.calls.result import VerificationError
from verifier.calls.verifier import Verifier
from verifier.core.case import MeshSpec, OpCase
from verifier.core.verdict import Phase, VerdictKind
from verifier.meshes.pool import PoolSet
from verifier.modules.verify import verify_module

GLOO, SQUARE = "2", "simulated:2x2"
IDS = torch.tensor([[0, 4, 3], [4, 1, 0]])


@pytest.fixture(scope="module")
def verify_ours(our_pools: PoolSet) -> Verifier:
    return Verifier(our_pools, MeshSpec.parse(GLOO))


def lookup(norm_type: float, dtype: torch.dtype = torch.float64, call: str = LOOKUP, **more: object) -> OpCase:
    weight = filled((5, 3), dtype, 0).requires_grad_()
    with torch.no_grad():
        weight[4] = 0  # a row that no norm can be too large for
    kwargs = {"weight": weight, "input": IDS, "max_norm": 3.0, "norm_type": norm_type, **more}
    return OpCase(EMBEDDING, call, (), kwargs, "embedding", exact=False)


@pytest.mark.parametrize("norm_type", [0.0, 0.5, 1.0, 2.0, 3.0, math.inf, -math.inf])
def test_every_norm_under_every_cut(verify_ours: Verifier, norm_type: float) -> None:
    rows = ["(S(0), S(0))", "(S(0), S(1))", "(S(1), S(0))", "(S(1), S(1))", "(R, S(1))", "(R, R)"]
    combinations = [{"weight": placements, "input": ids} for placements in rows for ids in ("(R, R)", "(S(1), S(0))")]
    result = verify_ours(lookup(norm_type), mesh=SQUARE, combinations=combinations, cotangents=None)
    assert result.counts == {VerdictKind.PASS: len(combinations)}


@pytest.mark.parametrize(
    ("weight", "ids", "collectives"),
    [
        ("S(0)", "R", {}),
        ("R", "R", {}),
        ("S(1)", "R", {"all_reduce": 1}),  # a number for each different id
        ("R", "S(0)", {"all_gather_into_tensor": 1}),
    ],
)
def test_what_is_communicated(verify_ours: Verifier, weight: str, ids: str, collectives: dict[str, int]) -> None:
    case = lookup(2.0, torch.bfloat16)
    result = verify_ours(case, placements={"weight": weight, "input": ids}, cotangents=None, trace=True)
    assert result.counts == {VerdictKind.PASS: 1}
    assert result.collectives(Phase.FORWARD) == collectives


def test_embedding_bag(verify_ours: Verifier) -> None:
    case = lookup(2.0, call="torch.nn.functional.embedding_bag")
    result = verify_ours(case, mesh=SQUARE, placements={"weight": "(S(0), S(1))"}, cotangents=None)
    assert result.counts == {VerdictKind.PASS: 1}


@pytest.mark.parametrize("norm_type", [1.0, 2.0])
def test_the_module(verify_ours: Verifier, norm_type: float) -> None:
    weight = filled((5, 3), torch.float64, 0)
    assert bool((weight.norm(norm_type, dim=1)[IDS] > 3).any())
    combinations = [["(S(0), S(1))", "(R, R)"], ["(R, S(0))", "(S(0), R)"]]
    for combination in combinations:
        found = verify_ours("renorm_programs.module", weight, IDS, norm_type, mesh=SQUARE, placements=combination)
        assert found.counts == {VerdictKind.PASS: 1}


def bounded(tied: bool) -> Transformer:
    """Return a model that scales rows of its table of tokens, for which DTensor itself has no rule."""
    model = Transformer(TransformerSize(vocabulary=13, width=15, heads=3, layers=1, tied=tied))
    model.tokens.max_norm = 1.0
    return model


@pytest.mark.parametrize("tied", [True, False])  # cut by rows or by columns
def test_whole_model(our_pools: PoolSet, tied: bool) -> None:
    ids, following = torch.randint(0, 13, (2, 4, 7), generator=torch.Generator().manual_seed(7))
    result = verify_module(
        partial(bounded, tied),
        embedding_parallel,
        [ids],
        targets=[following],
        loss=next_token_loss,
        mesh=GLOO,
        steps=2,
        pools=our_pools,
    )
    assert result.losses == pytest.approx(result.local_losses, rel=1e-12)
    assert result.collectives_of("tokens", "forward")["all_reduce"] == 1  # of the rows, or of norms


def test_a_partial_table_is_refused(verify_ours: Verifier) -> None:
    result = verify_ours(lookup(2.0), placements={"weight": "P(sum)"}, allow_nothing=True)
    assert result.counts == {VerdictKind.UNSUPPORTED: 1}


@pytest.mark.parametrize("weight", ["(_S(0, 2), R)", "(_S(1, 2), R)", "(_S(0, 2), S(1))", "(_S(1, 2), S(0))"])
def test_strides_that_leave_no_span_of_rows_are_refused(verify_ours: Verifier, weight: str) -> None:
    result = verify_ours(lookup(2.0), mesh=SQUARE, placements={"weight": weight}, allow_nothing=True)
    assert result.counts == {VerdictKind.UNSUPPORTED: 1}


@pytest.mark.parametrize("weight", ["(_S(0, 2), S(0))", "(_S(1, 2), S(1))"])
def test_strides_that_are_an_order_of_cuts_are_none(verify_ours: Verifier, weight: str) -> None:
    """Tables of which one mesh dim is gathered where they are used are cut so."""
    result = verify_ours(lookup(2.0), mesh=SQUARE, placements={"weight": weight}, cotangents=None)
    assert result.counts == {VerdictKind.PASS: 1}


@pytest.mark.parametrize(
    ("wrong", "norm_type", "placements"),
    [
        ("norm_of_own_columns", 2.0, ["(R, S(1))", "(R, R)"]),
        ("largest_entries_added", math.inf, ["(S(1), R)", "(R, R)"]),
        ("rows_of_own_ids", 2.0, ["(R, R)", "(S(0), R)"]),
    ],
)
def test_what_is_wrong_is_caught(verify_ours: Verifier, wrong: str, norm_type: float, placements: list[str]) -> None:
    weight = filled((5, 3), torch.float64, 0)
    with pytest.raises(VerificationError, match="got"):
        verify_ours(
            f"renorm_programs.{wrong}", weight, IDS, norm_type, mesh=SQUARE, placements=placements, record=False
        )
