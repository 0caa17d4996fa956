"""Our own strategies of embeddings, as DTensor runs them."""

from __future__ import annotations

import unittest
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import rank_cases
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import strategies
from strategies.embedding import FAMILY
from strategies.embedding.inputs import BACKWARD, EMBEDDING, LOOKUP
from strategies.tensors import filled
from verifier.calls.verifier import Verifier
from verifier.core.case import MeshSpec, OpCase
from verifier.core.verdict import Phase, VerdictKind
from verifier.meshes.pool import PoolSet
from verifier.meshes.tasks import Task
from verifier.planning.families import DrawContext

GLOO, SQUARE, EIGHT = "3", "simulated:2x2", "simulated:8"


@pytest.fixture(scope="module")
def verify_ours(our_pools: PoolSet) -> Verifier:
    return Verifier(our_pools, MeshSpec.parse(GLOO))


def called(pools: PoolSet, task: str) -> tuple[Any, ...]:
    """Return what each of three ranks returns of a function in ``embedding_tasks``."""
    mesh = MeshSpec.parse(GLOO)
    outcome = pools.of(mesh).call(Task(f"embedding_tasks.{task}", (), mesh, limit=120))
    assert outcome.ok, outcome
    return outcome.returned


def lookup(rows: int, ids: torch.Tensor, call: str = LOOKUP, **options: object) -> OpCase:
    weight = filled((rows, 3), torch.float64, 0).requires_grad_()
    return OpCase(EMBEDDING, call, (), {"weight": weight, "input": ids, **options}, "embedding")


def some_ids(rows: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, rows, shape, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("rows", [1, 2, 5, 7, 17])
def test_row_wise_where_ranks_have_no_row(verify_ours: Verifier, rows: int) -> None:
    """A defect of torch's own strategy in 2.13."""
    result = verify_ours(lookup(rows, some_ids(rows, 6)), mesh=EIGHT, placements={"weight": "S(0)"})
    assert result.counts == {VerdictKind.PASS: 1}
    assert result.placements() == ["P(sum)"]


@pytest.mark.parametrize("program", ["used_twice", "two_pending", "shared_table"])
def test_results_are_used_more_than_once(verify_ours: Verifier, program: str) -> None:
    """Torch's own mask is released by the first reduction, and shared by lookups of the same shapes."""
    ids = some_ids(7, 2, 4)
    kwargs = {"used_twice": {}, "two_pending": {"second": ids.flip(1)}, "shared_table": {"positions": torch.arange(4)}}
    case = lookup(7, ids, f"strategies.embedding.programs.{program}", padding_idx=4, **kwargs[program])
    rows = ["(S(0), R)", "(R, S(0))", "(S(0), S(0))", "(S(0), S(1))", "(S(1), S(0))"]
    result = verify_ours(case, mesh=SQUARE, combinations=[{"weight": placements} for placements in rows])
    assert result.counts == {VerdictKind.PASS: len(rows)}


@pytest.mark.parametrize("program", ["normalized", "filled", "filled_with_a_tensor", "clamped", "clamped_to_a_tensor"])
@pytest.mark.parametrize("table", ["(S(0), R)", "(S(0), S(1))", "(P(avg), S(0))", "(P(product), P(product))"])
def test_results_may_be_written_to(verify_ours: Verifier, program: str, table: str) -> None:
    """Torch's own rules fill every part of a Partial with the whole value, or refuse: then a norm has no gradient."""
    case = replace(lookup(7, some_ids(7, 2, 4), f"lookup_programs.{program}"), exact=program != "normalized")
    result = verify_ours(case, mesh=SQUARE, placements={"weight": table})
    assert result.counts == {VerdictKind.PASS: 1}


def test_strided_shards_may_be_written_to(our_pools: PoolSet) -> None:
    assert called(our_pools, "filled_with_strides") == ([True] * 4,) * 3


def test_views_of_copies_are_not_filled(our_pools: PoolSet) -> None:
    """Torch refuses ``table[0] = 3.0`` for want of a strategy, so that our rules must not lose it."""
    assert called(our_pools, "filled_through_views") == ([True] * 5,) * 3


def test_what_is_known_of_shapes_alone(our_pools: PoolSet) -> None:
    assert called(our_pools, "without_values") == ([[7, 3], [5, 3], [4, 3], [4, 3], [4, 3]],) * 3


@pytest.mark.parametrize(("tables", "ids"), [("R", "S(0)"), ("S(1)", "R"), ("S(0)", "R")])
def test_what_is_remembered_of_one_lookup_does_for_no_other(verify_ours: Verifier, tables: str, ids: str) -> None:
    weights = {
        name: filled((rows, 3), torch.float64, rows).requires_grad_() for name, rows in (("weight", 5), ("taller", 8))
    }
    case = OpCase(EMBEDDING, "lookup_programs.of_two_tables", (), {**weights, "input": some_ids(5, 6)}, "embedding")
    placements = {"weight": tables, "taller": tables, "input": ids}
    for _ in range(2):
        result = verify_ours(case, mesh=GLOO, placements=placements)
        assert result.counts == {VerdictKind.PASS: 1}


def test_what_is_remembered_of_one_mesh_does_for_no_other() -> None:
    """Meshes of later threads, in which ranks stand elsewhere, are equal to those of earlier ones."""
    with strategies.installed():
        for _ in range(6):
            result = unittest.TestResult()
            rank_cases.Threads("row_wise_lookup").run(result)
            assert result.wasSuccessful(), result.failures


def test_what_a_call_before_was_allowed_is_asked_again(our_pools: PoolSet) -> None:
    refused = "a sparse gradient of aten.embedding is not supported: DTensor has no sparse layout"
    assert called(our_pools, "like_a_call_before") == ([True, True, refused, refused, True, True, True, True],) * 3


def test_ranks_that_are_in_no_mesh_know_what_the_others_do(our_pools: PoolSet) -> None:
    first, second, outside = called(our_pools, "on_a_part")
    assert first == second == outside
    assert first == [([4 - last, 3], "(Shard(dim=1),)") for _ in range(3) for last in (False, True)]


def test_plain_tensors_are_replicated_where_that_is_allowed(our_pools: PoolSet) -> None:
    assert called(our_pools, "plain_arguments") == ([True, True],) * 3


def test_a_row_wise_lookup_compiles_to_one_graph(our_pools: PoolSet) -> None:
    assert called(our_pools, "compiled") == ([True, True],) * 3


def test_bags_break_the_graph_and_are_right(our_pools: PoolSet) -> None:
    assert called(our_pools, "compiled_bags") == ({mode: [True, True] for mode in ("sum", "mean", "max")},) * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16])
