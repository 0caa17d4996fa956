"""The gate's decision for continuous integration: JUnit, SARIF, annotations of GitHub, and Markdown."""

from __future__ import annotations

import hashlib
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from verifier.core.wording import plain_json, plain_text
from verifier.gate.decision import GateDecision, GateItem
from verifier.gate.regret import OverBudget
from verifier.gate.rule_changes import RuleChange, where_text
from verifier.records.commands import github_command, replay_text
from verifier.records.files import DEFAULT_REPORTS

__all__ = ["Place", "render_github", "render_junit", "render_markdown", "render_sarif"]

NAME = "dtensor-verifier"
LOST = "LOST_RULE"
OVER = "OVER_BUDGET"
SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


class Place(NamedTuple):
    """Where the strategy of an op is defined: a path, relative to this folder where it can be, and a line from 1."""

    file: str
    line: int


Places = Mapping[str, Place]
"""The places of the user's own strategies, by op."""


def _place(item: GateItem, places: Places) -> Place | None:
    """Return the place of the strategy that an item accuses: as the file is now, or else as the run recorded it."""
    if item.op in places:
        return places[item.op]
    if item.strategy:
        file, _, line = item.strategy.rpartition(":")
        return Place(file, int(line))
    return next(iter(places.values())) if len({*places.values()}) == 1 else None


def _text(item: GateItem, folder: Path) -> str:
    replay = replay_text(item.fingerprint, item.imports, item.rank_memory, folder)
    return f"{item.message}\n{item.note}\nreproduce: {replay}"


def _failing(decision: GateDecision) -> list[GateItem]:
    return [*decision.new, *decision.expired]


def _lost_text(one: RuleChange) -> str:
    return f"{one.rule} is lost {where_text(one)}; torch's own strategy claims it, and it holds"


def _lost_place(one: RuleChange, places: Places) -> Place | None:
    return places.get(one.op)


def _over_text(one: OverBudget) -> str:
    return "\n".join((one.title, *one.lines))


def _problems(decision: GateDecision) -> list[str]:
    """Return why the decision is not whole: errors of ours, and what has no evidence."""
    problems = [f"error of the verifier: {error}" for error in decision.errors]
    problems += [f"{one.why}; {one.remedy}" for one in decision.unanswered]
    return problems or ([decision.unverified] if decision.unverified else [])


# ---------------------------------------------------------------------------------------------------------------- junit
def render_junit(decision: GateDecision, folder: Path = DEFAULT_REPORTS, places: Places | None = None) -> str:
    """Return the decision as JUnit XML: a test case for each finding and each entry, and one for the whole."""
    suite = ElementTree.Element("testsuite", name=NAME)
    for item in _failing(decision):
        place = _place(item, places or {})
        case = _case(suite, item.op, f"{item.verdict} {item.fingerprint} on mesh {item.mesh}", place)
        _child(case, "failure", item.message.partition("\n")[0], _text(item, folder), item.verdict)
    listed = {
        "known": decision.known, "untested": decision.untested, "fixed": decision.fixed, "mended": decision.mended,
    }  # fmt: skip
    for title, items in listed.items():
        for item in items:
            case = _case(suite, item.op, f"{item.verdict} {item.fingerprint} on mesh {item.mesh}")
            if title not in ("fixed", "mended"):
                _child(case, "skipped", f"{title}: {item.note}" + (f"; {item.reason}" if item.reason else ""))
    for one in decision.lost:
        case = _case(suite, one.op, f"lost rule {one.rule}", _lost_place(one, places or {}))
        if decision.fail_on_lost:
            _child(case, "failure", f"lost: {one.rule}", _lost_text(one), LOST)
        else:
            _child(case, "skipped", f"lost: {_lost_text(one)}")
    for over in decision.over:
        name = f"{OVER} {over.source} -> {over.target} on mesh {over.mesh}"
        _child(_case(suite, over.op, name, (places or {}).get(over.op)), "failure", over.title, _over_text(over), OVER)
    whole = _case(suite, NAME, f"gate on {decision.question}")
    for problem in _problems(decision):
        _child(whole, "error", problem.partition("\n")[0], problem)
    for count, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(count, str(sum(1 for _ in suite.iter(tag))))
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suites, encoding="unicode") + "\n"


def _case(suite: ElementTree.Element, group: str, name: str, place: Place | None = None) -> ElementTree.Element:
    attributes = {"classname": plain_text(group), "name": plain_text(name)}
    if place is not None:
        attributes |= {"file": plain_text(place.file), "line": str(place.line)}
    return ElementTree.SubElement(suite, "testcase", attributes)


def _child(case: ElementTree.Element, tag: str, message: str, text: str = "", kind: str = "") -> None:
    attributes = {"message": plain_text(message), **({"type": kind} if kind else {})}
    ElementTree.SubElement(case, tag, attributes).text = plain_text(text)


