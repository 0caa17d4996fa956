"""The commands that use ranks. They are loaded when they run, because torch takes seconds to load."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
import typer

from verifier.campaign.bisecting import WRITERS, noted, questions_about, tell
from verifier.campaign.plan import Plan
from verifier.campaign.recorded import record
from verifier.campaign.replaying import replay as replay_trial
from verifier.campaign.request import Request, make_plan
from verifier.campaign.resuming import merge as merge_shards
from verifier.campaign.resuming import resume, resume_notice, run_to_resume
from verifier.cli.common import (
    cluster_of,
    command_line,
    consoles,
    exit_status,
    load_given_baseline,
    page_written,
    refuse_cluster,
    write_out,
    write_run,
)
from verifier.cli.options import (
    BackendOption,
    BaselineOption,
    BisectFormat,
    Detail,
    Device,
    Dtypes,
    Format,
    FormatOption,
    Imports,
    Jobs,
    MaxExamples,
    Meshes,
    Out,
    Patterns,
    Profile,
    RankMemory,
    Seed,
    TimeLimit,
)
from verifier.cli.progress import ProgressDisplay
from verifier.core.case import MOST_RANKS, Trial
from verifier.core.verdict import Verdict, VerdictKind
from verifier.core.wording import import_options, version_key
from verifier.events import Listener
from verifier.execution.imports import run_imports
from verifier.findings.script.render import NoScriptError, render_script, run_script
from verifier.findings.torchs_own import shown_by_torch
from verifier.findings.versions import Interpreter, ask, make
from verifier.gate.baseline import Baseline
from verifier.gate.entries import BaselineEntry
from verifier.meshes.torchrun.controller import Cluster
from verifier.planning.boundary import OutsideError, needs_imports, refusal
from verifier.processes.answers import ANSWERS
from verifier.processes.limits import parse_rank_memory
from verifier.records.commands import finding_text, replay_text
from verifier.records.files import DEFAULT_REPORTS, RunFormatError, encode_record, write_atomically
from verifier.records.schema import FAILS, RunRecord, TrialRecord
from verifier.records.values import load_trial
from verifier.report.json import render_json
from verifier.report.terminal import print_summary
from verifier.runs.estimate import estimate_of_trials
from verifier.runs.store import RunStore

__all__ = ["estimate", "make_run", "merge", "replay", "run", "say_estimate"]

_BESIDE_RESUME = ("--resume", "--out", "--format", "--baseline", "--log-level", "--import", "--jobs")
"""The options that a resumed run may have; it keeps its others. Nothing is imported only because a file says so."""


def run(
    context: typer.Context,
    patterns: Patterns,
    mesh: Meshes,
    backend: BackendOption,
    device: Device,
    dtype: Dtypes,
    profile: Profile,
    seed: Seed,
    max_examples: MaxExamples,
    time_limit: TimeLimit,
    imports: Imports,
    shard: str | None,
    resumed: bool,
    out: Out,
    output: FormatOption,
    baseline: BaselineOption,
    rank_memory: RankMemory,
    jobs: Jobs,
    dry_run: bool,
    detail: Detail,
) -> None:
    if resumed:
        given = _given(context)
        if others := sorted({*given} - {"patterns", *_BESIDE_RESUME}):
            raise ValueError(f"--resume takes over what the run was asked for; leave out {', '.join(others)}")
        kept = baseline if "--baseline" in given else None
        if dry_run:
            raise ValueError("--dry-run says what a new run would try; leave out --resume")
        made, baseline = _resumed_run(patterns or [], kept, out, cluster_of(context), imports or [], jobs, detail)
    else:
        request = Request(
            patterns or (), mesh or (), backend, device, dtype or (), profile, seed, max_examples, time_limit,
            imports or (), command_line(), shard, rank_memory=rank_memory, jobs=jobs,
        )  # fmt: skip
        if dry_run:
            say_estimate(request, load_given_baseline(baseline), out, cluster_of(context))
        made = make_run(request, baseline, load_given_baseline(baseline), out, cluster_of(context), detail)
    _say_run(made, baseline, out, output, detail)


def make_run(
    request: Request,
    path: Path,
    baseline: Baseline,
    out: Path,
    cluster: Cluster | None,
    detail: Detail = Detail.SCREEN,
) -> RunRecord:
    """Make the run of ``request`` and return its record; ``path`` is the file of ``baseline``."""
    plan = make_plan(replace(request, baseline=str(path)), baseline, cluster)
    store = RunStore(out)
    with ANSWERS.sharing() if plan.header.own_rules else nullcontext():
        made = record(plan, store, progress(detail))
    return _said(*without_those_of_torch(made, store), detail)


def without_those_of_torch(run: RunRecord, store: RunStore) -> tuple[RunRecord, tuple[str, ...]]:
    """Return a run without the new findings that are torch's own and not those of its imports, and a line on each.

    The record is changed, too, so that a later gate does not count these findings either.
    """
    why = shown_by_torch(run) if run.header.own_rules else {}
    if not why:
        return run, ()
    left = [one for one in run.findings if one.fingerprint in why]
    lines = tuple(f"finding {one.fingerprint}, {one.verdict} in {one.op}: {why[one.fingerprint]}" for one in left)
    kept = replace(run, findings=[one for one in run.findings if one not in left])
    write_atomically(store.path(run.header.id), encode_record(kept), "the record is as it was before")
    return kept, lines


def _said(run: RunRecord, left_out: Sequence[str], detail: Detail) -> RunRecord:
    for line in left_out if detail is not Detail.QUIET else ():
        consoles()[1].print(f"left out {line}", highlight=False, markup=False)
    return run


def progress(detail: Detail) -> list[Listener]:
    """Return the listeners that show the progress of a run."""
    return [] if detail is Detail.QUIET else [ProgressDisplay(consoles()[1])]


def say_estimate(request: Request, baseline: Baseline, out: Path, cluster: Cluster | None) -> NoReturn:
    """Print what the run of ``request`` would try, and end."""
    write_out(estimate(make_plan(request, baseline, cluster), RunStore(out)) + "\n")
    raise typer.Exit(0)


def estimate(plan: Plan, store: RunStore) -> str:
    """Return what a run would try, and about how long, as a line."""
    units = sum(len(ops) if plan.families[name].broad else 1 for name, ops in plan.selected.items())
    ops = sum(map(len, plan.selected.values()))
    return estimate_of_trials(
        store, units * plan.max_examples, plan.combinations, [*map(str, plan.meshes)], ops, plan.time_limit
    )


def merge(
    context: typer.Context,
    runs: list[str],
    imports: Imports,
    out: Out,
    output: FormatOption,
    baseline: BaselineOption,
) -> None:
    refuse_cluster(context)
    given = baseline if "--baseline" in _given(context) else None
    listeners = [ProgressDisplay(consoles()[1])]
    made, baseline = merge_shards(
        runs, RunStore(out), load_given_baseline, command_line(), listeners, given, imports or []
    )
    _say_run(made, baseline, out, output)


def replay(
    context: typer.Context,
    finding: str,
    script: bool,
    imports: Imports,
    out: Out,
    baseline: BaselineOption,
    rank_memory: RankMemory,
) -> None:
    limit = parse_rank_memory(rank_memory)
    store = RunStore(out)
    try:
        found = store.find_finding(finding)
    except RunFormatError:  # the finding meant has a damaged file
        raise
    except ValueError:
        entries = [e for e in load_given_baseline(baseline).entries if e.fingerprint.startswith(finding)]
        if len(entries) != 1 or not finding:
            raise
        _replay_entry(entries[0], script, imports or [], limit, cluster_of(context))
    if script and found.script_status == FAILS:
        write_out(found.script)
        raise typer.Exit(0)
    cluster = cluster_of(context)
    trial = _runnable(found.trial, imports or [], found.imports, finding, out, cluster)
    verdict, fails = replay_trial(trial, found.verdict, imports or [], limit, cluster)
    if script:
        _say_script(found.fingerprint, trial, verdict, fails, imports or [], limit)
    _say_replayed(finding_text(found, out), found.verdict, verdict, fails)


def bisect(
    context: typer.Context,
    findings: Sequence[str],
    pythons: Sequence[str],
    versions: Sequence[str],
    environments: Path,
    update: bool,
    imports: Sequence[str],
    out: Path,
    output: BisectFormat,
    path: Path,
) -> NoReturn:
    refuse_cluster(context)
    baseline = load_given_baseline(path)
    questions = questions_about(findings, baseline, imports, RunStore(out))
    console = consoles()[1]
    interpreters = [Interpreter(None, torch.__version__.partition("+")[0]), *map(ask, pythons)]
    for version in versions:
        folder = environments.expanduser()
        console.print(f"torch {version}: from {folder}, which is made by pip if it is not there", highlight=False)
        interpreters.append(make(version, folder))
    interpreters.sort(key=lambda one: version_key(one.torch))
    run_imports(imports)
    results = []
    for number, question in enumerate(questions, 1):
        results.append(tell(question, interpreters, imports))
        line = f"{number} of {len(questions)}: {results[-1].name}: {results[-1].summary}"
        console.print(line, highlight=False, markup=False)
        if update:  # at once, so that an interrupt loses nothing
            baseline = noted(baseline, results[-1:])
            baseline.save(path)
    write_out(WRITERS[output](results))
    raise typer.Exit(0 if all(one.complete for one in results) else 2)


def _resumed_run(
    ids: list[str],
    baseline: Path | None,
    out: Path,
    cluster: Cluster | None,
    imports: Sequence[str],
    jobs: int | None,
    detail: Detail,
) -> tuple[RunRecord, Path]:
    store = RunStore(out)
    if len(ids) > 1:
        raise ValueError(f"--resume goes on with one run, {len(ids)} were named: {', '.join(ids)}")
    run_id = ids[0] if ids else run_to_resume(store)
    console = consoles()[1]
    notice = resume_notice(lambda text: console.print(text, highlight=False, markup=False))
    made, path = resume(
        run_id, store, load_given_baseline, [notice, *progress(detail)], baseline, cluster, imports, jobs
    )
    return _said(*without_those_of_torch(made, store), detail), path


def _say_run(made: RunRecord, baseline: Path, out: Path, output: Format, detail: Detail = Detail.SCREEN) -> NoReturn:
    with page_written(made, RunStore(out)) as page:
        if output is Format.JSON:
            write_out(render_json(made) + "\n", output)
        elif output is not Format.TEXT:
            write_run(made, baseline, output, out)
        else:
            quiet, brief = detail is Detail.QUIET, detail is not Detail.FULL
            print_summary(made, consoles()[0], page, out, brief, quiet)
    raise typer.Exit(exit_status(made, baseline))


def _runnable(
    record: TrialRecord, imports: Sequence[str], named: Sequence[str], what: str, out: Path, cluster: Cluster | None
) -> Trial:
    """Import the command line's imports and return the stored trial; refuse one that needs other imports."""
    if missing := needs_imports(named, imports):
        raise OutsideError(
            f"{what} was found under {import_options(missing)}; nothing that a file names is imported, so say it: "
            f"{replay_text(what, [*imports, *missing], folder=out)}"
        )
    run_imports(imports)  # before the call is looked up, because an import may define its op
    trial = load_trial(record)
    if reason := refusal(trial, imports, MOST_RANKS if cluster is None else cluster.world_size):
        raise OutsideError(f"{what} is not run: it {reason}")
    return trial


