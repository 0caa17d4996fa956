"""The command line: ``run``, ``rules``, ``derive``, ``mutate``, ``merge``, ``report``, ``gate``, ``replay`` and others.

Exit status: 0 nothing new, 1 findings that the baseline does not list, 2 could not verify.

A command's modules are imported when it runs, so that help and usage errors do not wait seconds for torch to load.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from verifier.cli.config import configured, settings
from verifier.cli.derive import derive
from verifier.cli.loading import Loading
from verifier.cli.mutate import mutate
from verifier.cli.options import (
    COMMANDS,
    DEFAULT_BASELINE,
    AskedImports,
    AskedMeshes,
    AskedPatterns,
    BackendOption,
    BaselineOption,
    BisectFormat,
    By,
    Command,
    Detail,
    Device,
    DryRun,
    Dtypes,
    Format,
    FormatOption,
    GraphFormat,
    Imports,
    Jobs,
    LogLevelOption,
    MaxExamples,
    Meshes,
    Out,
    Patterns,
    Profile,
    Quiet,
    RankMemory,
    Seed,
    TimeLimit,
    TorchPlanner,
    Verbose,
    check_imports,
)
from verifier.cli.rules import rules as check_rules
from verifier.core.entry_points import load_entry_points
from verifier.core.logs import LogLevel, log_to_stderr
from verifier.core.wording import plain_text
from verifier.records.files import DEFAULT_REPORTS

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Prove or refute DTensor's sharding strategies on real meshes.",
    epilog="Exit status: 0 nothing new, 1 findings that the baseline does not list, 2 could not verify.",
)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dtensor-verifier {version('dtensor-verifier')}, torch {version('torch')}")
        raise typer.Exit


@app.callback()
def common(
    asked: Annotated[
        bool, typer.Option("--version", help="Print the versions.", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def config(context: typer.Context) -> None:
    """Print what holds for each option, and from where: pyproject.toml, the environment, or the default."""
    group = context.find_root().command
    assert isinstance(group, TyperGroup)
    by_setting: dict[tuple[str, str, str], list[str]] = {}
    for one in settings(group, configured(group)):
        value = one.value if isinstance(one.value, str) else json.dumps(one.value, default=str)
        by_setting.setdefault((one.name, value, one.source), []).append(one.command)
    for (name, value, source), commands in sorted(by_setting.items()):
        typer.echo(plain_text(f"{name:<14} {value or '-':<32} {source}, of {' '.join(commands)}"))


@app.command("list")
def list_names(
    patterns: Patterns = None,
    imports: Imports = None,
) -> None:
    """Print the families with the ops that each draws, and the meshes of a run by default."""
    with Loading():
        from verifier.cli.reading import names_to_verify
    for line in names_to_verify(patterns or (), imports or ()):
        typer.echo(plain_text(line))


@app.command()
def run(
    context: typer.Context,
    patterns: Patterns = None,
    mesh: Meshes = None,
    backend: BackendOption = None,
    device: Device = "cpu",
    dtype: Dtypes = None,
    profile: Profile = None,
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
            help="Go on with a run that was cut short, with its own options: the run whose RUN_ID follows, or else the "
            "newest.",
        ),
    ] = False,
    out: Out = DEFAULT_REPORTS,
    output: FormatOption = Format.TEXT,
    baseline: BaselineOption = DEFAULT_BASELINE,
    rank_memory: RankMemory = None,
    jobs: Jobs = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    log_level: LogLevelOption = LogLevel.WARNING,
) -> None:
    """Verify ops on meshes and record the results."""
    log_to_stderr(log_level)
    detail = Detail.of(quiet, verbose)
    check_imports(imports)
    with Loading(hash_seeds=2):
        from verifier.cli import work
    work.run(
        context,
        patterns,
        mesh,
        backend,
        device,
        dtype,
        profile,
        seed,
        max_examples,
        time_limit,
        imports,
        shard,
        resumed,
        out,
        output,
        baseline,
        rank_memory,
        jobs,
        dry_run,
        detail,
    )


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
    """Merge the shards of a run (`run --shard I/N`) into one run; minimise and confirm their failures together."""
    log_to_stderr(log_level)
    with Loading():
        from verifier.cli import work
    work.merge(context, runs, imports, out, output, baseline)


app.command()(check_rules)
app.command()(mutate)
app.command()(derive)


@app.command()
def report(
    context: typer.Context,
    fresh: Annotated[bool, typer.Option("--fresh", help="Make a new run even if there is one.")] = False,
    out: Out = DEFAULT_REPORTS,
    baseline: BaselineOption = DEFAULT_BASELINE,
    rank_memory: RankMemory = None,
    jobs: Jobs = None,
    log_level: LogLevelOption = LogLevel.WARNING,
) -> None:
    """Render the newest run and the newest rule check as a page; make a run first if there is none."""
    log_to_stderr(log_level)
    with Loading():
        from verifier.cli import reading
    reading.report(context, fresh, out, baseline, rank_memory, jobs)


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
    changed_since: Annotated[
        str | None,
        typer.Option(
            "--changed-since",
            metavar="REF",
            help="With --import: verify the ops whose strategies, or what these call, differ from a git revision; the "
            "recorded runs that still count are evidence for the others.",
        ),
    ] = None,
    special_values: Annotated[
        bool, typer.Option("--special-values", help="Let findings that only special values show fail the gate, too.")
    ] = False,
    fail_on: Annotated[
        str | None,
        typer.Option(
            "--fail-on",
            metavar="KIND[,KIND]",
            help="wrong; regret: redistributions over the budgets of the baseline, which --update then records; "
            "with --import lost: rules of torch's that hold and that the import does not claim.",
            show_default="wrong",
        ),
    ] = None,
    out: Out = DEFAULT_REPORTS,
    output: FormatOption = Format.TEXT,
    rank_memory: RankMemory = None,
    jobs: Jobs = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    log_level: LogLevelOption = LogLevel.WARNING,
) -> None:
    """Compare all runs that count with the baseline: what is new, known, fixed, expired, untested.

    A run counts until torch's rules, the verifier or an import changes.

    A later run of the same, at least as thorough, replaces it.

    All recorded runs are judged, or those that the pattern, --mesh and --import select.

    If no such run was recorded, the gate makes a run.

    With --import and without a pattern, the gate verifies all that the imports register at both levels, and nothing
    else.
    """
    log_to_stderr(log_level)
    with Loading():
        from verifier.cli import reading
    reading.gate(
        context, patterns, mesh, imports, baseline, update, fresh, special_values, out, output, rank_memory,
        changed_since, dry_run, Detail.of(quiet, verbose), jobs, fail_on,
    )  # fmt: skip


@app.command()
def replay(
    context: typer.Context,
    finding: Annotated[
        str, typer.Argument(metavar="FINDING", help="Fingerprint (or its beginning), or a finding's file.")
    ],
    script: Annotated[
        bool,
        typer.Option(
            "--script", help="Print the script of the finding instead. A script that was never run is run first."
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
    with Loading():
        from verifier.cli import work
    work.replay(context, finding, script, imports, out, baseline, rank_memory)


@app.command()
def bisect(
    context: typer.Context,
    findings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FINDING]...",
            help="Fingerprints (or their beginnings), or remedies of causes in the baseline; by default all of its "
            "entries.",
            show_default=False,
        ),
    ] = None,
    pythons: Annotated[
        list[str] | None,
        typer.Option("--python", metavar="PATH", help="An interpreter that has another torch; repeatable."),
    ] = None,
    make: Annotated[
        list[str] | None,
        typer.Option(
            "--make", metavar="VERSION", help="Make an environment with this version of torch by pip; repeatable."
        ),
    ] = None,
    environments: Annotated[
        Path, typer.Option("--environments", metavar="PATH", help="Where --make keeps its environments.")
    ] = Path("~/.cache/dtensor-verifier"),
    update: Annotated[
        bool, typer.Option("--update", help="Note in the baseline under which versions each entry fails or does not.")
    ] = False,
    imports: Imports = None,
    out: Out = DEFAULT_REPORTS,
    baseline: BaselineOption = DEFAULT_BASELINE,
    output: Annotated[BisectFormat, typer.Option("--format", help="What to print on stdout.")] = BisectFormat.TEXT,
    log_level: LogLevelOption = LogLevel.WARNING,
) -> None:
    """Run the scripts of findings under other versions of torch, and say under which each fails.

    The script is written under the torch of this program, where the finding has to fail.

    Exit status: 0 if every finding was told under every version, 2 if one was not.
    """
    log_to_stderr(log_level)
    if not pythons and not make:
        raise ValueError("bisect: which versions of torch? Give --python PATH of an interpreter, or --make VERSION")
    with Loading(hash_seeds=1):
        from verifier.cli import work
    work.bisect(
        context, findings or (), pythons or (), make or (), environments, update, imports or (), out, output, baseline
    )


@app.command()
def graph(
    context: typer.Context,
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help="Id or folder of a run whose redistributions are judged.", show_default="the newest"
        ),
    ] = None,
    op: Annotated[str, typer.Option("--op", help="Of a run: judge the ops that match this glob.")] = "*",
    by: Annotated[By, typer.Option("--by", help="Of a run: sum up by op, by source and target, or by step.")] = By.OP,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--diff",
            metavar="RUN_A RUN_B",
            help="Compare the paths of two runs; status 1 if one became dearer.",
            show_default=False,
        ),
    ] = None,
    every_pair: Annotated[
        bool, typer.Option("--all-pairs", help="Judge the redistributions between all layouts of the tensor.")
    ] = False,
    properties: Annotated[
        bool, typer.Option("--properties", help="Check what should hold of torch's planners; status 1 if it does not.")
    ] = False,
    strided: Annotated[
        list[str] | None, typer.Option("--strided", help="A strided shard that layouts have as well, as '_S(0, 2)'.")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--source", help="Judge one redistribution: its placements before, as '(S(0), R)'.")
    ] = None,
    target: Annotated[str | None, typer.Option("--target", help="Its placements after, as '(R, S(0))'.")] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            help="Mesh as 4 or 2x4; 2x4+flat has its flattened submeshes, too.",
            show_default="2x4; of a run, all its meshes",
        ),
    ] = None,
    shape: Annotated[str, typer.Option("--shape", help="Sizes of the tensor dims.")] = "8,8",
    dtype: Annotated[str, typer.Option("--dtype", help="Dtype of the tensor.")] = "float32",
    planner: Annotated[
        TorchPlanner, typer.Option("--torch-planner", help="The planner of torch whose paths are judged.")
    ] = TorchPlanner.DEFAULT,
    link: Annotated[
        list[str] | None,
        typer.Option(
            "--link",
            help="Latency and bandwidth for the alpha-beta model, as 2us,50GB/s; once, or for each mesh dim.",
            show_default="those of torch's model",
        ),
    ] = None,
    worst: Annotated[int, typer.Option("--worst", min=0, help="Print so many of the worst paths.")] = 5,
    output: Annotated[GraphFormat, typer.Option("--format", help="What to print on stdout.")] = GraphFormat.TEXT,
    out: Out = DEFAULT_REPORTS,
) -> None:
    """Judge redistributions: torch's path beside the best path and a lower bound that no path can beat.

    Of a run, those that it executed are judged. With --all-pairs, --properties, or --source and --target, no run is
    needed: torch's planners are asked for their paths.

    A layout is placements with shard order, as '(S(0)[1], S(0)[0])' if mesh dim 1 shards first.
    """
    if (source is None) != (target is None):
        raise ValueError("--source and --target belong together; give both")
    asked = {
        "RUN": run is not None, "--diff": diff is not None, "--all-pairs": every_pair, "--properties": properties,
        "--source": source is not None,
    }  # fmt: skip
    if len(given := [name for name, value in asked.items() if value]) > 1:
        raise ValueError(f"{given[0]} and {given[1]} ask for different things; give one of them")
    if given in ([], ["RUN"], ["--diff"]):
        from verifier.cli import reading

        reading.graph(context, run, diff, op, mesh, worst, by, link or (), output, out)
    with Loading():
        from verifier.cli.common import write_out
        from verifier.report.paths.asking import Question, answer, answer_on_properties
    question = Question(
        mesh or "2x4", shape, dtype, source, target, planner.value, worst, link or (), strided=strided or ()
    )
    if properties:
        text, holds = answer_on_properties(question, output)
        write_out(text, output)
        raise typer.Exit(not holds)
    write_out(answer(question, output), output)


for _command in load_entry_points(COMMANDS, Command).values():
    app.command(_command.name)(_command.function)
