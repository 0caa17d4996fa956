"""The summary at the end of a run, for a terminal or a log, as plain lines; the last lines are the next steps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from rich.console import Console
from rich.text import Text

from verifier.core.wording import plural
from verifier.records.commands import finding_text, replay_command, resume_text
from verifier.records.files import DEFAULT_REPORTS
from verifier.records.schema import FAILS, GONE, NOT_SELECTED, FindingRecord, RunRecord
from verifier.report.rules_text import totals_block, untested_beside_rules
from verifier.report.words import (
    evidence_text,
    level_1_only,
    outcome,
    present_verdicts,
    seconds_text,
    totals,
)

__all__ = ["next_steps", "print_summary"]

_STYLES = {"pass": "green", "fail": "bold red", "open": "yellow", "ours": "bold magenta"}
_MOST_RULES = 6


class _Most(NamedTuple):
    """How many ops, lines of a kind, and new findings in full are printed."""

    ops: int
    lines: int
    in_full: int


_FULL, _BRIEF = _Most(10**9, 10**9, 20), _Most(8, 4, 3)
_NUMBER = re.compile(r"\b\d[\dx]*\b")
"""A number or the shape of a mesh, but not a digit within a name."""


class _Say(Protocol):
    def __call__(self, text: str | Text = "", style: str = "") -> None: ...


def print_summary(
    run: RunRecord,
    console: Console,
    page: Path | str | None = "reports/latest/index.html",
    folder: Path = DEFAULT_REPORTS,
    brief: bool = False,
    quiet: bool = False,
) -> None:
    """Print what passed, what failed and what was not tested, the findings, and the next steps.

    No line is wrapped, so that commands can be copied. Without a terminal the same lines are printed without colour.
    ``page`` is the path of this run's HTML report, if there is one. Runs are recorded in ``folder``. A ``brief``
    summary fits a screen if there is no new finding; a ``quiet`` one has new findings and one line of totals.
    """
    most = _BRIEF if brief else _FULL

    def say(text: str | Text = "", style: str = "") -> None:
        line = Text(text, style=style) if isinstance(text, str) else text
        console.print(line, soft_wrap=True, highlight=False)

    if quiet:
        _say_new(run, say, folder, most)
        say(_totals_line(run))
        return
    say()
    by_rules = level_1_only(run)
    on_meshes = {op: counts for op, counts in run.counts_by_op.items() if op not in by_rules}
    if on_meshes or not by_rules:
        for line in _table(on_meshes, most.ops):
            say(line)
        if run.rules is not None:
            say()
    _say_rules(run, say)
    _say_rule_coverage(run, say, most)
    _say_edge_coverage(run, say)
    _say_known(run, say, most)
    _say_not_tested(run, say, most)
    _say_new(run, say, folder, most)
    say()
    if not run.complete:
        say("INCOMPLETE: the run ended before it reached everything", "bold yellow")
    say(_totals_line(run))
    for line_text in next_steps(run, page, folder):
        say(f"  {line_text}")


def _totals_line(run: RunRecord) -> Text:
    parts = [Text(part, style=_STYLES.get(tone, "")) for part, tone in totals(run).parts]
    return Text(", ").join(parts).append(f"; took {seconds_text(run.seconds)}")


def next_steps(run: RunRecord, page: Path | str | None, folder: Path = DEFAULT_REPORTS) -> list[str]:
    """Return the next steps after ``run``, one per line; the last step is the page to open, if there is one."""
    total = totals(run)
    new = [finding for finding in run.findings if not finding.known]
    steps = []
    if total.concluded == 0:
        steps.append("nothing was tested, so nothing is proved: see above why, then run again")
    if total.tool_errors:
        steps.append("the verifier failed in places: read its errors before you trust the rest")
    if not run.complete:
        if run.header.request and run.header.time_limit is None:
            steps.append(f"go on with it: {resume_text(run.header.id, run.header.imports, folder)}")
        else:
            steps.append(f"run it again, with more time if that was short: {run.header.command}")
    if new:
        steps.append(f"reproduce: {replay_command(new[0], folder)}")
    if page is not None:
        steps.append(f"open {page}")
    return steps


# ------------------------------------------------------------------------------------------------------------- blocks
def _table(counts_by_op: Mapping[str, Mapping[str, int]], most: int) -> list[Text]:
    """Return a table with a column per verdict that occurs, and rows of ``most`` ops; those that failed come first."""
    if not counts_by_op:
        return [Text("nothing was tested", style="bold yellow")]
    verdicts = present_verdicts(counts_by_op.values())
    width = max(len("op"), *map(len, counts_by_op))
    header = Text("op".ljust(width), style="dim")
    for verdict in verdicts:
        header.append(f"  {verdict}")
    lines = [header]
    rows = [*counts_by_op.items()]
    if (more := len(rows) - most) > 0:
        rows.sort(
            key=lambda row: not any(outcome(verdict).tone == "fail" for verdict, count in row[1].items() if count)
        )
    for op, counts in rows[:most]:
        line = Text(op.ljust(width))
        for verdict in verdicts:
            count = counts.get(verdict, 0)
            line.append("  ").append(
                (f"{count:,}" if count else "-").rjust(len(verdict)),
                style=_STYLES[outcome(verdict).tone] if count else "dim",
            )
        if not any(outcome(verdict).tone in ("pass", "fail") for verdict, count in counts.items() if count):
            line.append("  not tested", style="yellow")
        lines.append(line)
    return lines + ([Text(f"and {plural(more, 'more op')}, which -v lists", style="dim")] if more > 0 else [])


def _say_rules(run: RunRecord, say: _Say) -> None:
    """Print the totals of level 1. It has too many ops for a summary, and its wrong rules are among the findings."""
    if run.rules is None:
        return
    first, *lines = totals_block(run.rules)
    say(first, "bold")
    for line in lines:
        say(line, "yellow" if line.startswith(("not tested", "nothing tested", "nothing was", "died")) else "")


def _say_rule_coverage(run: RunRecord, say: _Say, most: _Most) -> None:
    """Print how many of DTensor's claimed rules ran on a mesh, and which rules did not."""
    if not run.rule_coverage:
        return
    claimed = sum(len(op.claimed) for op in run.rule_coverage.values())
    ran = sum(len(op.exercised) for op in run.rule_coverage.values())
    say()
    say(f"{ran:,} of {plural(claimed, 'rule')} that DTensor claims of these calls ran on a mesh", "bold")
    left = {
        op: [rule for rule in rules.claimed if rule not in rules.exercised] for op, rules in run.rule_coverage.items()
    }
    lacking = [(op, never) for op, never in left.items() if never]
    if (others := len(lacking) - most.lines) > 0:
        say(f"  {plural(others, 'more op')} with rules that never ran, which -v lists", "yellow")
    for op, never in lacking[: most.lines]:
        rules = run.rule_coverage[op]
        if never:
            more = f" and {len(never) - _MOST_RULES} more" if len(never) > _MOST_RULES else ""
            say(f"  {op}: {len(never)} of {len(rules.claimed)} never: {'; '.join(never[:_MOST_RULES])}{more}", "yellow")


