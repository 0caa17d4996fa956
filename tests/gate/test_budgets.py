"""Budgets of redistributions: recorded, read back, and exceeded by a rule that needs more bytes than before."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from forked_commands import run_module
from plain_records import a_header, a_run

from verifier.cli.main import main
from verifier.gate.baseline import Baseline, BaselineError, load_baseline
from verifier.gate.budgets import Budget
from verifier.gate.question import Question
from verifier.gate.regret import RegretDecision, over_budget, updated_budgets
from verifier.records.schema import OUT_OF_TIME, CallRecord, GraphRecord, PathRecord, RunRecord, UntestedRecord

ADD = "aten.add.Tensor"
ALONE = PathRecord(
    ADD, "4", "float32[8, 8]", "S(0)", "S(1)", [("all_to_all", "S(1)")], False, 3, {"forward": 3}, "S(0); S(1)", ADD
)
BY_GATHER = replace(ALONE, steps=[("all_gather", "R"), ("", "S(1)")])
REDUCED = replace(ALONE, source="P(sum)", target="S(1)", steps=[("reduce_scatter", "S(1)")], given="P(sum); S(1)")


def ran(
    *paths: PathRecord, calls: tuple[str, ...] = ("S(0); S(1)", "P(sum); S(1)", "R; R"), **changes: object
) -> RunRecord:
    made = [CallRecord(ADD, "4", given, 1) for given in calls]
    return a_run(**{"graph": GraphRecord([], [], [*paths], made)} | changes)


def recorded(*runs: RunRecord, known: tuple[Budget, ...] = ()) -> tuple[Budget, ...]:
    return updated_budgets(runs, Question(), known)


def judged(run: RunRecord, budgets: tuple[Budget, ...]) -> RegretDecision:
    return over_budget([run], Question(), budgets)


# --------------------------------------------------------------------------------------------------------------- judged
def test_what_was_recorded_is_within_budget() -> None:
    run = ran(ALONE, REDUCED)
    (budget,) = recorded(run)
    assert budget.calls == (
        "P(sum); S(1): P(sum) -reduce_scatter-> S(1)", "R; R", "S(0); S(1): S(0) -all_to_all-> S(1)"
    )  # fmt: skip
    decision = judged(run, (budget,))
    assert (decision.over, decision.within, decision.cells, decision.not_judged) == ((), 2, 1, ())


def test_a_longer_path_is_over_budget_for_any_shape() -> None:
    budgets = recorded(ran(ALONE))
    (over,) = judged(ran(replace(BY_GATHER, tensor="float64[5, 3]")), budgets).over
    assert (over.received, over.budget, over.bound) == (8 * 15 * 3, 8 * 10, 8 * 10)
    assert over.title == (
        "aten.add.Tensor(S(0); S(1)) on mesh 4: float64[5, 3] S(0) -> S(1), 3 times: 360 B received, 80 B allowed"
    )
    assert over.lines[0] == "ran      S(0) -all_gather(0)-> R -> S(1)   360 B"
    assert over.lines[1] == "allowed  S(0) -all_to_all(0)-> S(1)   80 B"
    assert over.lines[2] == "best     S(0) -all_to_all(0)-> S(1)   80 B"
    assert not judged(ran(ALONE), recorded(ran(BY_GATHER))).over, "what became cheaper is within budget"


def test_a_call_that_redistributed_nothing_may_receive_nothing() -> None:
    lost = replace(ALONE, source="S(0)", target="R", steps=[("all_gather", "R")], given="S(0); S(1)")
    (over,) = judged(ran(lost), recorded(ran())).over
    assert (over.budget, over.allowed) == (0, "")
    assert over.lines[1] == "allowed  none: the budget has no path from S(0) for this call"


def test_another_result_that_costs_no_more_bytes_is_within_budget() -> None:
    other = replace(REDUCED, target="S(0)", steps=[("reduce_scatter", "S(0)")])
    assert not judged(ran(other), recorded(ran(REDUCED))).over
    dearer = replace(REDUCED, target="R", steps=[("all_reduce", "R")])
    assert [one.target for one in judged(ran(dearer), recorded(ran(REDUCED))).over] == ["R"]


def test_of_equal_redistributions_the_one_furthest_over_budget_is_told() -> None:
    small, large = replace(BY_GATHER, tensor="float32[4, 4]"), replace(BY_GATHER, tensor="float32[64, 64]")
    assert [one.tensor for one in judged(ran(small, large), recorded(ran(ALONE))).over] == ["float32[64, 64]"]


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (ran(replace(ALONE, given="S(1); R"), calls=("S(1); R",)), "with placements that the budget does not have"),
        (ran(REDUCED, header=a_header(seed=2)), "drawn otherwise than those of the budget"),
        (ran(REDUCED, untested=[UntestedRecord("add", OUT_OF_TIME, 3)]), "drawn otherwise than those of the budget"),
        (ran(REDUCED, complete=False), "drawn otherwise than those of the budget"),
        (ran(replace(REDUCED, source="(X)")), "without a model, as "),
    ],
)
def test_what_may_be_another_call_is_not_judged(run: RunRecord, why: str) -> None:
    decision = judged(run, recorded(ran(ALONE)))
    assert not decision.over
    assert any(why in text for text in decision.not_judged)


def test_a_longer_path_is_over_budget_however_the_calls_were_drawn() -> None:
    assert judged(ran(BY_GATHER, header=a_header(seed=2)), recorded(ran(ALONE))).over


def test_what_the_op_itself_did_not_ask_for_is_not_judged() -> None:
    backward = replace(BY_GATHER, given="", phases={"backward": 3})
    assert not judged(ran(backward), recorded(ran(ALONE))).over
    assert recorded(ran(backward)) == recorded(ran())


def test_a_budget_of_what_was_not_run_is_told_and_kept() -> None:
    other = Budget("aten.mm.default", "4", (), "", ("R; R",))
    budgets = recorded(ran(ALONE), known=(other,))
    assert other in budgets
    assert judged(ran(ALONE), budgets).not_judged == ("budget of aten.mm.default on mesh 4: not run",)
    assert judged(ran(ALONE), (other,)).not_judged[0] == "aten.add.Tensor on mesh 4: no budget"
    assert judged(ran(ALONE), (other,)).cells == 0


def test_rules_of_an_import_have_budgets_of_their_own() -> None:
    own = ran(BY_GATHER, header=a_header(imports=["my_rules.py"], own_rules=[ADD]))
    budgets = recorded(own, ran(ALONE))
    assert [one.imports for one in budgets] == [(), ("my_rules.py",)]
    assert not judged(own, budgets).over
    assert judged(ran(BY_GATHER), budgets).over


def test_the_newest_run_of_an_op_counts() -> None:
    newest, older = ran(ALONE), ran(BY_GATHER)
    assert recorded(newest, older) == recorded(newest)
    assert not over_budget([newest, older], Question(), recorded(newest)).over


def test_an_update_forgets_what_a_whole_run_did_not_do_again_and_nothing_else() -> None:
    before = recorded(ran(ALONE, REDUCED))
    (after,) = recorded(ran(ALONE, calls=("S(0); S(1)", "P(sum); S(1)")), known=before)
    assert "P(sum); S(1)" in after.calls
    assert "R; R" in after.calls, "it was not run"
    (cut,) = recorded(ran(ALONE, calls=("S(0); S(1)", "P(sum); S(1)"), complete=False), known=before)
    assert cut.calls == before[0].calls
    assert cut.drawn == ""


# ------------------------------------------------------------------------------------------------------------- the file
def written(tmp_path: Path) -> Path:
    path = tmp_path / "baseline.toml"
    submesh = Budget(
        ADD, "2x4", ("my_rules.py",), "", ("(S(0), R) small; (P(sum), MaskP(sum)): (_S(0, 2), R) -> (R, R)",)
    )
    Baseline((), (*recorded(ran(ALONE, REDUCED)), submesh)).save(path)
    return path


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    path = written(tmp_path)
    baseline = load_baseline(path)
    assert len(baseline.budgets) == 2
    assert baseline.to_toml().encode() == path.read_bytes()
    assert Baseline((), baseline.budgets[::-1]) == baseline


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("all_to_all", "all_2_all", r":\d\d: budget of .*'all_2_all' is no collective; did you"),
        ("-all_to_all-> S(1)", "-all_to_all-> (S(1), R)", r"has 2 placements for 1 mesh dim"),
        ("-all_to_all-> S(1)", "-all_to_all-> S[1]", r"'S\[1\]' is no placement"),
        (": S(0) -all_to_all-> S(1)", ": S(0)", r"has a path without steps"),
        ('"R; R"', '"R; X"', r"'X' is no placement, as R, S\(0\) or P\(sum\)"),
        ('mesh = "4"', 'mesh = "four"', r"mesh 'four' is not a shape"),
        ('mesh = "4"', "mesh = 4", r"mesh is 4, but has to be a string"),
        ("calls = ", "call = ", r"unknown field 'call'; did you mean 'calls'\?"),
        ("calls = ", "#", r"not TOML|has no calls"),
        ('"R; R"', "7", r"but has to be a list of strings"),
        ("[[budget]]", "[budget]", r":\d\d: budgets are written as \[\[budget\]\]|not TOML"),
        ('mesh = "2x4"\nimports = ["my_rules.py"]', 'mesh = "4"', r"a budget of .* on mesh 4 stands in line"),
    ],
)  # fmt: skip
def test_a_malformed_budget_says_where_and_what(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = written(tmp_path)
    content = path.read_text()
    assert old in content
    if "stands in" in message:
        content = content.replace('    "(S(0), R) small; (P(sum), MaskP(sum)): (_S(0, 2), R) -> (R, R)",\n', "")
    path.write_text(content.replace(old, new, 1))
    with pytest.raises(BaselineError, match=message):
        load_baseline(path)


# ------------------------------------------------------------------------------------------------------------- commands
RULES = """
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding


