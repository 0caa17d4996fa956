"""The rule check (level 1) as workflow commands of GitHub Actions, which shows them as annotations of a check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from verifier.records.commands import github_command, replay_text
from verifier.records.files import DEFAULT_REPORTS
from verifier.records.schema import MissingRuleRecord, RunRecord, WrongRuleRecord
from verifier.report.missing import by_worth
from verifier.report.rules_text import (
    call_text,
    evidence_for,
    first_line,
    rule_text,
    saves_text,
    state_text,
    totals_block,
)
from verifier.report.words import evidence_text

__all__ = ["MOST_MISSING", "github_lines"]

MOST_MISSING = 50
"""Number of missing rules with their own annotation: the rules that save most."""


def github_lines(
    run: RunRecord, folder: Path = DEFAULT_REPORTS, places: Mapping[str, tuple[str, int]] | None = None
) -> list[str]:
    """Return one line for each annotation; no lines for a run without level 1.

    ``places`` has the file and line of the user's own strategies, by op. For other ops, what the run recorded is taken.

    Errors of the verifier and new wrong rules are errors. Unconfirmed rules are warnings, missing rules are notices.
    The last line is a notice with the totals, also of untested combinations. A rule of several ops is annotated once.
    """
    if run.rules is None:
        return []
    ops, imports, at = run.rules.ops.values(), run.header.imports, {**_recorded_places(run), **(places or {})}
    lines = [github_command("error", "the verifier itself failed", error) for error in run.tool_errors]
    new = [rule for op in ops for rule in op.wrong if not rule.known and not rule.follows]
    wrong = {_identity(rule): rule for rule in new}.values()
    lines += [
        github_command("error", f"wrong rule in {rule.op}", _wrong_text(rule, imports, folder), at.get(rule.op))
        for rule in wrong
    ]
    unsure = {_identity(rule): rule for op in ops for rule in op.unconfirmed}.values()
    lines += [
        github_command(
            "warning", f"unconfirmed: rule of {rule.op}", _wrong_text(rule, imports, folder), at.get(rule.op)
        )
        for rule in unsure
    ]
    missing = by_worth({_identity(rule): rule for op in ops for rule in op.missing}.values())
    lines += [
        github_command("notice", f"missing rule in {rule.op}", _missing_text(rule)) for rule in missing[:MOST_MISSING]
    ]
    summary = totals_block(run.rules)
    if len(missing) > MOST_MISSING:
        summary.append(f"{len(missing) - MOST_MISSING:,} more missing rules in run.json")
    return [*lines, github_command("notice", "rule check (level 1)", "\n".join(summary))]


def _recorded_places(run: RunRecord) -> dict[str, tuple[str, int]]:
    strategies = {one.op: one.strategy.rpartition(":") for one in run.findings if one.strategy}
    return {op: (file, int(line)) for op, (file, _, line) in strategies.items()}


def _identity(rule: WrongRuleRecord | MissingRuleRecord) -> tuple[str, ...]:
    """Return a key that is equal for rules with one annotation: the finding, or else the rule and its call."""
    if isinstance(rule, MissingRuleRecord):
        return call_text(rule), rule_text(rule)
    return (rule.fingerprint,) if rule.fingerprint else (call_text(rule), rule_text(rule), rule.mesh)


def _wrong_text(rule: WrongRuleRecord, imports: Sequence[str], folder: Path) -> str:
    lines = [f"{rule.verdict} {first_line(rule.message)}", f"in {state_text(rule)}"]
    lines.append(evidence_text(1, rule.confirmed))
    if rule.fingerprint:
        lines.append(f"reproduce: {replay_text(rule.fingerprint, imports, folder=folder)}")
    return "\n".join(lines)


def _missing_text(rule: MissingRuleRecord) -> str:
    return f"{rule_text(rule)}; {evidence_for(rule)}; {saves_text(rule)}\nin {call_text(rule)}"
