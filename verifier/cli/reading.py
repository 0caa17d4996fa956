"""The commands ``report`` and ``gate``, which read records and load torch only to make a run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from verifier.cli.common import (
    cluster_of,
    command_line,
    consoles,
    exit_status,
    load_given_baseline,
    page_written,
    refuse_cluster,
    write_decision,
    write_out,
)
from verifier.cli.loading import OF_IMPORTS, Loading
from verifier.cli.options import (
    DEFAULT_BASELINE,
    AskedImports,
    AskedMeshes,
    AskedPatterns,
    BaselineOption,
    Detail,
    FailOn,
    FormatOption,
    Jobs,
    Out,
    RankMemory,
    check_imports,
    typed,
)
from verifier.core.case import DEFAULT_MESHES
from verifier.core.wording import NO_SAMPLES, plural
from verifier.gate.baseline import load_baseline
from verifier.gate.decision import decide_all, with_budgets, without_special
from verifier.gate.evidence import collect, refuse_unfinished
from verifier.gate.question import Question, asked_by, options_text
from verifier.gate.regret import updated_budgets
from verifier.processes.limits import parse_rank_memory
from verifier.records.commands import command_text
from verifier.records.schema import RunRecord
from verifier.report.terminal import print_summary
from verifier.runs.merging import join_levels
from verifier.runs.store import RunStore

if TYPE_CHECKING:
    from verifier.gate.changed import Changed

__all__ = ["gate", "graph", "names_to_verify", "report"]


def report(
    context: typer.Context,
    fresh: bool,
    out: Out,
    baseline: BaselineOption,
    rank_memory: RankMemory,
    jobs: Jobs,
) -> None:
    parse_rank_memory(rank_memory)
    cluster = cluster_of(context, fresh)
    store = RunStore(out)
    newest = None if fresh else _newest_run(store)
    if newest is None:
        if not fresh:
            refuse_unfinished(store)
        with Loading():
            from verifier.campaign.request import Request
            from verifier.cli.work import make_run
        request = Request(command=command_line(), rank_memory=rank_memory, jobs=jobs)
        newest = make_run(request, baseline, load_given_baseline(baseline), out, cluster)
    console = consoles()[0]
    with page_written(newest, store) as page:
        print_summary(newest, console, page, out)
        if page is not None:
            console.print(f"  the page is {page.absolute().as_uri()}", highlight=False, markup=False)
    raise typer.Exit(exit_status(newest, baseline))


def gate(
    context: typer.Context,
    patterns: AskedPatterns,
    mesh: AskedMeshes,
    imports: AskedImports,
    baseline: BaselineOption,
    update: bool,
    fresh: bool,
    special_values: bool,
    out: Out,
    output: FormatOption,
    rank_memory: RankMemory,
    changed_since: str | None = None,
    dry_run: bool = False,
    detail: Detail = Detail.SCREEN,
    jobs: Jobs = None,
    fail_on: str | None = None,
) -> None:
    check_imports(imports)
    chosen = typed(context, "fail_on")
    fails = FailOn.parse(fail_on or FailOn.WRONG, FailOn.WRONG, FailOn.LOST, FailOn.REGRET, typed=chosen)
    if FailOn.LOST in fails and chosen and (patterns or not imports):
        raise ValueError(
            "--fail-on lost compares all rules of an import with torch's; name what registers them: gate --import FILE"
        )
    parse_rank_memory(rank_memory)
    cluster = cluster_of(context, fresh or bool(imports and not patterns))
    changed = _changed(changed_since, imports or (), patterns or (), fresh, update)
    known = load_baseline(baseline, missing_ok=update or baseline == DEFAULT_BASELINE)
    options = options_text(patterns or (), mesh or (), imports or ())
    if baseline != DEFAULT_BASELINE:
        options = f"{options} --baseline {shlex.quote(str(baseline))}".lstrip()
    if FailOn.REGRET in fails and not known.budgets and not update:
        command = command_text(" ".join(filter(None, ["gate", options, "--fail-on regret --update"])), out)
        raise ValueError(f"{baseline} has no budgets to judge by; record them: {command}")
    store = RunStore(out)
    asked = tuple(patterns or ())
    evidence = None
    if changed is not None and not changed.files:
        from verifier.gate.changed import recorded_since

        evidence = recorded_since(changed, store, known, (), mesh or ())
    elif imports and not asked:
        with Loading(hash_seeds=1, workers=OF_IMPORTS):
            from verifier.cli.own_rules import verify_own_rules
        evidence = verify_own_rules(
            imports, mesh or (), store, known, baseline, rank_memory, cluster, changed, dry_run, detail, jobs,
            update,
        )  # fmt: skip
    elif not fresh:
        evidence = collect(store, Question(asked, tuple(mesh or ()), tuple(imports) if imports else None), known)
    if evidence is None or (evidence.nothing_recorded and changed is None):
        with Loading(hash_seeds=2):
            from verifier.campaign.request import Request
            from verifier.cli.work import make_run, say_estimate
        request = Request(
            asked, mesh or (), profile="ci", imports=imports or (), command=command_line(), rank_memory=rank_memory,
            jobs=jobs,
        )  # fmt: skip
        if dry_run:
            say_estimate(request, known, out, cluster)
        made = make_run(request, baseline, known, out, cluster, detail)
        evidence = collect(store, asked_by(made.header, asked), known)
    if dry_run:
        write_out("recorded runs would be judged, and nothing would be tried\n")
        raise typer.Exit(0)
    today = datetime.now(UTC).date()
    decision = replace(decide_all(evidence, known, today, special_values, FailOn.LOST in fails), options=options)
    if update:
        if decision.unverified:
            raise ValueError(f"the baseline is left as it is: {decision.unverified}")
        known = known.updated(evidence.runs if special_values else [*map(without_special, evidence.runs)], today)
        if FailOn.REGRET in fails:
            known = replace(known, budgets=updated_budgets(evidence.runs, evidence.question, known.budgets))
        known.save(baseline)
        decision = replace(decide_all(evidence, known, today, special_values, FailOn.LOST in fails), options=options)
        budgets = f" and {plural(len(known.budgets), 'budget')}" if known.budgets else ""
        consoles()[1].print(
            f"wrote {plural(len(known.entries), 'entry', 'entries')}{budgets} to {baseline}",
            highlight=False, markup=False,
        )  # fmt: skip
    if FailOn.REGRET in fails:
        decision = with_budgets(decision, evidence, known.budgets)
    write_decision(decision, output, out, detail)
    raise typer.Exit(decision.exit_status)


def graph(
    context: typer.Context,
    run: str | None,
    diff: tuple[str, str] | None,
    op: str,
    mesh: str | None,
    worst: int,
    by: str,
    links: Sequence[str],
    output: str,
    out: Path,
) -> NoReturn:
    """Judge the redistributions that a run executed, or compare those of two runs."""
    from verifier.report.paths.run import diff_text, judge_run, run_json, run_text

    refuse_cluster(context)
    if diff and output != "text":
        raise ValueError(f"the difference of two runs is printed as text, not as {output}")
    store = RunStore(out)
    if diff is not None:
        text, dearer = diff_text(*(judge_run(store.load(one), op, mesh) for one in diff))
        write_out(text)
        raise typer.Exit(dearer)
    recorded = store.newest_of_each_level()[0] if run is None else store.load(run)
    if recorded is None:
        raise ValueError(f"{store.directory} has no run on meshes; make one by `run`, or ask for --all-pairs")
    rules = store.newest_of_each_level()[1]
    same = rules is not None and rules.header.versions == recorded.header.versions
    judged = judge_run(recorded, op, mesh, rules.rules if rules is not None and same else None)
    if output == "text":
        text = run_text(judged, worst, by, links)
    elif output == "json":
        text = run_json(judged)
    else:
        from verifier.report.paths.run_documents import RUN_FORMATS  # loads networkx

        text = RUN_FORMATS[output](judged, worst, links)
    write_out(text, output)
    raise typer.Exit


def _changed(
    ref: str | None, imports: Sequence[str], patterns: Sequence[str], fresh: bool, update: bool
) -> Changed | None:
    if ref is None:
        return None
    if not imports:
        raise ValueError(
            f"--changed-since {ref} compares strategies of your own, not torch's; name them by --import, or by "
            "import in pyproject.toml"
        )
    given = {"a pattern": patterns, "--fresh": fresh, "--update": update}
    if beside := [name for name, value in given.items() if value]:
        raise ValueError(f"--changed-since {ref} judges what has changed, and nothing else; leave out {beside[0]}")
    from verifier.gate.changed import Changed

    return Changed(ref, imports)


def _newest_run(store: RunStore) -> RunRecord | None:
    """Return the newest run on meshes joined with the newest rule check; only the newer if their versions differ."""
    meshes, rules = store.newest_of_each_level()
    if meshes is None or rules is None:
        return meshes or rules
    if meshes.header.versions != rules.header.versions:
        return max(meshes, rules, key=lambda run: run.header.id)
    return join_levels(meshes, rules)


def names_to_verify(patterns: Sequence[str], imports: Sequence[str]) -> Iterator[str]:
    """Yield lines on what can be named on the command line: families, ops that match ``patterns``, meshes.

    With ``imports`` and no pattern, the ops are those for which the imports register rules.
    """
    from verifier.execution.imports import registered_by, run_imports
    from verifier.planning.families import installed_families, select_ops, select_registered

    run_imports(imports)
    families = installed_families()
    left: tuple[str, ...] = ()
    wrong: dict[str, str] = {}
    if imports and not patterns:
        selected, left, wrong = select_registered(registered_by(imports), families)
    else:
        selected = select_ops(patterns, families) if patterns else {
            name: ops for name, family in families.items() if (ops := tuple(family.select("*")))
        }  # fmt: skip
    for name, ops in selected.items():
        yield f"family {name}: {plural(len(ops), 'op')}" + ("" if not families[name].broad else ", each drawn if named")
        yield from (f"  {op}" for op in ops)
    yield from (f"{op} {NO_SAMPLES}" for op in left)
    yield from dict.fromkeys(wrong.values())
    yield f"meshes by default: {' '.join(DEFAULT_MESHES)}; any shape of 1 to 3 dims, as 4, 2x2, 2x2+flat or simulated:8"