# ---------------------------------------------------------------------------------------------------------------- sarif
def render_sarif(decision: GateDecision, folder: Path = DEFAULT_REPORTS, places: Places | None = None) -> str:
    """Return the decision as SARIF 2.1.0; a known finding is a result that the baseline suppresses."""
    verdicts = sorted({item.verdict for item in (*_failing(decision), *decision.known)})
    verdicts += [LOST] if decision.lost else []
    verdicts += [OVER] if decision.over else []
    results = [_result(item, verdicts, folder, places or {}) for item in _failing(decision)]
    for item in decision.known:
        suppressed = {"kind": "external", "justification": item.reason}
        results.append({**_result(item, verdicts, folder, places or {}), "suppressions": [suppressed]})
    for one in decision.lost:
        level, text = "error" if decision.fail_on_lost else "note", f"{one.op}: {_lost_text(one)}"
        place = _lost_place(one, places or {})
        results.append(_other(LOST, verdicts, level, text, f"{one.op} {one.rule}", place))
    for over in decision.over:
        key, place = f"{over.op} {over.mesh} {over.source} {over.target}", (places or {}).get(over.op)
        results.append(_other(OVER, verdicts, "error", _over_text(over), key, place))
    problems = [{"level": "error", "message": {"text": problem}} for problem in _problems(decision)]
    invocation = {
        "executionSuccessful": decision.exit_status != 2,
        "exitCode": decision.exit_status,
        "toolExecutionNotifications": problems,
    }
    rules = [{"id": one, "shortDescription": {"text": _meaning(one)}} for one in verdicts]
    driver = {"name": NAME, "version": version(NAME), "rules": rules}
    run = {"tool": {"driver": driver}, "invocations": [invocation], "results": results}
    return plain_json(json.dumps({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n")


def _result(item: GateItem, verdicts: Sequence[str], folder: Path, places: Places) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": item.verdict,
        "ruleIndex": verdicts.index(item.verdict),
        "level": "error",
        "message": {"text": f"{item.op}: {_text(item, folder)}"},
        "partialFingerprints": {f"{NAME}/v1": item.fingerprint},
    }
    if (place := _place(item, places)) is not None:
        result["locations"] = [_location(place)]
    return result


def _other(rule: str, verdicts: Sequence[str], level: str, text: str, key: str, place: Place | None) -> dict[str, Any]:
    """Return a result that is no finding; ``key`` says which it is."""
    result: dict[str, Any] = {
        "ruleId": rule,
        "ruleIndex": verdicts.index(rule),
        "level": level,
        "message": {"text": text},
        "partialFingerprints": {f"{NAME}/v1": hashlib.sha256(key.encode()).hexdigest()[:12]},
    }
    return result if place is None else {**result, "locations": [_location(place)]}


def _location(place: Place) -> dict[str, Any]:
    uri = Path(place.file).as_uri() if Path(place.file).is_absolute() else quote(Path(place.file).as_posix())
    return {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": {"startLine": place.line}}}


def _meaning(verdict: str) -> str:
    if verdict == LOST:
        return "The import does not claim a rule that torch's own strategy claims and that holds."
    if verdict == OVER:
        return "In a redistribution, ranks received more bytes than the budget of the op allows."
    return f"The sharded call ends otherwise than the local call: {verdict.lower().replace('_', ' ')}."


# --------------------------------------------------------------------------------------------------- github, markdown
def render_github(decision: GateDecision, folder: Path = DEFAULT_REPORTS, places: Places | None = None) -> str:
    """Return the decision as annotations, an error for each finding; the last one is a notice with the totals."""
    lines = [
        github_command("error", f"{item.verdict} in {item.op}", _text(item, folder), _place(item, places or {}))
        for item in _failing(decision)
    ]
    kind = "error" if decision.fail_on_lost else "warning"
    lines += [
        github_command(kind, f"lost rule of {one.op}", _lost_text(one), _lost_place(one, places or {}))
        for one in decision.lost
    ]
    lines += [
        github_command("error", f"over budget: {one.op}", _over_text(one), (places or {}).get(one.op))
        for one in decision.over
    ]
    lines += [github_command("error", "could not verify", problem) for problem in _problems(decision)]
    return "\n".join([*lines, github_command("notice", NAME, _totals(decision))]) + "\n"


def render_markdown(decision: GateDecision, folder: Path = DEFAULT_REPORTS, places: Places | None = None) -> str:
    """Return the decision as Markdown: one line if it is green, else a table of what is new, and each finding."""
    if decision.exit_status == 0:
        lost = "".join(f"\n- {line}" for line in _lost_cells(decision))
        return plain_text(f"**{NAME} passed**: {_totals(decision)}\n{lost}" + ("\n" if lost else ""))
    failed = "failed" if decision.exit_status == 1 else "could not verify"
    lines = [f"**{NAME} {failed}**: {_totals(decision)}", ""]
    lines += [f"- {_cell(problem)}" for problem in _problems(decision)]
    lines += [f"- {line}" for line in _lost_cells(decision)]
    lines += [f"- over budget: {_cell('; '.join((one.title, *one.lines)))}" for one in decision.over]
    if items := _failing(decision):
        lines += ["", "| op | verdict | mesh | difference | strategy |", "| --- | --- | --- | --- | --- |"]
    for item in items:
        place = _place(item, places or {})
        cells = (item.op, item.verdict, item.mesh, item.message.partition("\n")[0])
        lines.append(f"| {' | '.join(map(_cell, cells))} | {f'{place.file}:{place.line}' if place else ''} |")
    for item in items:
        lines += ["", f"<details><summary>{item.fingerprint} {item.verdict} in {item.op}</summary>", ""]
        lines += ["```text", _text(item, folder).replace("```", "'''"), "```", "", "</details>"]
    return plain_text("\n".join(lines) + "\n")


def _lost_cells(decision: GateDecision) -> list[str]:
    return [_cell(f"{one.op}: {_lost_text(one)}") for one in decision.lost]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _totals(decision: GateDecision) -> str:
    counts = (
        f"{len(decision.new)} new, {len(decision.expired)} expired, {len(decision.known)} known, "
        f"{len(decision.fixed)} fixed, {len(decision.untested)} untested"
    )
    counts += f", {len(decision.mended)} mended" if decision.mended else ""
    counts += f", {len(decision.lost)} lost" if decision.lost else ""
    counts += f", {len(decision.over)} over budget" if decision.regret else ""
    return f"{decision.evidence} of {decision.trials} trials and rules proved something; {counts}"
