"""Our own strategy of embedding bags, as DTensor runs it through ``torch.nn.functional.embedding_bag``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strategies.embedding_bag import FAMILY
from strategies.embedding_bag.inputs import BAG, FORWARD_ONLY, SCALED, TRAINED
from strategies.tensors import filled
from verifier.cases import MeshSpec, OpCase, Phase, VerdictKind
from verifier.families import DrawContext
from verifier.meshes import Pool, PoolSet
from verifier.verification import WrongGradient
from verifier.verifying import Verifier

GLOO, SQUARE = "2", "simulated:2x2"
IDS = torch.tensor([0, 4, 3, 1, 1, 2, 4])
OFFSETS = torch.tensor([0, 0, 3, 4])  # an empty bag, and one of padding alone
TIED = torch.tensor([[1.0, 2.0], [2.0, 1.0], [2.0, 2.0], [1.0, 1.0], [2.0, 2.0]], dtype=torch.float64)


@pytest.fixture(scope="module")
def verify_ours() -> Iterator[Verifier]:
    """Return a verifier whose ranks have our own strategies."""
    pools = PoolSet(lambda key: Pool(key, ["strategies.install"]))
    yield Verifier(pools, MeshSpec.parse(GLOO))
    pools.close()


def bag(mode: str, *, trained: bool = True, call: str = BAG, exact: bool = True, **options: object) -> OpCase:
    weight = filled((5, 3), torch.float64, 0).requires_grad_(trained)
    kwargs = {"weight": weight, "input": IDS, "offsets": OFFSETS, "mode": mode, **options}
    return OpCase(TRAINED if trained else FORWARD_ONLY, call, (), kwargs, "embedding_bag", exact and mode != "mean")


ROWS, COLUMNS = {"weight": "S(0)"}, {"weight": "S(1)"}
POSITIONS, BAGS = {"input": "S(0)"}, {"offsets": "S(0)"}
REDUCE, GATHER = "all_reduce", "all_gather_into_tensor"


@pytest.mark.parametrize(
    ("mode", "trained", "placements", "padding_idx", "output", "collectives"),
    [
        ("sum", True, ROWS, 1, "P(sum)", {}),
        ("mean", True, ROWS, -1, "P(sum)", {}),
        ("max", False, ROWS, 1, "P(max)", {}),
        ("max", True, ROWS, 1, "R", {REDUCE: 2}),  # the maximum, and who has it
        ("sum", True, COLUMNS, 1, "S(1)", {}),
        ("max", True, COLUMNS, 1, "S(1)", {}),
        ("sum", True, POSITIONS, 1, "P(sum)", {}),
        ("mean", True, POSITIONS, None, "P(sum)", {}),
        ("mean", True, POSITIONS, 1, "P(sum)", {REDUCE: 1}),  # how many ids of each bag are no padding
        ("sum", True, BAGS, 1, "S(0)", {GATHER: 1}),  # where the last bag of a rank stops
        ("max", True, BAGS, 1, "S(0)", {GATHER: 1}),
        ("sum", True, {"weight": "P(sum)"}, 1, "P(sum)", {}),
        ("max", False, {"weight": "P(max)"}, 1, "P(max)", {}),
    ],
)
def test_no_more_is_communicated_than_has_to_be(
    verify_ours: Verifier,
    mode: str,
    trained: bool,
    placements: dict[str, str],
    padding_idx: int | None,
    output: str,
    collectives: dict[str, int],
) -> None:
    options = {} if padding_idx is None else {"padding_idx": padding_idx}
    case = bag(mode, trained=trained, **options)
    result = verify_ours(case, placements=placements, cotangents=["S(0)"] if trained else None, trace=True)
    assert result.counts == {VerdictKind.PASS: 1}
    assert result.placements() == [output]
    assert result.collectives(Phase.FORWARD) == collectives


@pytest.mark.parametrize("placements", [POSITIONS, BAGS, ROWS])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_ids_out_of_range_raise_on_every_rank(verify_ours: Verifier, mode: str, placements: dict[str, str]) -> None:
    """The last rank alone has the bad id of ids that are cut."""
    case = bag(mode, input=torch.tensor([0, 4, 3, 1, 1, 2, 5]), padding_idx=1)
    result = verify_ours(case, placements={"weight": "R", "input": "R", "offsets": "R"} | placements)
    assert result.counts == {VerdictKind.PASS: 1}


@pytest.mark.parametrize(
    "options",
    [
        {"input": IDS.float()},
        {"offsets": OFFSETS.float()},
        {"weight": torch.ones(1, 3), "input": IDS * 0, "per_sample_weights": torch.ones(7, dtype=torch.float64)},
    ],
)
def test_dtypes_that_aten_does_not_take_raise_on_every_rank(verify_ours: Verifier, options: dict[str, object]) -> None:
    result = verify_ours(bag("sum", trained=False, **options), placements={"weight": "S(0)"})
    assert result.counts == {VerdictKind.PASS: len(result.observations)}


def test_ids_of_another_dtype_than_offsets_become_theirs(verify_ours: Verifier) -> None:
    result = verify_ours(bag("sum", input=IDS.short()), placements={"weight": "S(0)"}, cotangents=None)
    assert result.counts == {VerdictKind.PASS: len(result.observations)}


def test_a_mean_takes_gradients_with_strides(verify_ours: Verifier) -> None:
    result = verify_ours(bag("mean"), mesh=SQUARE, placements=["(R, R)"] * 3, cotangents=[("(_S(0, 2), S(0))")])
    assert result.counts == {VerdictKind.PASS: 1}


def test_a_sparse_gradient_is_refused_before_anything_is_looked_up(verify_ours: Verifier) -> None:
    result = verify_ours(bag("sum", sparse=True), placements={"weight": "S(0)"}, allow_nothing=True)
    assert set(result.counts) == {VerdictKind.UNSUPPORTED}


def test_ids_of_two_dims_that_are_cut_with_their_bags(verify_ours: Verifier) -> None:
    ids = IDS[:6].reshape(2, 3)
    case = bag("sum", input=ids, offsets=None, per_sample_weights=filled((2, 3), torch.float64, 1).requires_grad_())
    placements = {"input": "S(0)", "per_sample_weights": "S(0)"}
    result = verify_ours(case, placements=placements, trace=True)
    assert result.counts == {VerdictKind.PASS: 1}
    assert result.placements() == ["S(0)"]
    assert result.collectives(Phase.FORWARD) == {}


@pytest.mark.parametrize("cut", ["(R, R)", "(S(0), R)", "(S(1), S(0))"])
def test_ids_of_two_dims_without_elements(verify_ours: Verifier, cut: str) -> None:
    """Torch's own rule of flattening them never comes to its end."""
    case = bag("sum", input=torch.empty(0, 3, dtype=torch.int64), offsets=None)
    result = verify_ours(case, mesh=SQUARE, placements={"weight": "(S(0), S(1))", "input": cut}, allow_nothing=True)
    assert result.counts == {VerdictKind.INCONCLUSIVE: 1}  # no bags say nothing of values
    assert not any(report.raised for report in result.observations[0].reports if report is not None)


