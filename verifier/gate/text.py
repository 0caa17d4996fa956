"""The gate's decision as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import msgspec

from verifier.core.wording import places_text, plural
from verifier.gate.decision import GateDecision
from verifier.gate.entries import NOT_EXPLAINED
from verifier.gate.rule_changes import where_text
from verifier.records.commands import command_text, replay_text
from verifier.records.files import DEFAULT_REPORTS
from verifier.records.schema import FORMAT_VERSION

__all__ = [
    "as_json",
    "render",
]

_NEWLINE = "\n"
MOST_UNTESTED = 8
"""Entries that were not tried again and have a line each, so that the end of the text fits a screen."""
MOST_LOST = 12
"""The same of lost rules."""


def as_json(decision: GateDecision) -> str:
    """Return the decision as JSON: ``format_version``, ``exit_status``, ``unverified``, then its fields."""
    fields = {
        "format_version": FORMAT_VERSION,
        "exit_status": decision.exit_status,
        "unverified": decision.unverified,
        **asdict(decision),
    }
    return msgspec.json.format(msgspec.json.encode(fields), indent=2).decode() + "\n"


def render(decision: GateDecision, folder: Path = DEFAULT_REPORTS, brief: bool = False, quiet: bool = False) -> str:
    """Return the decision as text for a terminal; its last lines say what to do next.

    A ``brief`` text has few lines on entries of the baseline, a ``quiet`` one none on what is known. Each says why
    something could not be verified.
    """
    if quiet:
        lines = _lost_lines(decision, MOST_LOST) if decision.fail_on_lost else []
        lines += _over_lines(decision, MOST_LOST)
        lines += _failing_lines(decision, folder)
        lines += _unverified_lines(decision) if decision.exit_status == 2 else []
        return "\n".join([*lines, _next_steps(decision, folder)[-1]]).lstrip("\n") + "\n"
    most = MOST_UNTESTED if brief else 10**9
    lines = [f"gate on {decision.question}" + (f", {decision.revision}" if decision.revision else "")]
    lines += [f"  judged   {run}" for run in decision.runs]
    lines += [f"  left out {run}" for run in decision.left_out]
    lines += [f"  {decision.unchanged}"] if decision.unchanged else []
    lines += [] if brief else _failing_lines(decision, folder)
    listed = {
        "known": decision.known, "fixed": decision.fixed, "mended": decision.mended, "untested": decision.untested,
    }  # fmt: skip
    for title, items in listed.items():
        if items:
            lines.append("")
        for item in items[: MOST_UNTESTED if title == "untested" else most]:
            reason = f"; {item.reason}" if title == "known" else ""
            lines.append(
                f"{title} {item.fingerprint} {item.verdict} in {item.op} on mesh {item.mesh}: {item.note}{reason}"
            )
        if title != "untested" and (rest := len(items) - most) > 0:
            lines.append(f"{title}: {plural(rest, 'more entry', 'more entries')}, which -v lists")
    if decision.special:
        lines.append("")
    for item in decision.special[:most]:
        lines.append(
            f"special {item.fingerprint} in {item.op} on mesh {item.mesh}: {item.message.partition(_NEWLINE)[0]}"
        )
    if (more := len(decision.untested) - MOST_UNTESTED) > 0:
        lines.append(f"untested: {plural(more, 'more entry', 'more entries')}, which `--format json` lists")
    lines += ["", *_lost_lines(decision, MOST_LOST if brief else most)] if decision.lost else []
    lines += [""] if decision.unreached else []
    lines += [f"unreached {op}: no call reaches {places_text(places)}" for op, places in decision.unreached]
    lines += _budget_lines(decision, MOST_UNTESTED if brief else most)
    lines += _over_lines(decision, MOST_LOST if brief else most)
    lines += _failing_lines(decision, folder) if brief else []
    lines += _no_evidence_lines(decision)
    lines += [
        "",
        f"{decision._counted}, {decision.trials - decision.evidence} of them without evidence; "
        f"{len(decision.new)} new, {len(decision.expired)} expired, {len(decision.known)} known, "
        f"{len(decision.fixed)} fixed, {len(decision.untested)} untested"
        + (f", {len(decision.mended)} mended" if decision.mended else "")
        + (f", {len(decision.special)} for special values alone" if decision.special else "")
        + (f", {len(decision.lost)} lost" if decision.lost else "")
        + (f", {len(decision.over)} over budget" if decision.regret else ""),
        *_next_steps(decision, folder),
    ]
    return "\n".join(lines) + "\n"


def _lost_lines(decision: GateDecision, most: int) -> list[str]:
    """Return a line for each of the first ``most`` lost rules, and one for the others."""
    title = "LOST" if decision.fail_on_lost else "lost"
    lines = [f"{title} {one.op}: {one.rule} {where_text(one)}" for one in decision.lost[:most]]
    if (rest := len(decision.lost) - most) > 0:
        lines.append(f"{title}: {plural(rest, 'more rule')}, which -v lists")
    return lines


def _budget_lines(decision: GateDecision, most: int) -> list[str]:
    """Return what the budgets were asked about, and a line for each of the first ``most`` that were not."""
    if decision.regret is None:
        return []
    judged = plural(decision.regret.cells, "op on a mesh", "ops on meshes")
    lines = ["", f"budgets: {plural(decision.regret.within, 'kind')} of redistribution within budget, of {judged}"]
    lines += [f"not judged by a budget: {text}" for text in decision.regret.not_judged[:most]]
    if (rest := len(decision.regret.not_judged) - most) > 0:
        lines.append(f"not judged by a budget: {rest:,} more, which -v lists")
    return lines


def _over_lines(decision: GateDecision, most: int) -> list[str]:
    lines = []
    for one in decision.over[:most]:
        lines += ["", f"OVER BUDGET {one.title}", *(f"  {line}" for line in one.lines)]
    if (rest := len(decision.over) - most) > 0:
        lines.append(f"OVER BUDGET {rest:,} more, which -v lists")
    return lines


def _no_evidence_lines(decision: GateDecision) -> list[str]:
    lines = ["", *(f"TOOL_ERROR {error}" for error in decision.errors)] if decision.errors else []
    for one in decision.unanswered:
        lines += ["", f"NO EVIDENCE {one.why}", f"  {one.remedy}"]
    return lines


def _unverified_lines(decision: GateDecision) -> list[str]:
    return _no_evidence_lines(decision) or [f"NO EVIDENCE {decision.unverified}"]


def _failing_lines(decision: GateDecision, folder: Path) -> list[str]:
    lines = []
    for title, items in (("NEW", decision.new), ("EXPIRED", decision.expired)):
        for item in items:
            lines += ["", f"{title} {item.fingerprint} {item.verdict}: {item.note}"]
            lines += [f"  {line}" for line in item.message.splitlines()]
            replay = replay_text(item.fingerprint, item.imports, item.rank_memory, folder)
            lines.append(f"    reproduce: {replay}")
            lines += [f"  {name}: {text}" for name, text in (("reason", item.reason), ("link", item.link)) if text]
    return lines


def _command(decision: GateDecision, option: str, folder: Path) -> str:
    """Return the command that asks the same question with one more option."""
    return command_text(" ".join(filter(None, ["gate", decision.options, option])), folder)


def _next_steps(decision: GateDecision, folder: Path) -> list[str]:
    """Return what the reader is to do, the most pressing first, and the exit status."""
    steps = []
    update = f"`{_command(decision, '--update', folder)}`"
    if decision.errors:
        steps.append("report the error of the verifier; until it is gone the run decides nothing")
    elif decision.unanswered:
        steps.append("run what has no evidence, as it says there; or ask about something else: `gate OP --mesh MESH`")
    elif decision.unverified:
        steps.append(f"{decision.unverified}; run again with more time, or another selection of ops")
    if unexplained := sum(item.reason.strip() in ("", NOT_EXPLAINED) and bool(item.expires) for item in decision.new):
        entries = plural(unexplained, "entry", "entries")
        steps.append(f"write in the baseline why what is new is accepted: {entries} without a reason; or fix it")
    if len(decision.new) > unexplained:
        steps.append(f"fix what is new, or accept it: {update}, then give each a reason")
    if decision.special:
        steps.append("what only special values show does not fail the gate; `--special-values` makes it count")
    if decision.lost:
        steps.append(
            "claim the lost rules, which torch's own strategies claim and which hold, or DTensor communicates there"
            + ("" if decision.fail_on_lost else "; `--fail-on lost` makes them count")
        )
    if decision.unreached:
        steps.append("nothing is proved of lines that no call reaches; give samples that reach them")
    if decision.over:
        update_budgets = f"`{_command(decision, '--fail-on regret --update', folder)}`"
        steps.append(f"claim the rule that would spare the bytes over budget, or allow them: {update_budgets}")
    if decision.expired:
        steps.append("fix what has expired, or move its `expires` in the baseline, with a reason that still holds")
    if decision.fixed:
        if decision.imports:
            options = " ".join(f"--import {name}" for name in decision.imports)
            steps.append(f"these entries passed because of {options}; if every run will have it, remove them: {update}")
        else:
            steps.append(f"drop what is fixed from the baseline: {update}")
    if decision.mended:
        steps.append(f"note in the baseline what this version of torch has mended: {update}")
    passed = "nothing had to be verified" if decision.unchanged and not decision.trials else "nothing new"
    reasons = {
        "new or expired findings": decision.new or decision.expired,
        "lost rules": decision.lost and decision.fail_on_lost,
        "redistributions over budget": decision.over,
    }
    failed = next((name for name, found in reasons.items() if found), "")
    verdict = {0: f"passed: {passed}", 1: f"failed: {failed}", 2: "could not verify"}
    return [
        *(f"next: {step}" for step in steps),
        f"gate {verdict[decision.exit_status]} (exit status {decision.exit_status})",
    ]