def test_ids_that_are_no_integers_raise_on_every_rank(verify_ours: Verifier, dtype: torch.dtype) -> None:
    """Also on one without a row, which looks nothing up."""
    result = verify_ours(lookup(2, some_ids(2, 4).to(dtype)), placements={"weight": "S(0)", "input": "R"})
    assert result.counts == {VerdictKind.PASS: 1}


def test_every_cut_of_table_and_ids(verify_ours: Verifier) -> None:
    letters = list(product(("R", "S(0)", "S(1)"), repeat=2))
    combinations = [{"weight": weight, "input": ids} for weight, ids in product(letters, letters)]
    case = lookup(5, some_ids(5, 3, 4), padding_idx=-1)
    result = verify_ours(case, mesh=SQUARE, combinations=combinations, cotangents=[("P(sum)", "S(1)")])
    assert result.counts == {VerdictKind.PASS: len(combinations)}


@pytest.mark.parametrize(
    ("weight", "ids", "output"),
    [("S(0)", "R", "P(sum)"), ("S(1)", "R", "S(2)"), ("R", "S(0)", "S(0)"), ("R", "S(1)", "S(1)"),
     ("P(sum)", "R", "P(sum)"), ("P(avg)", "R", "P(avg)"), ("P(max)", "R", "P(max)")],
)  # fmt: skip
def test_rules_communicate_nothing(verify_ours: Verifier, weight: str, ids: str, output: str) -> None:
    case = lookup(4, some_ids(4, 2, 5))
    result = verify_ours(case, placements={"weight": weight, "input": ids}, cotangents=["R"], trace=True)
    assert result.counts == {VerdictKind.PASS: 1}
    assert result.placements() == [output]
    assert result.collectives(Phase.FORWARD) == {}


@pytest.mark.parametrize(
    ("rows", "collective"),
    # as many ids as a row: their all-gather is less than to reduce the counts; with a table of one row it is more
    [(5, "all_gather_into_tensor"), (1, "all_reduce")],
)
@pytest.mark.parametrize("padding_idx", [-1, 0])
def test_frequencies_take_one_collective(verify_ours: Verifier, rows: int, collective: str, padding_idx: int) -> None:
    ids = some_ids(rows, 4, 2)
    gradient = filled((4, 2, 3), torch.float64, 1)
    case = OpCase(
        BACKWARD, f"torch.ops.{BACKWARD}", (gradient, ids, rows, padding_idx, True), {}, "embedding", exact=False
    )
    result = verify_ours(case, placements=["S(0)", "S(0)"], trace=True, allow_nothing=rows == 1 and padding_idx == 0)
    assert result.placements() == ["P(sum)"]
    assert result.collectives(Phase.FORWARD) == {collective: 1}


@pytest.mark.parametrize("ids", ["R", "S(0)"])
def test_ids_out_of_range_raise_on_every_rank(verify_ours: Verifier, ids: str) -> None:
    """Under a row-wise table all ranks see all ids before any of them goes on."""
    case = lookup(4, torch.tensor([0, 1, 2, 4]))
    result = verify_ours(case, placements={"weight": "S(0)", "input": ids})
    assert result.counts == {VerdictKind.PASS: 1}
    (observation,) = result.observations
    raised = [report.raised for report in observation.reports if report is not None]
    assert [(one.type, one.phase) for one in raised if one is not None] == [("IndexError", Phase.FORWARD)] * 3


@pytest.mark.parametrize(("text", "calls", "cap"), [(SQUARE, 12, 4), ("simulated:2x2x2", 6, 2)])
def test_drawn_calls(verify_ours: Verifier, text: str, calls: int, cap: int) -> None:
    mesh = MeshSpec.parse(text)
    context = DrawContext(mesh, (torch.float64, torch.bfloat16), (EMBEDDING, BACKWARD))

    @settings(max_examples=calls, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=FAMILY.cases(context), seed=st.integers(0, 99))
    def check(case: OpCase, seed: int) -> None:
        verify_ours(case, mesh=mesh, cap=cap, allow_nothing=True)

    check()