def test_ids_of_two_dims_that_two_mesh_dims_cut_unevenly_are_refused(verify_ours: Verifier) -> None:
    """Torch's rule to flatten them makes each rank view its ids as another number."""
    case = bag("sum", input=IDS[:6].reshape(2, 3), offsets=None)
    result = verify_ours(case, mesh=SQUARE, placements={"input": "(S(0), S(0))"}, allow_nothing=True)
    assert set(result.counts) == {VerdictKind.UNSUPPORTED}


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_every_cut_of_table_ids_and_bags(verify_ours: Verifier, mode: str) -> None:
    table = ["(S(0), S(0))", "(S(0), S(1))", "(R, S(0))"]
    ids = ["(R, R)", "(S(0), R)", "(S(0), S(0))"]
    bags = ["(R, R)", "(S(0), R)", "(R, S(0))"]
    combinations = [{"weight": w, "input": i, "offsets": o} for w, i, o in product(table, ids, bags)]
    result = verify_ours(bag(mode, padding_idx=1), mesh=SQUARE, combinations=combinations, cotangents=[("S(1)", "R")])
    assert result.counts == {VerdictKind.PASS: len(combinations)}


def test_weights_of_samples(verify_ours: Verifier) -> None:
    samples = filled((7,), torch.float64, 1).requires_grad_()
    case = bag("sum", per_sample_weights=samples, padding_idx=-4)
    combinations = [
        {"weight": "(S(0), R)", "input": "(R, S(0))", "per_sample_weights": "(R, S(0))"},
        {"weight": "(R, P(sum))", "per_sample_weights": "(P(avg), R)"},
        {"weight": "(P(sum), P(sum))", "per_sample_weights": "(P(sum), P(sum))"},
        {"weight": "(S(1), S(0))", "offsets": "(S(0), R)"},
    ]
    result = verify_ours(case, mesh=SQUARE, combinations=combinations)
    assert result.counts == {VerdictKind.PASS: 4}


