"""Tables in TorchRec's layouts on real ranks: what they hold, lookups, a step, checkpoints; and each fault by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from strategies.layouts.tables import LayoutOptions
from strategies.tensors import filled
from strategies.torchrec.family import FAMILY, SOURCE, training_case
from strategies.torchrec.layouts import LAYOUTS
from verifier.calls.result import Crash, NothingVerified, WrongValue
from verifier.calls.verifier import Verifier
from verifier.core.case import MeshSpec, OpCase
from verifier.core.verdict import VerdictKind
from verifier.meshes.pool import PoolSet
from verifier.planning.families import DrawContext

TABLE = filled((6, 2), torch.float32, 0)
FOUR = "4"
DRAWING = settings(
    max_examples=12,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def on_two(mesh_pools: PoolSet) -> Verifier:
    """Return a verifier whose 2 ranks are those of all tests here, and started once; those of one test are 4."""
    return Verifier(mesh_pools, MeshSpec.parse("2"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_table_in_a_layout_is_trained_and_saved_as_a_whole_one(on_two: Verifier, name: str) -> None:
    assert on_two(SOURCE.case(name, LayoutOptions(5, 4, 2)), placements=["R"] * 4).counts == {VerdictKind.PASS: 1}


def test_layouts_over_four_ranks_and_their_checkpoints_into_others(on_two: Verifier) -> None:
    shape, lengths = (5, 4), [3, 0, 2, 1, 4]
    chain: list[tuple[str, dict[str, object]]] = [
        ("row-wise-even", {}),
        ("row-wise-uneven", {"splits": [1, 3, 0, 1]}),
        ("column-wise", {"owners": [0, 2, 0, 1]}),
        ("grid", {"ranks_per_host": 2, "owners": [1, 0]}),
        ("table-row-wise", {"ranks_per_host": 2, "owners": [1]}),
        ("data-parallel", {}),
        ("table-wise", {"owners": [3]}),
        ("table-column-wise", {"ranks_per_host": 2, "owners": [3, 2]}),
    ]
    assert {name for name, _ in chain} == LAYOUTS.keys()
    for position, layout in enumerate(chain):
        target, mode = chain[(position + 1) % len(chain)], ("sum", "mean")[position % 2]
        case = training_case(list(layout), list(target), shape, lengths, position, mode)
        assert on_two(case, mesh=FOUR, placements=["R"] * 4).counts == {VerdictKind.PASS: 1}, layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_optimizer_with_a_state(on_two: Verifier, dtype: torch.dtype) -> None:
    """Its values have as many digits as the dtype, so they tell whether the checkpoint keeps them all."""
    case = training_case(["table-wise", {}], ["row-wise-even", {}], (5, 4), [2, 3], 1, "sum", "adagrad")
    arguments = dict(case.kwargs)
    for name in ("table", "cotangent"):
        arguments[name] = arguments[name].to(dtype)  # type: ignore[attr-defined]
    assert on_two(replace(case, kwargs=arguments), placements=["R"] * 4).counts == {VerdictKind.PASS: 1}


def test_layouts_that_are_drawn_pass_and_fail_with_a_chunk_less(on_two: Verifier) -> None:
    """What is drawn at all is a test of its own, which needs no ranks."""
    passed: list[OpCase] = []

    @DRAWING
    @given(case=FAMILY.cases(DrawContext(MeshSpec.parse(FOUR), FAMILY.dtypes, FAMILY.ops)))
    def check(case: OpCase) -> None:
        assert on_two(case, mesh=FOUR, placements=["R"] * 4).counts == {VerdictKind.PASS: 1}
        passed.append(case)
        arguments = {**case.kwargs, "fault": "a chunk less"}
        wrong = replace(case, call="layout_programs.trained_wrongly", kwargs=arguments)
        with pytest.raises(Crash, match="LayoutError: a chunk is missing: "):
            on_two(wrong, mesh=FOUR, placements=["R"] * 4, record=False)

    check()
    assert len({case.op for case in passed}) > 3


# --------------------------------------------------------------------------------------------------------------- faults
@pytest.mark.parametrize(
    ("fault", "plan", "message"),
    [
        ("overlap", False, "chunks overlap: [1:3, 0:2] is held by rank 0 ([0:3, 0:2]) and rank 1 ([1:6, 0:2])"),
        ("missing", False, "a chunk is missing: [3:6, 0:2] is held by no rank"),
        (
            "disagreement",
            True,
            "ranks disagree: layout is row-wise-uneven of [6, 2] as [0:1, 0:2]; [1:6, 0:2] on rank 1",
        ),
        ("overlap", True, "ranks disagree: rank 1 holds [1:6, 0:2], the layout on rank 0 says [3:6, 0:2]"),
        ("shape", True, "local tensor of rank 1: got shape [2, 2], expected [3, 2] for its chunk [3:6, 0:2]"),
        ("another tensor", True, "local tensors of rank 1: got 2, expected 1 for its chunks [3:6, 0:2]"),
        ("another tensor", False, "local tensors of rank 1: got 2, expected 1 for its chunks [3:6, 0:2]"),
        ("no tensor", False, "local tensors of rank 1: got 0, expected 1 for its chunks [3:6, 0:2]"),
        ("content", True, "wrong content on rank 1: got 6.0, expected"),
        ("content", False, "wrong content on rank 1: got 6.0, expected"),
        ("values", True, "values on rank 1: got shape [1, 2], expected [6, 2], that of the table"),
        ("dtype", True, "ranks disagree: the local tensors are float32 on rank 0 and float64 on rank 1"),
    ],
)
def test_each_fault_has_its_own_message(on_two: Verifier, fault: str, plan: bool, message: str) -> None:
    with pytest.raises(Crash) as raised:
        on_two("layout_programs.checked", TABLE, fault, plan=plan, placements=["R"], record=False)
    assert f"LayoutError: {message}" in str(raised.value)


@pytest.mark.parametrize("plan", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_has_no_fault_passes(on_two: Verifier, name: str, plan: bool) -> None:
    result = on_two("layout_programs.checked", TABLE, "", name, plan, placements=["R"])
    assert result.counts == {VerdictKind.PASS: 1}


def test_a_tensor_without_chunks_is_refused_by_its_type(on_two: Verifier) -> None:
    with pytest.raises(Crash, match="the local tensor is a Tensor, not a LocalShardsWrapper"):
        on_two("layout_programs.plain", TABLE, placements=["S(0)"], record=False)


def test_what_is_no_table_on_one_rank_is_refused_on_every_rank(on_two: Verifier) -> None:
    with pytest.raises(Crash, match="every rank raised TypeError: rank 1: the local tensor is a Tensor, not a LocalSh"):
        on_two("layout_programs.checked", TABLE, "no chunks", placements=["R"], record=False)
    with pytest.raises(Crash, match=r"TypeError: rank 0: a DTensor of shape \[6\] is no table of rows and columns"):
        on_two("layout_programs.one_dim", TABLE, placements=["R"], record=False)


@pytest.mark.parametrize(
    ("fault", "difference"), [("halved", "output 0 ["), ("not summed", "output 1 ["), ("not saved", "output 3 [")]
)
def test_a_wrong_lookup_gradient_or_checkpoint_shows(on_two: Verifier, fault: str, difference: str) -> None:
    name = "data-parallel" if fault == "not summed" else "row-wise-even"
    case = training_case([name, {}], ["column-wise", {}], (5, 4), [2, 3], 1)
    arguments = dict(case.kwargs)
    with pytest.raises(WrongValue) as raised:
        on_two("layout_programs.trained_wrongly", fault=fault, placements=["R"] * 4, record=False, **arguments)
    assert str(raised.value).startswith(difference)


@pytest.mark.parametrize("mesh", ["simulated:2", "1x2"])
def test_meshes_that_layouts_do_not_know_are_refused(on_two: Verifier, mesh: str) -> None:
    with pytest.raises(NothingVerified, match=r"layouts (need a process for each rank|take a mesh of one dim)"):
        on_two(SOURCE.case("grid", LayoutOptions(5, 4, 2)), mesh=mesh, record=False)