def _replay_entry(
    entry: BaselineEntry, script: bool, imports: Sequence[str], limit: int | None, cluster: Cluster | None
) -> NoReturn:
    """Replay a finding that only the baseline has."""
    trial = _runnable(entry.trial(), imports, (), entry.fingerprint, DEFAULT_REPORTS, cluster)
    verdict, fails = replay_trial(trial, entry.verdict, imports, limit, cluster)
    if not script:
        _say_replayed(f"{entry.summary}\n  {entry.rule}\n  known: {entry.reason}", entry.verdict, verdict, fails)
    _say_script(entry.fingerprint, trial, verdict, fails, imports, limit)


def _say_script(
    fingerprint: str, trial: Trial, verdict: Verdict, fails: bool, imports: Sequence[str], limit: int | None
) -> NoReturn:
    """Write and run a new script of a replayed trial, and print it with its outcome.

    A stored script is never run, because it would run whatever the file contains.
    """
    if not fails:
        raise ValueError(f"{fingerprint} does not fail any more, so there is no script: {verdict.kind}")
    try:
        source = render_script(trial, verdict, limit, imports)
    except NoScriptError as error:
        raise ValueError(f"no script of {fingerprint} could be written: {error}") from error
    status, output = run_script(source)
    said = [f"the script of {fingerprint} was run: {status}"]
    if status != FAILS:
        said += [f"  {line}" for line in output.splitlines()]
    consoles()[1].print("\n".join(said), highlight=False, markup=False)
    write_out(source)
    raise typer.Exit(0 if status == FAILS else 2)


def _say_replayed(message: str, was: str, verdict: Verdict, fails: bool) -> NoReturn:
    lines = [message, ""]
    if verdict.kind is VerdictKind.TOOL_ERROR:
        raise ValueError(f"it could not be run again: {verdict.message}")
    if fails:
        lines.append(f"still fails: {verdict.kind}: {verdict.message}")
    else:
        lines.append(f"does not fail as it did ({was}): now {verdict.kind} {verdict.message}".rstrip())
    consoles()[0].print("\n".join(lines), highlight=False, markup=False)
    raise typer.Exit(1 if fails else 0)


def _is_given(context: typer.Context, name: str | None) -> bool:
    source = context.get_parameter_source(name) if name is not None else None
    return source is not None and source.name == "COMMANDLINE"


def _given(context: typer.Context) -> list[str]:
    """Return the names of the options and arguments on the command line."""
    given = [option for option in context.command.params if _is_given(context, option.name)]
    return [max(option.opts, key=len) for option in given]