def _say_edge_coverage(run: RunRecord, say: _Say) -> None:
    """Print how many edges between placements explicit redistributions took."""
    if run.edge_coverage:
        say()
    for ndim, edges in run.edge_coverage.items():
        of = f"{len(edges.exercised)} of {edges.possible} edges between placements"
        never = edges.possible - len(edges.exercised) - len(edges.refused)
        say(f"{of} exercised on {ndim}-d meshes, {len(edges.refused)} only refused by DTensor, {never} never asked for")


def _say_new(run: RunRecord, say: _Say, folder: Path, most: _Most) -> None:
    new = [finding for finding in run.findings if not finding.known]
    if new:
        say()
        say(plural(len(new), "new finding"), "bold red")
    for finding in new[: most.in_full]:
        say()
        say(Text(f"{finding.verdict} {finding.fingerprint}, {_evidence(finding)}", style="red"))
        for line in finding_text(finding, folder).splitlines():
            say(f"  {line}")
    if len(new) > most.in_full:
        say()
        say("the others in one line each")
    for finding in new[most.in_full :]:
        say(f"  {finding.fingerprint} {finding.verdict} {finding.op} on mesh {finding.mesh}")


def _say_known(run: RunRecord, say: _Say, most: _Most) -> None:
    known = [finding for finding in run.findings if finding.known]
    if known:
        say()
        say(plural(len(known), "known finding"), "bold")
    for finding in known[: most.lines]:
        reason = finding.reason or "no reason is recorded"
        say(f"  {finding.fingerprint} {finding.verdict} {finding.op} on mesh {finding.mesh}: {reason}")
        if finding.explained and most is _FULL:
            say(f"    {finding.explained}", "dim")
    if (more := len(known) - most.lines) > 0:
        say(f"  and {more:,} more, which -v lists", "dim")
    others = [entry for entry in run.baseline if entry.status != "known"]
    # entries of ops that the run did not select take only one line together
    beside = [entry for entry in others if entry.status == "untested" and not entry.selected]
    others = [entry for entry in others if entry not in beside]
    if beside:
        say()
        say(f"{plural(len(beside), 'entry', 'entries')} of the baseline not tried: op or mesh {NOT_SELECTED}", "dim")
    if others:
        say()
        say("in the baseline, and not seen", "bold")
    for entry in others[: most.lines]:
        say(f"  {entry.fingerprint} {entry.status}" + (f": {entry.detail}" if entry.detail else ""))
    if (more := len(others) - most.lines) > 0:
        say(f"  and {more:,} more, which -v lists", "dim")


