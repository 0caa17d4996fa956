"""Formats of the decision for continuous integration, read as their readers read them."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from typing import Any

import pytest

from verifier.gate.decision import GateDecision, GateItem
from verifier.gate.evidence import NoEvidence
from verifier.gate.formats import Place, render_github, render_junit, render_markdown, render_sarif
from verifier.gate.regret import OverBudget, RegretDecision
from verifier.gate.rule_changes import Change, RuleChange
from verifier.gate.text import MOST_UNTESTED, render

GREEN = GateDecision(
    question="aten.cumsum.default", runs=("one",), revision="torch 2.13.0", new=(), known=(), fixed=(), expired=(),
    untested=(), trials=12, evidence=10, complete=True, errors=(),
)  # fmt: skip
ITEM = GateItem(
    fingerprint="0b4a15ec4750",
    op="aten.cumsum.default",
    family="opinfo",
    verdict="WRONG_VALUE",
    mesh="2",
    message="output [0]: got 1 | 2 <b> & \x1b[31m\n  in aten.cumsum.default, 100%",
    note="not in the baseline",
    imports=("my_rules.py",),
)
RED = replace(GREEN, new=(ITEM,), known=(replace(ITEM, fingerprint="ffff15ec4750", reason="is accepted"),))
UNSURE = replace(GREEN, trials=0, evidence=0, unanswered=(NoEvidence("mylib.op has no samples", "give some"),))
PLACES = {"aten.cumsum.default": Place("rules/my, rules.py", 7)}


def junit(decision: GateDecision) -> ElementTree.Element:
    (suite,) = ElementTree.fromstring(render_junit(decision, places=PLACES))
    assert suite.get("tests") == str(len(suite))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        assert suite.get(name) == str(len(suite.findall(f"testcase/{tag}")))
    return suite


def test_junit_has_a_case_for_each_finding_and_one_for_the_whole() -> None:
    assert [len(case) for case in junit(GREEN)] == [0]
    new, known, whole = junit(RED)
    failure = new.find("failure")
    assert failure is not None
    assert failure.get("type") == "WRONG_VALUE"
    assert "replay 0b4a15ec4750 --import my_rules.py" in (failure.text or "")
    assert "\x1b" not in (failure.text or "")
    assert (new.get("file"), new.get("line")) == ("rules/my, rules.py", "7")
    assert known.find("skipped") is not None
    assert len(whole) == 0
    assert junit(UNSURE).find("testcase/error") is not None, "what could not be verified is not green"


def notice_keys(invocation: dict[str, Any]) -> set[str]:
    return {key for notice in invocation["toolExecutionNotifications"] for key in notice}


def sarif(decision: GateDecision) -> dict[str, Any]:
    """Return the only run of a SARIF log that has what the schema of 2.1.0 requires, and no property that it lacks."""
    log = json.loads(render_sarif(decision, places=PLACES))
    assert log["version"] == "2.1.0"
    assert log.keys() == {"$schema", "version", "runs"}
    (run,) = log["runs"]
    assert run.keys() == {"tool", "invocations", "results"}
    driver = run["tool"]["driver"]
    assert isinstance(driver["name"], str)
    assert [rule.keys() for rule in driver["rules"]] == [{"id", "shortDescription"}] * len(driver["rules"])
    assert len({rule["id"] for rule in driver["rules"]}) == len(driver["rules"])
    for invocation in run["invocations"]:
        assert isinstance(invocation["executionSuccessful"], bool)
        assert isinstance(invocation["exitCode"], int)
        for notice in invocation["toolExecutionNotifications"]:
            assert notice["level"] in ("none", "note", "warning", "error")
            assert isinstance(notice["message"]["text"], str)
        assert notice_keys(invocation) <= {"level", "message"}
        assert invocation.keys() == {"executionSuccessful", "exitCode", "toolExecutionNotifications"}
    for result in run["results"]:
        assert result.keys() <= {
            "ruleId", "ruleIndex", "level", "message", "partialFingerprints", "locations", "suppressions"
        }  # fmt: skip
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("none", "note", "warning", "error")
        assert isinstance(result["message"]["text"], str)
        assert all(isinstance(value, str) for value in result["partialFingerprints"].values())
        for location in result.get("locations", []):
            assert location["physicalLocation"]["region"]["startLine"] >= 1
            uri = location["physicalLocation"]["artifactLocation"]["uri"]
            assert re.fullmatch(r"[\w\-./%:]+", uri), uri
        for suppression in result.get("suppressions", []):
            assert suppression["kind"] in ("inSource", "external")
            assert suppression.keys() <= {"kind", "justification"}
            assert isinstance(suppression["justification"], str)
    return dict(run)


def test_sarif_has_the_line_of_the_strategy_and_suppresses_what_is_known() -> None:
    assert sarif(GREEN)["results"] == []
    new, known = sarif(RED)["results"]
    assert new["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "rules/my%2C%20rules.py"
    assert "suppressions" not in new
    assert known["suppressions"] == [{"kind": "external", "justification": "is accepted"}]
    (invocation,) = sarif(UNSURE)["invocations"]
    assert not invocation["executionSuccessful"]
    assert invocation["toolExecutionNotifications"][0]["message"]["text"] == "mylib.op has no samples; give some"


def test_annotations_of_github_stand_on_the_line_of_the_strategy() -> None:
    error, notice = render_github(RED, places=PLACES).splitlines()
    assert error.startswith("::error file=rules/my%2C rules.py,line=7,title=WRONG_VALUE in aten.cumsum.default::output")
    assert "100%25%0A" in error
    assert notice.startswith("::notice ")
    assert render_github(UNSURE).startswith("::error title=could not verify::mylib.op has no samples")
    assert len(render_github(GREEN).splitlines()) == 1


@pytest.mark.parametrize(("decision", "says"), [(RED, "failed"), (UNSURE, "could not verify")])
def test_markdown_is_one_line_when_it_is_green(decision: GateDecision, says: str) -> None:
    (line,) = render_markdown(GREEN).splitlines()
    assert "passed" in line
    text = render_markdown(decision, places=PLACES)
    assert says in text.splitlines()[0]
    assert "\x1b" not in text
    if decision is RED:
        assert "got 1 \\| 2 &lt;b>" in text
        assert "rules/my, rules.py:7" in text


def test_the_text_has_a_few_entries_that_were_not_tried_and_the_number_of_the_others() -> None:
    many = tuple(replace(ITEM, fingerprint=f"{number:012}") for number in range(MOST_UNTESTED + 3))
    lines = render(replace(GREEN, untested=many)).splitlines()
    assert sum(line.startswith("untested 0") for line in lines) == MOST_UNTESTED
    assert "untested: 3 more entries, which `--format json` lists" in lines
    assert not any("more entr" in line for line in render(replace(GREEN, untested=many[:MOST_UNTESTED])).splitlines())


def test_a_finding_that_was_recorded_stands_on_the_line_that_its_run_recorded() -> None:
    file = "torch/distributed/tensor/_ops/_math_ops.py"
    recorded = replace(GREEN, new=(replace(ITEM, strategy=f"{file}:12"),))
    assert render_github(recorded).startswith(f"::error file={file},line=12,title=")
    assert f'file="{file}" line="12"' in render_junit(recorded)
    assert json.loads(render_sarif(recorded))["runs"][0]["results"][0]["locations"][0] == {
        "physicalLocation": {"artifactLocation": {"uri": file}, "region": {"startLine": 12}}
    }
    assert f"| {file}:12 |" in render_markdown(recorded)
    assert file not in render_github(recorded, places=PLACES), "the file may have changed since"


@pytest.mark.parametrize(
    ("counts", "status", "tag", "level", "kind", "title"),
    [(False, 0, "skipped", "note", "warning", "lost"), (True, 1, "failure", "error", "error", "LOST")],
)
def test_lost_rules_are_in_all_formats(counts: bool, status: int, tag: str, level: str, kind: str, title: str) -> None:
    change = RuleChange("aten.cumsum.default", "S(0) -> S(0)", Change.LOST, ("self=f64[5, 5], dim=1",), False)
    decision = replace(GREEN, lost=(change,), fail_on_lost=counts)
    assert decision.exit_status == status
    assert junit(decision)[0].find(tag) is not None
    (result,) = sarif(decision)["results"]
    assert (result["ruleId"], result["level"]) == ("LOST_RULE", level)
    assert render_github(decision, places=PLACES).startswith(f"::{kind} file=rules/my%2C rules.py,line=7,")
    assert "- aten.cumsum.default: S(0) -&gt; S(0)" in render_markdown(decision).replace("->", "-&gt;")
    assert f"{title} aten.cumsum.default: S(0) -> S(0) at 1 call: self=f64[5, 5], dim=1" in render(decision)


def test_what_is_over_budget_is_in_all_formats() -> None:
    over = OverBudget(
        "aten.cumsum.default", "4", "float32[8, 8]", "S(0)", "S(1)", 3, "S(0) -all_gather(0)-> R -> S(1)   768 B", 768,
        "S(0) -all_to_all(0)-> S(1)   192 B", 192, "S(0) -all_to_all(0)-> S(1)   192 B", 192, "S(0); R",
    )  # fmt: skip
    decision = replace(GREEN, regret=RegretDecision((over,), 4, 1, ("budget of aten.mm.default on mesh 4: not run",)))
    assert decision.exit_status == 1
    failure = junit(decision)[0].find("failure")
    assert failure is not None
    assert failure.get("type") == "OVER_BUDGET"
    (result,) = sarif(decision)["results"]
    assert (result["ruleId"], result["level"]) == ("OVER_BUDGET", "error")
    assert render_github(decision, places=PLACES).startswith(
        "::error file=rules/my%2C rules.py,line=7,title=over budget"
    )
    assert "- over budget: aten.cumsum.default(S(0); R) on mesh 4" in render_markdown(decision)
    for quiet in (False, True):
        text = render(decision, quiet=quiet)
        assert "OVER BUDGET aten.cumsum.default(S(0); R) on mesh 4: float32[8, 8] S(0) -> S(1), 3 times: 768 B" in text
        assert "  allowed  S(0) -all_to_all(0)-> S(1)   192 B\n" in text
        assert text.endswith("gate failed: redistributions over budget (exit status 1)\n")
    assert "budgets: 4 kinds of redistribution within budget, of 1 op on a mesh" in render(decision)
    assert "not judged by a budget: budget of aten.mm.default on mesh 4: not run" in render(decision)