@register_sharding(torch.ops.aten.relu.default)
def relu(x):
    return [([Replicate()], [Replicate()]), *(([Shard(d)], [Shard(d)]) for d in range(FIRST, x.ndim))]
"""
RUN = ("run", "aten.relu.default", "--mesh", "simulated:2", "--max-examples", "3", "--import", "my_rules.py", "-q")
Gate = Callable[..., tuple[int, str]]


@pytest.fixture
def gate(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Gate:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str]:
        """Return the exit status of a gate, and what it printed. It imports nothing, so this process is as good.

        A single argument that has blanks is a whole command.
        """
        typed = shlex.split(arguments[0])[3:] if arguments and " " in arguments[0] else None
        asked = typed or ["gate", "--fail-on", "regret", *arguments]
        monkeypatch.setattr(sys, "argv", ["verifier", *asked])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return int(ended.value.code or 0), printed.out + printed.err

    return call


@pytest.mark.cli
@pytest.mark.processes
def test_a_rule_that_is_taken_away_is_over_the_budget_that_was_recorded_with_it(tmp_path: Path, gate: Gate) -> None:
    rules, baseline = tmp_path / "my_rules.py", tmp_path / "known.toml"
    given = ("--baseline", str(baseline))
    rules.write_text(RULES.replace("FIRST", "0"))
    assert run_module("verifier", *RUN).returncode == 0
    status, said = gate(*given)
    assert (status, "no such baseline file" in said) == (2, True)
    Baseline().save(baseline)
    status, said = gate(*given)
    assert (status, "has no budgets to judge by; record them: python -m verifier gate " in said) == (2, True)
    told = said.replace("\n", " ").partition("record them: ")[2].strip()
    status, said = gate(told)
    assert status == 0, f"{told}: {said}"
    assert "wrote 0 entries and 1 budget to " in said
    status, said = gate(*given)
    assert status == 0, said
    assert " within budget, of 1 op on a mesh" in said

    rules.write_text(RULES.replace("FIRST", "1"))
    assert run_module("verifier", *RUN).returncode == 0
    status, said = gate(*given)
    assert status == 1, said
    assert "OVER BUDGET aten.relu.default(S(0)) on mesh 2: " in said
    assert "allowed  none: the budget of --import my_rules.py has no path from S(0) for this call" in said
    assert said.endswith("gate failed: redistributions over budget (exit status 1)\n")
    allow = f"python -m verifier gate --baseline {baseline} --fail-on regret --update"
    assert f"or allow them: `{allow}`" in said
    assert json.loads(gate(*given, "--format", "json")[1])["regret"]["over"][0]["budget"] == 0
    assert gate(*given, "aten.neg.default")[0] == 2, "no budget is for what is asked about"

    text = baseline.read_text()
    baseline.write_text(text.replace("-all_reduce->", "-all_redoes->"))
    status, said = gate(*given)
    assert (status, "'all_redoes' is no collective; did you mean 'all_reduce'?" in said) == (2, True)
    baseline.write_text(text)
    assert gate(allow)[0] == 0
    assert gate(*given)[0] == 0
    assert '"S(0): S(0) -all_gather-> R"' in baseline.read_text()