def _evidence(finding: FindingRecord) -> str:
    script = {FAILS: "", GONE: ", but its script did not fail"}.get(
        finding.script_status, f", script {finding.script_status}"
    )
    return evidence_text(finding.level, finding.confirmed) + script


def _say_not_tested(run: RunRecord, say: _Say, most: _Most) -> None:
    lines = [(entry.count, f"not reached: {entry.what}: {entry.reason}") for entry in untested_beside_rules(run)]
    lines += [(count, f"unsupported: {reason}") for reason, count in sorted(run.unsupported.items(), key=_largest)]
    lines += [(count, f"inconclusive: {reason}") for reason, count in sorted(run.inconclusive.items(), key=_largest)]
    if lines := _alike(lines):
        say()
        say("not tested", "bold yellow")
        width = max(len(f"{count:,}") for count, _ in lines)
        for count, text in lines[: most.lines]:
            say(f"  {count:>{width},} {text}")
        if rest := lines[most.lines :]:
            said = f"{sum(count for count, _ in rest):>{width},} for {plural(len(rest), 'more reason')}, which -v lists"
            say(f"  {said}", "dim")
    if run.tool_errors:
        say()
        say(plural(len(run.tool_errors), "error") + " of the verifier itself", "bold magenta")
        for error in run.tool_errors:
            for line in error.splitlines():
                say(f"  {line}")


def _alike(lines: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the lines with one for those that differ in numbers only, with the sum of their counts.

    >>> _alike([(2, "dim 0 of conv2d"), (1, "refused"), (3, "dim 1 of conv2d")])
    [(5, 'dim 0 of conv2d, and 1 line like it with other numbers'), (1, 'refused')]
    """
    groups: dict[str, list[tuple[int, str]]] = {}
    for count, text in lines:
        groups.setdefault(_NUMBER.sub("#", text), []).append((count, text))
    said = []
    for group in groups.values():
        others = len({text for _, text in group}) - 1
        more = f", and {plural(others, 'line')} like it with other numbers" if others else ""
        said.append((sum(count for count, _ in group), f"{group[0][1]}{more}"))
    return said


def _largest(item: tuple[str, int]) -> tuple[int, str]:
    return -item[1], item[0]
