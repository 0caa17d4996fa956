"""Our own strategy of embedding bags, as DTensor runs it through ``torch.nn.functional.embedding_bag``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import strategies
from strategies.embedding_bag import FAMILY
from strategies.embedding_bag.inputs import BAG, FORWARD_ONLY, SCALED, TRAINED
from strategies.tensors import filled
from verifier.calls.result import Crash, WrongGradient, WrongValue
from verifier.calls.verifier import Verifier
from verifier.core.case import MeshSpec, OpCase
from verifier.core.verdict import Phase, VerdictKind
from verifier.meshes.pool import PoolSet
from verifier.planning.families import DrawContext
from verifier.torch_internals.simulation import start_simulated_world

GLOO, SQUARE = "2", "simulated:2x2"
IDS = torch.tensor([0, 4, 3, 1, 1, 2, 4])
OFFSETS = torch.tensor([0, 0, 3, 4])  # an empty bag, and one of padding alone
DENSE = "aten._embedding_bag_dense_backward.default"
BAG_OF_EACH = torch.tensor([1, 1, 1, 2, 3, 3, 3])
COUNTS = torch.tensor([0, 3, 0, 2])  # of what is not row 1, the padding
WINNERS = torch.tensor([[0, 0], [4, 0], [0, 0], [2, 2]])  # as aten has them of TIED: row 0 for a bag without any
MODES = ("sum", "mean", "max")
TIED = torch.tensor([[1.0, 2.0], [2.0, 1.0], [2.0, 2.0], [1.0, 1.0], [2.0, 2.0]], dtype=torch.float64)


@pytest.fixture(scope="module")
def verify_ours(our_pools: PoolSet) -> Verifier:
    """Return a verifier whose ranks have our own strategies."""
    return Verifier(our_pools, MeshSpec.parse(GLOO))


@pytest.fixture
def world() -> Iterator[None]:
    """Make two ranks of this process, which move no data."""
    start_simulated_world(2)
    yield
    dist.destroy_process_group()


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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cut", ["(S(0), R)", "(S(0), S(0))", "(S(0), S(1))", "(S(1), S(1))", "(P(sum), S(0))"])
def test_ids_of_two_dims_that_are_cut_unevenly(verify_ours: Verifier, cut: str, mode: str) -> None:
    """DTensor cannot view them as one dim, or makes each rank view its ids as another number."""
    case = bag(mode, input=IDS[:6].reshape(3, 2), offsets=None, padding_idx=1, exact=False)
    result = verify_ours(case, mesh=SQUARE, placements={"input": cut, "weight": "(R, S(0))"})
    assert result.counts == {VerdictKind.PASS: 1}


def test_a_gradient_of_weights_of_samples_that_is_even_only_when_flat(verify_ours: Verifier) -> None:
    """Three ranks cut 6 positions evenly, and the 2 bags of 3 that they are do not have the gradient so."""
    samples = filled((2, 3), torch.float64, 1).requires_grad_()
    case = bag("sum", input=IDS[:6].reshape(2, 3), offsets=None, per_sample_weights=samples)
    cuts = ("R", "S(0)", "S(1)")
    combinations = [{"input": ids, "per_sample_weights": weights} for ids in cuts for weights in cuts]
    result = verify_ours(case, mesh="simulated:3", combinations=combinations)
    assert result.counts == {VerdictKind.PASS: 9}


def test_weights_of_samples_that_are_cut_unevenly(verify_ours: Verifier) -> None:
    """Each is replicated by an all-gather of its own, and the gradient is cut as the weights were."""
    samples = filled((3, 2), torch.float64, 1).requires_grad_()
    case = bag("sum", input=IDS[:6].reshape(3, 2), offsets=None, per_sample_weights=samples)
    combinations = [{"input": "S(0)", "per_sample_weights": "S(0)"}, {"per_sample_weights": "S(0)"}]
    result = verify_ours(case, combinations=combinations, trace=True)
    assert result.counts == {VerdictKind.PASS: 2}
    assert result.collectives(Phase.FORWARD) == {"all_gather_into_tensor": 3}


def test_the_gradient_of_weights_that_are_replicated_may_be_partial_of_another_kind(verify_ours: Verifier) -> None:
    samples = filled((3, 2), torch.float64, 1).requires_grad_()
    case = bag("sum", input=IDS[:6].reshape(3, 2), offsets=None, per_sample_weights=samples)
    where = {"weight": "(P(avg), R)", "input": "(R, S(0))", "per_sample_weights": "(P(product), S(0))"}
    result = verify_ours(case, mesh=SQUARE, placements=where)
    assert result.counts == {VerdictKind.PASS: 1}


@pytest.mark.parametrize("mode", MODES)
def test_bags_keep_their_positions_where_other_mesh_dims_cut_positions(verify_ours: Verifier, mode: str) -> None:
    """Reducing the third mesh dim gathers all ids, so that DTensor is free to cut them otherwise than the bags."""
    case = bag(mode, input=(torch.arange(24) * 7 % 5).reshape(8, 3), offsets=None, exact=False)
    result = verify_ours(case, mesh="simulated:2x2x2", placements={"input": "(S(1), S(0), P(sum))"})
    assert result.counts == {VerdictKind.PASS: 1}


def test_ids_are_cast_as_they_are_cut(verify_ours: Verifier) -> None:
    """To the dtype of the offsets, if that is the wider one."""
    case = bag("mean", input=IDS.to(torch.int32), trained=False, exact=False)
    placements = {"input": "(P(sum), S(0))", "weight": "(R, S(0))"}
    result = verify_ours(case, mesh=SQUARE, placements=placements)
    assert result.counts == {VerdictKind.PASS: 1}


@pytest.mark.parametrize("cut", ["(S(1), S(0), S(1))", "(S(1), S(0), S(0))"])
def test_ids_are_cast_as_they_are_cut_with_strides(verify_ours: Verifier, cut: str) -> None:
    """DTensor.from_local would take such shards for another order of plain ones."""
    ids = (torch.arange(64, dtype=torch.int32) * 7 % 5).reshape(8, 8)
    result = verify_ours(
        "bag_programs.flattened_first", filled((5, 3), torch.float64, 0), ids,
        mesh="simulated:2x2x2", placements=["(R, R, R)", cut], exact=True, record=False,
    )  # fmt: skip
    assert result.counts == {VerdictKind.PASS: 1}


def test_each_rank_cannot_flatten_its_own_uneven_shard(verify_ours: Verifier) -> None:
    weight = filled((5, 3), torch.float64, 0)
    where = {"placements": ["R", "S(0)"], "exact": True, "record": False}
    result = verify_ours("bag_programs.flattened_by_shards", weight, IDS[:6].reshape(2, 3), **where)
    assert result.counts == {VerdictKind.PASS: 1}
    with pytest.raises(WrongValue):
        verify_ours("bag_programs.flattened_by_shards", weight, IDS[:6].reshape(3, 2), **where)


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


def dense(
    mode: str,
    samples: torch.Tensor | None = None,
    counts: torch.Tensor = COUNTS,
    bags: torch.Tensor = BAG_OF_EACH,
    winners: torch.Tensor = WINNERS,
) -> OpCase:
    gradient = filled((4, 2), torch.float64, 1)
    args = (gradient, IDS, bags, counts, winners, 5, False, MODES.index(mode), samples, 1)
    return OpCase(DENSE, f"torch.ops.{DENSE}", args, {}, "embedding_bag", mode != "mean")


CUT_AS_BAGS = {"grad": "(S(0), S(1))", "bag_size": "(S(0), R)", "maximum_indices": "(S(0), S(1))"}


@pytest.mark.parametrize(
    ("mode", "placements", "output"),
    [
        *((mode, {"grad": "(R, S(1))"}, "(R, S(1))") for mode in MODES),
        *((mode, {"grad": "(S(0), R)"}, "(P(sum), R)") for mode in MODES),
        *((mode, CUT_AS_BAGS, "(P(sum), S(1))") for mode in MODES),
        *((mode, {"grad": "(P(sum), P(avg))"}, "(P(sum), P(avg))") for mode in MODES),
        ("sum", {"indices": "(S(0), R)"}, "(P(sum), R)"),
        ("mean", {"indices": "(S(0), S(0))", "offset2bag": "(S(0), S(0))"}, "(P(sum), P(sum))"),
        ("max", {"indices": "(S(0), S(0))", "offset2bag": "(S(0), R)"}, "(R, R)"),  # who has won is known to all
        ("max", {"maximum_indices": "(S(0), S(1))"}, "(P(sum), S(1))"),
    ],
)
def test_dense_gradient_by_itself(verify_ours: Verifier, mode: str, placements: dict[str, str], output: str) -> None:
    result = verify_ours(dense(mode), mesh=SQUARE, placements=placements, cotangents=None, trace=True)
    assert result.counts == {VerdictKind.PASS: 1}
    assert result.placements() == [output]
    assert result.collectives(Phase.FORWARD) == {}


@pytest.mark.parametrize("mode", MODES)
def test_dense_gradient_of_what_has_to_be_redistributed(verify_ours: Verifier, mode: str) -> None:
    grads = ["(S(0), S(0))", "(P(max), S(1))", "(_S(0, 2), S(0))"]
    ids = ["(R, R)", "(S(0), P(sum))"]
    saved = [("(R, R)", "(R, R)"), ("(S(0), R)", "(S(1), S(0))"), ("(P(sum), S(0))", "(P(max), S(1))")]
    combinations = [
        {"grad": g, "indices": i, "bag_size": b, "maximum_indices": m} for g, i, (b, m) in product(grads, ids, saved)
    ]
    result = verify_ours(dense(mode), mesh=SQUARE, combinations=combinations, cotangents=None)
    assert result.counts == {VerdictKind.PASS: len(combinations)}


def test_gradient_of_a_maximum_from_what_aten_has_saved(verify_ours: Verifier) -> None:
    """Winners of empty bags included, which autograd hands over as our own lookup has them."""
    gradient, *saved, rows, scale, mode, samples, padding_idx = dense("max").args
    ids, *rest = saved
    op = "aten._embedding_bag_backward.default"
    args = (gradient, ids, OFFSETS, *rest, rows, scale, mode, False, samples, padding_idx)
    case = OpCase(op, f"torch.ops.{op}", args, {}, "embedding_bag")
    combinations = [{"grad": "(S(0), S(1))"}, {"maximum_indices": "(R, S(0))"}, {"bag_size": "(S(0), R)"}]
    result = verify_ours(case, mesh=SQUARE, combinations=combinations, cotangents=None)
    assert result.counts == {VerdictKind.PASS: 3}


def test_dense_gradient_with_weights_of_samples(verify_ours: Verifier) -> None:
    combinations = [
        {"indices": "(S(0), R)", "per_sample_weights": "(S(0), R)"},
        {"grad": "(S(0), S(1))", "per_sample_weights": "(R, R)"},
        {"per_sample_weights": "(P(sum), P(avg))"},
    ]
    case = dense("sum", filled((7,), torch.float64, 2))
    result = verify_ours(case, mesh=SQUARE, combinations=combinations, cotangents=None)
    assert result.counts == {VerdictKind.PASS: 3}


@pytest.mark.parametrize("ids", ["(S(0), R)", "(S(0), S(0))", "(R, P(sum))"])
def test_frequencies_of_a_dense_gradient_are_those_of_all_ranks(verify_ours: Verifier, ids: str) -> None:
    args = (filled((4, 2), torch.float64, 1), IDS, BAG_OF_EACH)
    combination = ["(S(0), S(1))", ids, "(R, R)"]
    result = verify_ours("bag_programs.scaled_gradient", *args, mesh=SQUARE, placements=combination)
    assert result.counts == {VerdictKind.PASS: 1}


def test_a_dense_gradient_of_a_maximum_is_not_partial_by_ids(verify_ours: Verifier) -> None:
    args = (filled((4, 2), torch.float64, 1), IDS, BAG_OF_EACH, COUNTS, WINNERS)
    where = {"mesh": SQUARE, "placements": ["(R, R)", "(R, S(0))", *["(R, R)"] * 3], "exact": True, "record": False}
    assert verify_ours("bag_programs.gradient_of_maximum", *args, **where).counts == {VerdictKind.PASS: 1}
    with pytest.raises(WrongValue):
        verify_ours("bag_programs.gradient_of_maximum_by_ids", *args, **where)
    where["placements"] = ["(R, R)"] * 5
    with pytest.raises(WrongValue):  # row 0 has won no bag that is empty
        verify_ours("bag_programs.gradient_of_empty_bags", *args, **where)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (dense("mean", torch.ones(7, dtype=torch.float64)), "per_sample_weights are not supported in mode mean"),
        (dense("max", torch.ones(7, dtype=torch.float64)), "per_sample_weights are not supported in mode max"),
        (dense("sum", torch.ones(7)), "per_sample_weights of torch.float32 and a gradient of torch.float64"),
        (dense("sum", torch.ones(6, dtype=torch.float64)), "per_sample_weights has to be of shape [7], got [6]"),
        (dense("sum", bags=BAG_OF_EACH[:3]), "offset2bag has to be of shape [7], got [3]"),
        (dense("mean", counts=COUNTS[:0]), "bag_size has to be of shape [4], got [0]"),
        (dense("max", winners=WINNERS[:, :1]), "maximum_indices has to be of shape [4, 2], got [4, 1]"),
    ],
)
def test_dense_gradients_that_no_rule_covers_are_refused_in_words(world: None, case: OpCase, message: str) -> None:
    """Asked directly, without the local call: aten's kernels read past the end of what is too short."""
    mesh = init_device_mesh("cpu", (2,))
    args = [
        DTensor.from_local(arg, mesh, [Replicate()], run_check=False) if isinstance(arg, torch.Tensor) else arg
        for arg in case.args
    ]
    with strategies.installed(), pytest.raises(RuntimeError, match=re.escape(message)):
        torch.ops.aten._embedding_bag_dense_backward.default(*args)


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


@pytest.mark.parametrize("mode", MODES)
def test_offsets_that_descend_raise(verify_ours: Verifier, mode: str) -> None:
    """Aten raises in float32, and in float64 makes of them what it likes."""
    with pytest.raises(Crash, match=r"every rank raised RuntimeError: offsets have to ascend, got \[0, 5, 2\]"):
        verify_ours(bag(mode, offsets=torch.tensor([0, 5, 2])), placements={"offsets": "S(0)"})


def test_drawn_calls(verify_ours: Verifier) -> None:
    mesh = MeshSpec.parse(SQUARE)
    context = DrawContext(mesh, (torch.float64, torch.float16), (TRAINED, FORWARD_ONLY))

    @settings(max_examples=12, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=FAMILY.cases(context), seed=st.integers(0, 99))
    def check(case: OpCase, seed: int) -> None:
        verify_ours(case, mesh=mesh, cap=4, allow_nothing=True)

    check()