@pytest.mark.parametrize("ids", ["(S(0), R)", "(S(0), S(0))", "(P(sum), S(0))"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_frequencies_are_those_of_all_ranks(verify_ours: Verifier, mode: str, ids: str) -> None:
    case = bag(mode, call=SCALED, exact=False, padding_idx=1)
    result = verify_ours(case, mesh=SQUARE, placements={"input": ids, "weight": "(S(1), R)"})
    assert result.counts == {VerdictKind.PASS: 1}


def test_inference_mode_and_module(verify_ours: Verifier) -> None:
    weight = filled((5, 3), torch.float64, 0)
    result = verify_ours("bag_programs.inference", weight, IDS, OFFSETS, placements=["S(0)", "R", "R"])
    assert result.placements() == ["P(sum)"]
    weight, ids = TIED.clone().requires_grad_(), IDS[:6].reshape(3, 2)
    result = verify_ours("bag_programs.module", weight, ids, placements=["S(0)", "R"], exact=True)
    assert result.counts == {VerdictKind.PASS: 1}


@pytest.mark.parametrize("wrong", ["maximum_of_each_rank", "maximum_without_tie_break", "maximum_of_last"])
def test_a_maximum_has_one_winner(verify_ours: Verifier, wrong: str) -> None:
    weight = TIED.clone().requires_grad_()
    where = {"mesh": SQUARE, "placements": ["(R, S(0))", "(R, R)", "(R, R)"], "exact": True, "record": False}
    assert verify_ours("bag_programs.maximum", weight, IDS, OFFSETS, **where).counts == {VerdictKind.PASS: 1}
    with pytest.raises(WrongGradient):
        verify_ours(f"bag_programs.{wrong}", weight, IDS, OFFSETS, **where)


@pytest.mark.parametrize(
    ("offsets", "message"), [([1, 2], "has to be 0, got 1"), ([0, 8], "is 8, there are 7 indices")]
)
def test_offsets_that_fit_no_indices_raise(verify_ours: Verifier, offsets: list[int], message: str) -> None:
    result = verify_ours(bag("sum", offsets=torch.tensor(offsets)), placements={"offsets": "S(0)"})
    (observation,) = result.observations
    raised = [report.raised for report in observation.reports if report is not None]
    assert len(raised) == 2
    assert all(one is not None and message in one.message for one in raised)


def test_drawn_calls(verify_ours: Verifier) -> None:
    mesh = MeshSpec.parse(SQUARE)
    context = DrawContext(mesh, (torch.float64, torch.float16), (TRAINED, FORWARD_ONLY))

    @settings(max_examples=12, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=FAMILY.cases(context), seed=st.integers(0, 99))
    def check(case: OpCase, seed: int) -> None:
        verify_ours(case, mesh=mesh, cap=4, allow_nothing=True)

    check()
