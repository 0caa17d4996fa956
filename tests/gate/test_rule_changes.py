"""Rule tables: what is written is what is read, and each kind of change is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from forked_commands import run_module

from verifier.cli.main import main
from verifier.core.errors import ReportedError
from verifier.gate.rule_changes import Change, changes_between, changes_json, changes_lines, changes_markdown
from verifier.records.rule_table import TABLE_FORMAT, ClaimedRule, OverloadTable, RuleTable, read_table, write_table

CALLS = ["self=f64[5], dim=0", "self=f64[5, 5], dim=0", "self=f64[5, 5], dim=1"]


def table(
    rules: dict[str, ClaimedRule], left_out: tuple[str, ...] = (), op: str = "aten.sum.dim", **other: object
) -> RuleTable:
    question = {"meshes": ["2"], "dtype": "float64", "sizes": 1, "max_samples": 8, "seed": 0, "imports": []} | other
    question = {"registered": {op: "strategy sum, sums.py"}} | question
    overloads = {op: OverloadTable("strategy sum, sums.py", [*left_out], CALLS, rules)}
    return RuleTable(TABLE_FORMAT, "2.13.0", overloads=overloads, **question)  # type: ignore[arg-type]


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = table({"S(0) -> P(sum)": ClaimedRule(confirmed=[0, 1], special=[2]), "R -> R": ClaimedRule(wrong=[1])})
    write_table(made, tmp_path / "table.json")
    assert read_table(tmp_path / "table.json") == made
    assert json.loads((tmp_path / "table.json").read_text())["overloads"]["aten.sum.dim"]["calls"] == CALLS
    assert '"S(0) -> P(sum)": {"confirmed": [0, 1], "special": [2]}' in (tmp_path / "table.json").read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no rule table"),
        ("{}", "no rule table"),
        ('{"format": 9}', "no rule table"),
    ],
)
def test_another_file_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(text)
    with pytest.raises(ReportedError, match=said) as error:
        read_table(tmp_path / "table.json")
    assert "\n" not in str(error.value)


def test_a_table_of_another_format_or_with_unknown_calls_is_refused(tmp_path: Path) -> None:
    made = table({"R -> R": ClaimedRule(confirmed=[7])})
    write_table(made, tmp_path / "table.json")
    with pytest.raises(ReportedError, match=r"aten.sum.dim: R -> R: there is no call 7"):
        read_table(tmp_path / "table.json")
    made.format = TABLE_FORMAT + 1
    write_table(made, tmp_path / "table.json")
    with pytest.raises(ReportedError, match="of format 3; this version reads 2"):
        read_table(tmp_path / "table.json")


@pytest.mark.parametrize(
    ("before", "after", "kind", "calls", "elsewhere"),
    [
        (ClaimedRule(confirmed=[0, 1]), ClaimedRule(), Change.LOST, [0, 1], False),
        (ClaimedRule(confirmed=[0, 1]), ClaimedRule(confirmed=[1]), Change.LOST, [0], True),
        (ClaimedRule(inconclusive=[0]), ClaimedRule(), Change.LOST, [0], False),
        (ClaimedRule(), ClaimedRule(confirmed=[2]), Change.GAINED, [2], False),
        (ClaimedRule(confirmed=[0]), ClaimedRule(confirmed=[0, 2]), Change.GAINED, [2], True),
        (ClaimedRule(confirmed=[0]), ClaimedRule(confirmed=[0], wrong=[2]), Change.WRONG, [2], True),
        (ClaimedRule(confirmed=[0]), ClaimedRule(wrong=[0]), Change.WRONG, [0], True),
        (ClaimedRule(wrong=[1]), ClaimedRule(confirmed=[1]), Change.MENDED, [1], True),
        (ClaimedRule(wrong=[1]), ClaimedRule(), Change.MENDED, [1], False),
    ],
)
def test_each_change_is_told(
    before: ClaimedRule, after: ClaimedRule, kind: Change, calls: list[int], elsewhere: bool
) -> None:
    tables = [table({"S(0) -> S(0)": one} if one != ClaimedRule() else {}) for one in (before, after)]
    made = changes_between(*tables)
    ((change),) = made.rules
    assert (change.kind, change.calls, change.elsewhere) == (kind, tuple(CALLS[n] for n in calls), elsewhere)
    assert made.fails({kind})
    assert not made.fails({*Change} - {kind})
    assert f"{kind} " in next(iter(changes_lines(made)))
    assert f"| {kind} | `aten.sum.dim`" in changes_markdown(made)
    assert json.loads(changes_json(made))["rules"][0]["change"] == kind


@pytest.mark.parametrize("verdict", ["confirmed", "wrong"])
def test_other_outputs_for_the_same_inputs_are_no_loss(verdict: str) -> None:
    before = table({"S(0) -> P(sum)": ClaimedRule(confirmed=[0, 1]), "S(1) -> P(sum)": ClaimedRule(confirmed=[1])})
    after = table({"S(0) -> S(0)": ClaimedRule(**{verdict: [0]}), "R -> R": ClaimedRule(confirmed=[0])})
    told = {(one.kind, one.rule, one.calls) for one in changes_between(before, after).rules}
    assert told == {
        (Change.OUTPUTS, f"S(0) -> P(sum), now -> S(0), {verdict}", (CALLS[0],)),
        (Change.LOST, "S(0) -> P(sum)", (CALLS[1],)),
        (Change.LOST, "S(1) -> P(sum)", (CALLS[1],)),
        (Change.GAINED, "R -> R", (CALLS[0],)),
        *([(Change.WRONG, "S(0) -> S(0)", (CALLS[0],))] if verdict == "wrong" else []),
    }


def test_equal_tables_have_no_changes() -> None:
    made = changes_between(table({"R -> R": ClaimedRule(confirmed=[0])}), table({"R -> R": ClaimedRule(confirmed=[0])}))
    assert not made.fails({*Change})
    assert list(changes_lines(made)) == ["torch 2.13.0: no rule changed"]


def test_a_key_that_leaves_out_an_argument_is_wrong() -> None:
    made = changes_between(table({}), table({}, left_out=("dim",)))
    assert made.fails({Change.WRONG})
    assert "wrong   aten.sum.dim: the key of DTensor's cache leaves out dim" in list(changes_lines(made))
    assert not changes_between(table({}, left_out=("dim",)), table({})).fails({*Change})


ALL = {"aten.sum.dim": "strategy sum, sums.py", "aten.cholesky.default": "strategy linear, solvers.py"}


def test_an_overload_that_has_no_rules_any_more_has_lost_them() -> None:
    made = changes_between(table({}, registered=ALL), table({}))
    assert made.fails({Change.LOST})
    assert not made.fails({*Change} - {Change.LOST})
    text = "all rules; registered before: strategy linear, solvers.py"
    assert list(changes_lines(made)) == [
        f"lost    aten.cholesky.default: {text}",
        "torch 2.13.0: no rule changed; 1 overload lost all rules",
    ]
    assert f"| lost | `aten.cholesky.default` | | {text} |" in changes_markdown(made)
    assert [one["op"] for one in json.loads(changes_json(made))["unregistered"]] == ["aten.cholesky.default"]


def test_an_overload_without_rules_before_has_gained_some() -> None:
    made = changes_between(table({}), table({}, registered=ALL))
    assert not made.fails({*Change})
    assert list(changes_lines(made)) == [
        "gained  aten.cholesky.default: its first rules; registered now: strategy linear, solvers.py",
        "torch 2.13.0: no rule changed; 1 overload gained rules, with none before",
    ]
    assert [one["op"] for one in json.loads(changes_json(made))["newly_registered"]] == ["aten.cholesky.default"]


def test_an_overload_that_is_decomposed_now_and_was_compared_has_lost_nothing() -> None:
    before, after = (table({"R -> R": ClaimedRule(confirmed=[0])}) for _ in range(2))
    after.overloads["aten.sum.dim"].registered = "decomposed into other ops"
    after.registered = {}
    made = changes_between(before, after)
    assert not made.fails({*Change})
    assert made.registered == (("aten.sum.dim", "strategy sum, sums.py", "decomposed into other ops"),)


def test_what_cannot_be_compared_is_named() -> None:
    made = changes_between(table({}, sizes=1), table({}, op="aten.mean.dim", sizes=2, registered=ALL))
    lines = list(changes_lines(made))
    assert "the tables answer different questions (sizes 1 and 2): only common calls are compared" in lines
    assert "in one table only, or without a common call: aten.mean.dim, aten.sum.dim" in lines
    assert not made.unregistered


RULES = """
from torch import ops
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding


@register_sharding(ops.aten.cumsum.default)
def cumsum(x, dim, dtype=None):
    free = [d for d in range(1 if LOSES else 0, x.ndim) if WIDENED or d != dim % x.ndim]
    return [([Replicate()], [Replicate(), None, None]), *(([Shard(d)], [Shard(d), None, None]) for d in free)]
"""


@pytest.mark.processes
@pytest.mark.cli
def test_a_rule_taken_away_and_a_condition_widened_are_named(tmp_path: Path) -> None:
    def verifier(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_module("verifier", "rules", *arguments, folder=tmp_path)

    options = ["--world-size", "2", "--sizes", "1", "--max-samples", "3", "--claims-only", "-q"]
    for name, loses, widened in (("before", False, False), ("again", False, False), ("after", True, True)):
        text = RULES.replace("LOSES", str(loses)).replace("WIDENED", str(widened))
        (tmp_path / f"{name}_rules.py").write_text(text)
        made = verifier("cumsum", *options, "--import", f"{name}_rules.py", "--table", f"{name}.json")
        assert made.returncode == int(widened), made.stderr
    found = verifier("diff", "before.json", "after.json", "--format", "json")
    assert found.returncode == 1, found.stderr
    changes = {(one["change"], one["rule"]) for one in json.loads(found.stdout)["rules"]}
    assert {("lost", "S(0) -> S(0)"), ("wrong", "S(1) -> S(1)")} <= changes
    written, again = ((tmp_path / f"{name}.json").read_text() for name in ("before", "again"))
    assert again.replace("again_rules", "before_rules") == written, "two checks of the same rules differ in nothing"
    assert verifier("diff", "before.json", "again.json").returncode == 0
    assert verifier("diff", "before.json", "after.json", "--fail-on", "gained").returncode == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["diff", "a.json"], "two tables are compared, not 1"),
        (["diff", "a.json", "b.json"], "a.json: No such file"),
        (["diff", "a.json", "b.json", "--format", "sarif"], "text, json or markdown"),
        (["add", "--fail-on", "lost"], "--fail-on lost"),
    ],
)
def test_usage_errors(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["verifier", "rules", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
