"""TorchRec as a client: its sharded collections against the same unsharded; skipped where torchrec is not installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from strategies.torchrec import client_family
from strategies.torchrec.client import keys_of
from strategies.torchrec.client_family import (
    COLLECTION,
    FAMILY,
    MEAN_BESIDE,
    MEAN_IN_GRID,
    MISSING,
    collection_case,
    op_of,
)
from verifier.calls.result import WrongValue
from verifier.calls.verifier import Verifier
from verifier.core.case import MeshSpec, OpCase
from verifier.core.verdict import VerdictKind
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool
from verifier.meshes.tasks import Task
from verifier.planning.families import DrawContext

needs_torchrec = pytest.mark.skipif(not client_family.installed(), reason=MISSING)
MESH = MeshSpec((2,))
CONTEXT = DrawContext(MESH, FAMILY.dtypes, FAMILY.ops)
BAGS = [1, 2, 0, 3]
ROWS: list[Any] = ["row_wise", {}, "dense"]


def case(pooling: list[str], plan: list[list[Any]], features: list[list[int]]) -> OpCase:
    known = 1 + max(max(some) for some in features)
    return collection_case([(5, 8)] * len(plan), features, pooling, plan, [BAGS] * known, 2)


def everywhere(drawn: OpCase) -> dict[str, Any]:
    tensors = sum(len(drawn.kwargs[name]) for name in ("tables", "ids", "lengths", "cotangents"))  # type: ignore[arg-type]
    return {"placements": ["R"] * tensors, "mesh": MESH, "record": False}


def test_without_torchrec_nothing_is_drawn_and_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_family, "installed", lambda: False)
    assert FAMILY.cases(CONTEXT).is_empty
    assert FAMILY.left_out(CONTEXT) == tuple((op, MISSING) for op in CONTEXT.ops)
    assert "pip install --no-deps torchrec==1.8.0" in MISSING


@pytest.mark.parametrize(
    ("pooling", "kinds", "features", "op"),
    [
        (["SUM", "MEAN"], ["column_wise", "row_wise"], [[0], [1]], MEAN_BESIDE),
        (["SUM", "MEAN"], ["row_wise", "table_row_wise"], [[0], [1, 0]], MEAN_BESIDE),
        (["SUM", "MEAN"], ["row_wise", "table_row_wise"], [[0], [1]], COLLECTION),
        (["MEAN", "MEAN"], ["row_wise", "table_row_wise"], [[0], [1, 0]], COLLECTION),
        (["SUM", "MEAN"], ["row_wise", "column_wise"], [[0], [1]], COLLECTION),
        (["MEAN", "SUM"], ["grid_shard", "row_wise"], [[0], [1]], MEAN_IN_GRID),
    ],
)
def test_what_torchrec_gets_wrong_is_filed_apart(
    pooling: list[str], kinds: list[str], features: list[list[int]], op: str
) -> None:
    assert op_of(pooling, [[kind, {}, "dense"] for kind in kinds], features) == op


def test_generated_collections_are_of_every_kind() -> None:
    seen: dict[str, set[str]] = {}

    @settings(
        max_examples=120,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn=client_family.collection_cases(CONTEXT))
    def draw(drawn: OpCase) -> None:
        seen.setdefault(drawn.op, set()).update(drawn.tags)
        arguments: Any = drawn.kwargs
        assert len(arguments["cotangents"]) == len(keys_of(arguments["features"]))
        assert all(len(some) % MESH.world_size == 0 for some in arguments["lengths"])

    draw()
    assert seen.keys() == set(FAMILY.ops)
    assert seen[COLLECTION] == {"mixed pooling", "mixed sharding", "shared feature", "empty bag", "uneven rows"}


@needs_torchrec
@pytest.mark.parametrize("kernel", ["dense", "fused"])
def test_each_way_to_shard_trains_as_the_whole_collection(verify: Verifier, kernel: str) -> None:
    plan = [
        ["data_parallel", {}, "dense"],
        ["table_wise", {"rank": 1}, kernel],
        ["row_wise", {}, kernel],
        ["column_wise", {"ranks": [1, 0]}, kernel],
        ["table_row_wise", {"host_index": 0}, kernel],
        ["grid_shard", {"host_indexes": [0]}, kernel],
    ]
    features = [[0, 1], [2], [3, 0], [4], [5, 2], [6]]
    drawn = case(["MEAN", "MEAN", "SUM", "MEAN", "SUM", "SUM"], plan, features)
    assert drawn.op == COLLECTION
    assert verify(drawn, **everywhere(drawn)).counts == {VerdictKind.PASS: 1}


@needs_torchrec
def test_means_by_rows_alone(verify: Verifier) -> None:
    drawn = case(["MEAN", "MEAN"], [ROWS, ["table_row_wise", {"host_index": 0}, "dense"]], [[0], [1]])
    assert verify(drawn, **everywhere(drawn)).counts == {VerdictKind.PASS: 1}


@needs_torchrec
@pytest.mark.parametrize(
    ("pooling", "plan", "features", "message"),
    [
        # divided by the lengths of its bags, though it is a sum: 6 / 2
        (["SUM", "MEAN"], [["column_wise", {"ranks": [0, 1]}, "dense"], ROWS], [[0], [1]], "key f0 of table t0, SUM"),
        (["MEAN", "MEAN"], [["table_wise", {"rank": 0}, "dense"], ROWS], [[0], [1]], "key f0 of table t0, MEAN"),
        (["MEAN"], [["grid_shard", {"host_indexes": [0]}, "dense"]], [[0]], "key f0 of table t0, MEAN, grid_shard"),
    ],
)
def test_what_torchrec_1_8_gets_wrong(
    verify: Verifier, pooling: list[str], plan: list[list[Any]], features: list[list[int]], message: str
) -> None:
    drawn = case(pooling, plan, features)
    assert drawn.op != COLLECTION
    with pytest.raises(WrongValue) as raised:
        verify(drawn, **everywhere(drawn))
    assert f"output 0 is {message}" in str(raised.value)


DTENSOR_PLAN: list[list[Any]] = [
    ROWS,
    ["table_wise", {"rank": 1}, "dense"],
    ["column_wise", {"ranks": [0, 1]}, "fused"],
    ["table_row_wise", {"host_index": 0}, "dense"],
    ["data_parallel", {}, "dense"],
]


def checked(ranks: int, spoilt: int | None = None) -> dict[int, str]:
    mesh = MeshSpec((ranks,))
    tables = [torch.arange(40.0).view(5, 8) + number for number in range(len(DTENSOR_PLAN))]
    task = Task("strategies.torchrec.client.check_dtensors", (tables, DTENSOR_PLAN, 2, spoilt), mesh, limit=60)
    with Pool(PoolKey.of(mesh)) as pool:
        outcome = pool.call(task)
    assert outcome.ok, outcome.failure()
    assert all(returned == outcome.returned[0] for returned in outcome.returned)
    return dict(outcome.returned[0])  # type: ignore[call-overload, no-any-return]


@pytest.mark.ranks
@needs_torchrec
def test_the_dtensors_of_torchrec_hold_each_table_once() -> None:
    assert checked(2) == {0: "", 1: "", 2: "", 3: ""}
    spoilt = checked(2, spoilt=2)
    assert spoilt.pop(2).startswith("wrong content on rank 0: got 3.0, expected 2.0 at [0, 0] of its chunk [0:5, 0:4]")
    assert set(spoilt.values()) == {""}


@pytest.mark.ranks
@needs_torchrec
def test_ranks_that_hold_nothing_say_that_a_table_of_torchrec_1_8_is_replicated() -> None:
    found = checked(4)
    assert found[0] == found[1] == ""
    assert found[2].startswith("ranks disagree: placement is R on rank 2 and S(1) on rank 0")
    assert found[3].startswith("ranks disagree: placement is R on rank 2 and S(1) on rank 0")
