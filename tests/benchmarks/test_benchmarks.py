"""The benchmarks of level 2 see what they are there to see."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_processes import WRONG_GRADIENT_RULE
from forked_commands import run_python
from torch.distributed.tensor import Replicate, Shard

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool

pytestmark = pytest.mark.processes

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    sys.modules.pop("endurance", None)


PASSED = ("PASS", "", (("output", "S(0)"),))


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        ({}, False),
        ({5: ("WRONG_VALUE", "output", PASSED[2])}, True),
        ({5: ("PASS", "", (("output", "R"),))}, True),
        ({3: PASSED}, True),  # a fault that left no trace
        ({8: ("DIED", "rank 0 ended with signal SIGKILL", ())}, False),  # the kill from outside
        ({8: ("DIED", "ended with signal SIGKILL", ()), 9: ("DIED", "ended with signal SIGKILL", ())}, True),
        ({8: ("DIED", "ended with signal SIGSEGV", ())}, True),
    ],
)
def test_endurance_compares_outcomes(
    change: dict[int, tuple[str, str, tuple[tuple[str, str], ...]]], fails: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    import endurance

    trials = endurance.draw_trials(MeshSpec((2,)), 10, 0)
    faulty = list(trials)
    for number, fault in ((3, "kill:0"), (7, "from outside")):
        faulty[number] = endurance.replace(trials[number], fault=fault)
    got = [PASSED] * 10
    got[3] = ("DIED", "", ())
    for number, outcome in change.items():
        got[number] = outcome
    without = endurance.Progress("faultless", [PASSED] * 10, [], seconds=1.0)
    assert (
        endurance.compare_runs(trials, faulty, without, endurance.Progress("faults", got, [], seconds=1.0), "") is fails
    )
    last = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert last.startswith("| 10 of 10 | 2 | 2 |")
    assert last.endswith("| fails |" if fails else "| holds |")


def test_endurance_has_figures_when_it_is_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    import endurance

    trials = endurance.draw_trials(MeshSpec((2,)), 10, 0)
    without = endurance.Progress("faultless", [PASSED] * 10, [], seconds=1.0)
    for done in (0, 4):
        part = endurance.Progress("faults", [PASSED] * done, [])
        assert endurance.compare_runs(trials, trials, without, part, "interrupted") is False
        assert capsys.readouterr().out.rstrip().endswith("| interrupted |")


def test_endurance_sees_memory_that_grows() -> None:
    import endurance

    def factors(last: int) -> dict[str, float]:
        sizes = [100] * 10 + [last] * 10
        return endurance.growth(
            [endurance.Sample(50 * n, 100, 100, size, 100, 8, 20) for n, size in enumerate(sizes)], 100
        )

    assert factors(115)["rank_rss"] > endurance.GROWTH
    assert set(factors(105).values()) == {1.0, 1.05}
    assert endurance.growth([], 100) == {}


@pytest.mark.parametrize("leaks", [None, "faultless", "faults"])
def test_endurance_fails_where_memory_grows_in_either_run(
    leaks: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks that faults have replaced start anew; what grows slowly shows in those that live throughout."""
    import endurance

    trials = endurance.draw_trials(MeshSpec((2,)), 10, 0)

    def progress(name: str) -> Any:
        sizes = [100 << 20] * 10 + [(115 if name == leaks else 105) << 20] * 10
        samples = [endurance.Sample(50 * n, 100, 100, size, 100, 8, 20) for n, size in enumerate(sizes)]
        return endurance.Progress(name, [PASSED] * 10, samples, seconds=1.0)

    fails = endurance.compare_runs(trials, trials, progress("faultless"), progress("faults"), "")
    assert fails is (leaks is not None)
    *said, columns, _, last = capsys.readouterr().out.rstrip().splitlines()
    assert "faultless, rank rss: +5.0% since 50 trials" in said or leaks == "faultless"
    assert [line for line in said if line.endswith("too much")] == (
        [f"{leaks}, rank rss: +15.0% since 50 trials, too much"] if leaks else []
    )
    row = dict(zip(columns.split(" | "), last.split(" | "), strict=True))
    (without,) = (cell for name, cell in row.items() if name.startswith("growth without faults"))
    assert without.split(", ")[2] == ("+15.0%" if leaks == "faultless" else "+5.0%")
    assert row["growth with faults"].split(", ")[2] == ("+15.0%" if leaks == "faults" else "+5.0%")


