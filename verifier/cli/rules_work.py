"""What the command ``rules`` does: loaded once it runs, since torch takes seconds to load."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import typer

from verifier.cli.common import (
    consoles,
    exit_status,
    load_given_baseline,
    meanwhile,
    page_written,
    refuse_cluster,
    write_out,
    write_run,
)
from verifier.cli.options import BaselineOption, Detail, FailOn, Format, Out
from verifier.cli.progress import RulesProgress
from verifier.core.wording import plain_text, plural
from verifier.execution.imports import places_of_rules
from verifier.processes.answers import ANSWERS
from verifier.records.rule_table import write_table
from verifier.records.schema import INTERRUPTED
from verifier.report.github import github_lines
from verifier.report.rules_json import render_rules_json
from verifier.report.rules_text import header_line, op_lines, quiet_lines, total_lines
from verifier.rules.campaign.recorded import record_rules
from verifier.rules.campaign.request import MAX_JOBS, RulesRequest, make_rules_plan
from verifier.rules.campaign.table import TableBuilder
from verifier.runs.estimate import estimate_of_rules
from verifier.runs.store import RunStore

__all__ = ["check"]


def _load_page() -> None:
    from verifier.report.html import load_page  # with it networkx and jinja2, while workers check

    load_page()


def check(
    context: typer.Context,
    request: RulesRequest,
    fail_on: set[FailOn],
    output: Format,
    out: Out,
    baseline: BaselineOption,
    dry_run: bool = False,
    detail: Detail = Detail.SCREEN,
    table: Path | None = None,
) -> None:
    refuse_cluster(context)
    if request.jobs is not None and not 1 <= request.jobs <= MAX_JOBS:  # 0: in this process, which an op could crash
        raise ValueError(f"--jobs {request.jobs}: must be from 1 to {MAX_JOBS}")
    plan = make_rules_plan(request, load_given_baseline(baseline))
    store = RunStore(out)
    if dry_run:
        targets = [target.name for target in plan.targets]
        write_out(estimate_of_rules(store, targets, plan.header.meshes, plan.jobs) + "\n")
        raise typer.Exit(0)
    builder = None if table is None else TableBuilder(plan)
    progress = [] if detail is Detail.QUIET else [RulesProgress(consoles()[1], plan)]
    page_loaded = meanwhile(_load_page)
    with ANSWERS.sharing() if plan.header.own_rules else nullcontext():
        made = record_rules(replace(plan, answers=ANSWERS.folder), store, *progress, table=builder)
    page_loaded.result()
    if builder is not None and table is not None:
        write_table(builder.made(), table)
    with page_written(made, store):
        assert made.rules is not None
        if output is Format.JSON:
            write_out(render_rules_json(made) + "\n", output)
        elif output is Format.GITHUB:
            write_out("".join(f"{line}\n" for line in github_lines(made, out, places_of_rules())))
        elif output is not Format.TEXT:
            write_run(made, baseline, output, out)
        else:
            ops, imported = made.rules.ops, made.header.imports
            lines = [header_line()]
            lines += [line for name, op in ops.items() for line in op_lines(name, op, imported, out)]
            lines += ["", *total_lines(made.rules, imported, out, detail is not Detail.FULL)]
            if detail is Detail.QUIET:
                lines = quiet_lines(made.rules, imported, out)
            if not made.complete:
                left = sum(one.reason == INTERRUPTED for one in made.untested)
                not_reached = f"; {plural(left, 'op was', 'ops were')} not reached" if left else ""
                lines += [f"INCOMPLETE: the check ended before it had confirmed everything{not_reached}",
                          f"next: again: {made.header.command}"]  # fmt: skip
            write_out("".join(f"{line}\n" for line in lines))
        for error in made.tool_errors:
            sys.stderr.write(plain_text(f"error of the verifier: {error}\n"))
    status = exit_status(made, baseline)
    missing = any(op.missing for op in made.rules.ops.values())
    raise typer.Exit(1 if status == 0 and missing and FailOn.MISSING in fail_on else status)
