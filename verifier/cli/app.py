"""The command line: ``run``, ``rules``, ``merge``, ``report``, ``gate``, ``replay``, ``layouts``.

Exit status: 0 nothing new, 1 findings that the baseline does not list, 2 could not verify.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from verifier.campaign.recorded import record
from verifier.campaign.request import Request, make_plan, parse_rank_memory
from verifier.campaign.resuming import merge as merge_shards
from verifier.campaign.resuming import resume, resume_notice, run_to_resume
from verifier.cli.commands import COMMANDS, Command
from verifier.cli.common import (
    command_line,
    consoles,
    exit_status,
    load_given_baseline,
    page_written,
    refuse_cluster,
    write_out,
)
from verifier.cli.options import (
    DEFAULT_BASELINE,
    AskedImports,
    AskedMeshes,
    AskedPatterns,
    BackendOption,
    BaselineOption,
    Device,
    Dtypes,
    Format,
    FormatOption,
    Imports,
    LogLevelOption,
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
from verifier.cli.replay import replay as replay_trial
from verifier.cli.rules import rules as check_rules
from verifier.core.case import MOST_RANKS, Trial
from verifier.core.entry_points import load_entry_points
from verifier.core.logs import LogLevel, log_to_stderr
from verifier.core.verdict import Verdict, VerdictKind
from verifier.core.wording import import_options, plural, replay_text
from verifier.execution.imports import run_imports
from verifier.findings.script.render import NoScriptError, render_script, run_script
from verifier.gate.baseline import BaselineEntry, load_baseline
from verifier.gate.decision import decide_all
from verifier.gate.evidence import collect, refuse_unfinished
from verifier.gate.question import Question, asked_by
from verifier.gate.text import as_json, render
from verifier.meshes.torchrun.controller import Cluster
from verifier.planning.boundary import OutsideError, needs_imports, refusal
from verifier.records.files import DEFAULT_REPORTS, RunFormatError, out_option
from verifier.records.schema import FAILS, RunRecord, TrialRecord
from verifier.records.values import load_trial
from verifier.report.json import render_json
from verifier.report.terminal import print_summary
from verifier.report.words import with_folder
from verifier.runs.merging import join_levels
from verifier.runs.store import RunStore

__all__ = ["app"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Prove or refute DTensor's sharding strategies on real meshes.",
    epilog="Exit status: 0 nothing new, 1 findings that the baseline does not list, 2 could not verify.",
)


_BESIDE_RESUME = ("--resume", "--out", "--format", "--baseline", "--log-level", "--import")
"""What may be said of a run that goes on; it takes over all else, but for code, which no file has imported."""


def _cluster(context: typer.Context, fresh: bool = True) -> Cluster | None:
    """Return the ranks that torchrun started, if it did; a command that would not use them is refused.

    Parameters
    ----------
    fresh
        Whether the command is to make a run.
    """
    cluster: Cluster | None = context.obj
    if cluster is not None and not fresh:
        remedy = f"add --fresh, or run {context.command.name} by itself"
        raise ValueError(f"{context.command.name} under torchrun has no use for its ranks; {remedy}")
    return cluster


def _make(request: Request, baseline: Path, out: Path, cluster: Cluster | None) -> RunRecord:
    plan = make_plan(replace(request, baseline=str(baseline)), load_given_baseline(baseline), cluster)
    return record(plan, RunStore(out), [ProgressDisplay(consoles()[1])])


def _newest(store: RunStore) -> RunRecord | None:
    """Return the newest run on meshes and the newest rule check as one; the newer of them if the versions differ."""
    meshes, rules = store.newest_of_each_level()
    if meshes is None or rules is None:
        return meshes or rules
    if meshes.header.versions != rules.header.versions:
        return max(meshes, rules, key=lambda run: run.header.id)
    return join_levels(meshes, rules)


def _resume(
    ids: list[str], baseline: Path | None, out: Path, cluster: Cluster | None, imports: Sequence[str]
) -> tuple[RunRecord, Path]:
    store = RunStore(out)
    if len(ids) > 1:
        raise ValueError(f"--resume goes on with one run, {len(ids)} were named: {', '.join(ids)}")
    run_id = ids[0] if ids else run_to_resume(store)
    console = consoles()[1]
    notice = resume_notice(lambda text: console.print(text, highlight=False, markup=False))
    return resume(run_id, store, load_given_baseline, [notice, ProgressDisplay(console)], baseline, cluster, imports)


def _given(context: typer.Context) -> list[str]:
    """Return the options and arguments that are on the command line."""
    given = [option for option in context.command.params if _is_given(context, option.name)]
    return [max(option.opts, key=len) for option in given]


def _is_given(context: typer.Context, name: str | None) -> bool:
    source = context.get_parameter_source(name) if name is not None else None
    return source is not None and source.name == "COMMANDLINE"


def _say(made: RunRecord, baseline: Path, out: Path, output: Format) -> NoReturn:
    with page_written(made, RunStore(out)) as page:
        if output is Format.JSON:
            write_out(render_json(made) + "\n", output)
        else:
            print_summary(made, consoles()[0], page, out)
    raise typer.Exit(exit_status(made, baseline))


@app.command()
def run(
    context: typer.Context,
    patterns: Patterns = None,
    mesh: Meshes = None,
    backend: BackendOption = None,
    device: Device = "cpu",
    dtype: Dtypes = None,
    profile: Profile = "dev",
    seed: Seed = 0,
    max_examples: MaxExamples = None,
    time_limit: TimeLimit = None,
    imports: Imports = None,
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard", metavar="I/N", help="Try the Ith of N parts of the cases only, 1 <= I <= N; see `merge`."
        ),
    ] = None,
    resumed: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with a run that was cut short, as it was asked for: the one whose RUN_ID follows, or else the "
            "newest.",
        ),
    ] = False,
    out: Out = DEFAULT_REPORTS,
    output: FormatOption = Format.TEXT,
    baseline: BaselineOption = DEFAULT_BASELINE,
    rank_memory: RankMemory = None,
    log_level: LogLevelOption = LogLevel.WARNING,
) -> None:
    """Verify ops on meshes and record what came of it."""
    log_to_stderr(log_level)
    if resumed:
        given = _given(context)
        if others := sorted({*given} - {"patterns", *_BESIDE_RESUME}):
            raise ValueError(f"--resume takes over what the run was asked for; leave out {', '.join(others)}")
        kept = baseline if "--baseline" in given else None
        made, baseline = _resume(patterns or [], kept, out, _cluster(context), imports or [])
    else:
        request = Request(
            patterns or (), mesh or (), backend, device, dtype or (), profile, seed, max_examples, time_limit,
            imports or (), command_line(), shard, rank_memory=rank_memory,
        )  # fmt: skip
        made = _make(request, baseline, out, _cluster(context))
    _say(made, baseline, out, output)


@app.command()
def merge(
    context: typer.Context,
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Ids or folders of the runs: every shard of N, once.")
    ],
    imports: Imports = None,
    out: Out = DEFAULT_REPORTS,
    output: FormatOption = Format.TEXT,
    baseline: BaselineOption = DEFAULT_BASELINE,
    log_level: LogLevelOption = LogLevel.WARNING,
) -> None:
    """Join the shards of a run (`run --shard I/N`) into one run; what failed in any is minimised and confirmed."""
    log_to_stderr(log_level)
    refuse_cluster(context)
    given = baseline if "--baseline" in _given(context) else None
    listeners = [ProgressDisplay(consoles()[1])]
    made, baseline = merge_shards(
        runs, RunStore(out), load_given_baseline, command_line(), listeners, given, imports or []
    )
    _say(made, baseline, out, output)


app.command()(check_rules)


@app.command()
def report(
    context: typer.Context,
    fresh: Annotated[bool, typer.Option("--fresh", help="Make a new run even if there is one.")] = False,
    out: Out = DEFAULT_REPORTS,
    baseline: BaselineOption = DEFAULT_BASELINE,
    rank_memory: RankMemory = None,
    log_level: LogLevelOption = LogLevel.WARNING,
) -> None:
    """Render the newest run and the newest rule check as a page; make a run first if there is none."""
    log_to_stderr(log_level)
    parse_rank_memory(rank_memory)
    cluster = _cluster(context, fresh)
    store = RunStore(out)
    newest = None if fresh else _newest(store)
    if newest is None:
        if not fresh:
            refuse_unfinished(store)
        newest = _make(Request(command=command_line(), rank_memory=rank_memory), baseline, out, cluster)
    console = consoles()[0]
    with page_written(newest, store) as page:
        print_summary(newest, console, page, out)
        if page is not None:
            console.print(f"  the page is {page.absolute().as_uri()}", highlight=False, markup=False)
    raise typer.Exit(exit_status(newest, baseline))


@app.command()
def gate(
    context: typer.Context,
    patterns: AskedPatterns = None,
    mesh: AskedMeshes = None,
    imports: AskedImports = None,
    baseline: BaselineOption = DEFAULT_BASELINE,
    update: Annotated[
        bool, typer.Option("--update", help="Rewrite the baseline so that it lists what was found.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Make a new run of what is asked, at the profile ci.")] = False,
    out: Out = DEFAULT_REPORTS,
    output: FormatOption = Format.TEXT,
    rank_memory: RankMemory = None,
    log_level: LogLevelOption = LogLevel.WARNING,
) -> None:
    """Hold all runs that count against the baseline: what is new, known, fixed, expired, untested.

    A run counts until torch's rules, the verifier or an import changes.

    A later run of the same, at least as thorough, takes its place.

    Everything recorded is judged, or what the pattern, --mesh and --import name.

    If nothing of that was recorded, the gate makes a run.
    """
    log_to_stderr(log_level)
    parse_rank_memory(rank_memory)
    cluster = _cluster(context, fresh)
    known = load_baseline(baseline, missing_ok=update or baseline == DEFAULT_BASELINE)
    store = RunStore(out)
    evidence = (
        None
        if fresh
        else collect(store, Question(_texts(patterns), _texts(mesh), tuple(imports) if imports else None), known)
    )
    if evidence is None or evidence.nothing_recorded:
        request = Request(
            patterns or (), mesh or (), profile="ci", imports=imports or (), command=command_line(),
            baseline=str(baseline), rank_memory=rank_memory,
        )  # fmt: skip
        plan = make_plan(request, known, cluster)
        record(plan, store, [ProgressDisplay(consoles()[1])])
        evidence = collect(store, asked_by(plan.header, _texts(patterns)), known)
    today = datetime.now(UTC).date()
    decision = decide_all(evidence, known, today)
    if update:
        if decision.unverified:
            raise ValueError(f"the baseline is left as it is: {decision.unverified}")
        known = known.updated(evidence.runs, today)
        known.save(baseline)
        decision = decide_all(evidence, known, today)
        consoles()[1].print(
            f"wrote {plural(len(known.entries), 'entry', 'entries')} to {baseline}", highlight=False, markup=False
        )
    said = as_json(decision) if output is Format.JSON else with_folder(render(decision), out)
    write_out(said.rstrip() + "\n", output)
    raise typer.Exit(decision.exit_status)


def _texts(given: list[str] | None) -> tuple[str, ...]:
    return tuple(given or ())


@app.command()
def replay(
    context: typer.Context,
    finding: Annotated[
        str, typer.Argument(metavar="FINDING", help="Fingerprint (or its beginning), or a finding's file.")
    ],
    script: Annotated[
        bool,
        typer.Option(
            "--script", help="Print the script of the finding instead. One that has not been run is run first."
        ),
    ] = False,
    imports: Imports = None,
    out: Out = DEFAULT_REPORTS,
    baseline: BaselineOption = DEFAULT_BASELINE,
    rank_memory: RankMemory = None,
    log_level: LogLevelOption = LogLevel.WARNING,
) -> None:
    """Run one finding again and say whether it still fails."""
    log_to_stderr(log_level)
    limit = parse_rank_memory(rank_memory)
    store = RunStore(out)
    try:
        found = store.find_finding(finding)
    except RunFormatError:  # the file of a finding, which is what was meant
        raise
    except ValueError:
        entries = [e for e in load_given_baseline(baseline).entries if e.fingerprint.startswith(finding)]
        if len(entries) != 1 or not finding:
            raise
        _replay_entry(entries[0], script, imports or [], limit, _cluster(context))
    if script and found.script_status == FAILS:
        write_out(found.script)
        raise typer.Exit(0)
    cluster = _cluster(context)
    trial = _runnable(found.trial, imports or [], found.imports, finding, out, cluster)
    verdict, fails = replay_trial(trial, found.verdict, imports or [], limit, cluster)
    if script:
        _say_script(found.fingerprint, trial, verdict, fails, imports or [], limit)
    _say_replayed(with_folder(found.message, out), found.verdict, verdict, fails)


def _runnable(
    record: TrialRecord, imports: Sequence[str], named: Sequence[str], what: str, out: Path, cluster: Cluster | None
) -> Trial:
    """Return the trial of a file once what the command line says is imported, if no more than that is needed."""
    if missing := needs_imports(named, imports):
        raise OutsideError(
            f"{what} was found under {import_options(missing)}; nothing that a file names is imported, so say it: "
            f"{replay_text(what, [*imports, *missing])}{out_option(out)}"
        )
    run_imports(imports)  # before the call is looked up: its op may be of theirs
    trial = load_trial(record)
    if reason := refusal(trial, imports, MOST_RANKS if cluster is None else cluster.world_size):
        raise OutsideError(f"{what} is not run: it {reason}")
    return trial


def _replay_entry(
    entry: BaselineEntry, script: bool, imports: Sequence[str], limit: int | None, cluster: Cluster | None
) -> NoReturn:
    """Replay a finding of which only the baseline knows."""
    trial = _runnable(entry.trial(), imports, (), entry.fingerprint, DEFAULT_REPORTS, cluster)
    verdict, fails = replay_trial(trial, entry.verdict, imports, limit, cluster)
    if not script:
        _say_replayed(f"{entry.summary}\n  {entry.rule}\n  known: {entry.reason}", entry.verdict, verdict, fails)
    _say_script(entry.fingerprint, trial, verdict, fails, imports, limit)


def _say_script(
    fingerprint: str, trial: Trial, verdict: Verdict, fails: bool, imports: Sequence[str], limit: int | None
) -> NoReturn:
    """Print the script of what was replayed, and what came of it when it was run.

    It is written anew: a text that was stored is only ever shown, since running it would run what a file says.
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


for _command in load_entry_points(COMMANDS, Command).values():
    app.command(_command.name)(_command.function)