def test_the_clock_in_the_ranks_splits_the_time_of_a_trial() -> None:
    weight = torch.arange(1.0, 35.0, dtype=torch.float64).view(17, 2)
    case = OpCase("aten.mul.Tensor", "torch.ops.aten.mul.Tensor", (weight, weight))
    trial = Trial(case, MeshSpec((2,)), ((Shard(0),), (Replicate(),)))
    with Pool(PoolKey.of(trial.mesh), [str(BENCHMARKS / "rank_clock.py")]) as pool:
        first, second = pool.run([trial, trial])
    for report in (*first.reports, *second.reports):
        assert report is not None
        seconds = dict(report.seconds)
        assert seconds["collectives"] > 0.0  # the result is gathered
        assert seconds["cycle"] >= seconds["total"] >= seconds["propagation"] + seconds["collectives"]
        assert (seconds["propagation"] > 0.0) is (report in first.reports)  # the second one finds it in the cache


def test_table_of_rules_says_which_do_not_hold() -> None:
    import embedding_rules as table

    without = frozenset({"max_norm", "sparse", "0-d indices"})
    rule = table.Rule("by ids", {"input": "S(0)"}, without=without)
    lonely = table.Rule("nothing drawn", {}, frozenset({"no such class"}))
    refused = table.Rule("refused", {}, without=without, refused=True)
    wrong = str(WRONG_GRADIENT_RULE)
    made = table.try_rules(table.EMBEDDINGS, [rule, lonely, refused], [MeshSpec((2,))], 8, [wrong])
    assert [line.holds for line in made] == [False, False, False]
    assert "WRONG_GRADIENT" in made[0].verdict
    assert made[1].verdict == "FAILS: 0 proofs"
    assert made[2].verdict.startswith("FAILS: 0 refusals")
    scaled = table.Rule("by ids", {"input": "S(0)"}, frozenset({"max_norm"}), frozenset({"0-d indices"}))
    true, gathers = table.try_rules(table.EMBEDDINGS, [rule, scaled], [MeshSpec((2,))], 8)
    assert true.holds
    assert gathers.holds
    assert [line.cells(["weight", "input"])[-2] for line in (true, gathers)] == ["none", "1 all_gather_into_tensor"]
    *cells, gradient = true.cells(["weight", "input"])[:4]
    assert cells == ["by ids", "R, S(0)", "S(0)"]
    assert "P(sum)" in gradient


def test_a_dispatch_has_a_row_for_each_op_and_layout() -> None:
    done = run_python(str(BENCHMARKS / "embedding_dispatch.py"), "--calls", "1", "--batches", "1", "--markdown")
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("|")][2:]
    assert {(op, layout) for op, layout, *_ in rows} == {
        (op, layout)
        for op in ("lookup", "gradient", "both, with autograd")
        for layout in ("column-wise", "by batch", "row-wise")
    }
    for *_, theirs, ours, ratio in rows:
        # figures are rounded to a tenth, ratios to a hundredth
        assert float(ours) / float(theirs) == pytest.approx(float(ratio), rel=0.02, abs=0.01)


def test_a_dispatch_needs_a_call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import embedding_dispatch

    monkeypatch.setattr(sys, "argv", ["embedding_dispatch.py", "--calls", "0"])
    with pytest.raises(SystemExit):
        embedding_dispatch.main()
    assert capsys.readouterr().err.endswith("--calls and --batches have to be at least 1\n")


def test_the_database_of_ops_is_run_on_both_sides(tmp_path: Path) -> None:
    """Of these the threads complete one; one they fail in the middle, one at once, and one in its values.

    What they draw may be equal by accident, at first: they take turns at one generator.
    """
    figures = tmp_path / "figures.json"
    options = ["--ranks", "2", "--ops", "mm,prod,cdist,rand_like", "--samples", "3", "--rest", "60", "--markdown"]
    done = run_python(str(BENCHMARKS / "whole_database.py"), *options, "--json", str(figures))
    assert done.returncode == 0, done.stderr
    turns = {turn["op"]: turn for turn in json.loads(figures.read_text())["ops"]}
    assert set(turns) == {"mm", "prod", "cdist", "rand_like"}
    for turn in turns.values():
        assert sum(turn["verdicts"].values()) == turn["threads"]["done"]
        # a combination that fails ends an op of the threads, and no op of the pool
        assert sum(turn["rest_verdicts"].values()) == turn["combinations"] - turn["threads"]["done"]
        assert turn["threads"]["whole"] >= turn["threads"]["seconds"]
    mm, prod, cdist = (turns[op]["threads"] for op in ("mm", "prod", "cdist"))
    assert mm["failure"] == ""
    assert mm["done"] == turns["mm"]["combinations"] > 9  # 9 of two matrices, each whole or cut along either dim
    assert turns["mm"]["verdicts"] == {"PASS": 9, "INCONCLUSIVE": mm["done"] - 9}  # the other samples are empty
    assert 0 < prod["done"] < turns["prod"]["combinations"]
    assert prod["failure"].startswith("RuntimeError: aten.cat.default got mixed torch.Tensor and DTensor")
    assert (cdist["done"], cdist["seconds"]) == (0, 0.0)
    assert cdist["failure"].startswith("NotImplementedError: Operator aten._cdist_forward.default")
    assert set(turns["cdist"]["rest_verdicts"]) == {"UNSUPPORTED"}
    rand = turns["rand_like"]["threads"]
    assert rand["done"] < turns["rand_like"]["combinations"]
    assert "are not close" in rand["failure"]

    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    completed = mm["done"] + prod["done"] + rand["done"]
    by_accident = rand["done"] > 0
    assert [row[1:4] for row in rows] == [
        ["threads", str(2 + by_accident), str(completed)],
        ["pool", str(2 + by_accident), str(completed)],
        ["threads", "4", str(completed + 3)],  # with the one that fails
        ["pool", "4", str(sum(turn["combinations"] for turn in turns.values()))],
    ]
    theirs, ours = mm["seconds"] + prod["seconds"] + rand["seconds"], sum(turn["seconds"] for turn in turns.values())
    assert float(rows[1][6]) == pytest.approx(theirs / ours, abs=0.006)
    kinds = "1 AssertionError, 1 NotImplementedError, 1 RuntimeError"
    assert f"3 of 4 ops fail on the threads, {2 - by_accident} at once: {kinds}" in done.stdout


def test_an_op_that_ends_the_threads_is_named_and_the_next_one_runs() -> None:
    import opinfo_ops
    import threaded_ops

    (sigmoid,) = (place for place, name in opinfo_ops.names().items() if name == "sigmoid")
    threads = threaded_ops.ThreadedOps(2, backward=True, patience=60.0)
    try:
        for end, patience, failure in (
            (signal.SIGSTOP, 1.0, "hang: nothing in 1 s"),
            (signal.SIGSEGV, 60.0, "crash: the process ended with status -11"),
        ):
            pid = threads._process.pid
            assert pid is not None
            threads._patience = patience
            os.kill(pid, end)
            lost = threads.run(sigmoid, 1)
            assert (lost.done, lost.failure) == (0, failure)
            threads._patience = 60.0
            assert threads._process.pid != pid
            found = threads.run(sigmoid, 1)
            assert (found.done, found.failure) == (2, "")  # a vector, whole and cut
    finally:
        threads.close()


def test_claims_on_pending_reductions_are_compared_with_random_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    import partial_claims

    assert partial_claims.holds(torch.relu, "max", [True])
    assert not partial_claims.holds(torch.square, "max", [True])
    assert partial_claims.holds(torch.mul, "sum", [True, False])
    assert not partial_claims.holds(torch.mul, "sum", [True, True])
    assert partial_claims.main(["frac", "--max-samples", "1"]) == 0
    assert "5 claims of 1 ops, 5 wrong: 0 missed" in capsys.readouterr().out


def test_a_wrong_claim_on_a_pending_reduction_that_rules_lets_pass_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import partial_claims

    monkeypatch.setattr(partial_claims, "judged", lambda ops, most: {"aten.frac.default": {"wrong": [], "special": []}})
    assert partial_claims.main(["frac"]) == 1
    assert "missed   frac with P(sum)" in capsys.readouterr().out
