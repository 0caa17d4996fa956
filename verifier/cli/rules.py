"""The command ``rules``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from verifier.cli.loading import OF_IMPORTS, WORKER_STEP, Loading
from verifier.cli.options import (
    DEFAULT_BASELINE,
    BaselineOption,
    Detail,
    DryRun,
    FailOn,
    Format,
    FormatOption,
    Imports,
    LogLevelOption,
    Out,
    Quiet,
    Seed,
    Verbose,
    check_imports,
    checked_meshes,
    typed,
)
from verifier.core.logs import LogLevel, log_to_stderr
from verifier.records.files import DEFAULT_REPORTS

__all__ = ["rules"]


def rules(
    context: typer.Context,
    patterns: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OP_GLOB]...",
            help="Ops as OpInfo names them (add, nn.functional.embedding), or aten overloads; all if none is given.",
            show_default=False,
        ),
    ] = None,
    world_size: Annotated[
        str | None, typer.Option("--world-size", help="Sizes of the meshes of one dim, as 2,3,4.", show_default="2,3")
    ] = None,
    mesh: Annotated[
        list[str] | None,
        typer.Option(
            "--mesh",
            help="Mesh of several dims on which products of rules are tried, as 2x2; repeatable.",
            callback=checked_meshes,
            show_default="2x2, or none with --world-size",
        ),
    ] = None,
    products: Annotated[
        int | None,
        typer.Option(
            "--products",
            help="Products of rules that are tried of each call on each mesh of several dims, at most.",
            show_default="12, of the first 2 calls of an overload",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="float64, float32 or bfloat16.")] = "float64",
    max_samples: Annotated[int, typer.Option("--max-samples", help="Calls of one overload of an op, at most.")] = 8,
    sizes: Annotated[int, typer.Option("--sizes", help="Sizes at which each call is drawn.")] = 3,
    claims_only: Annotated[
        bool, typer.Option("--claims-only", help="Try what DTensor claims; look for no missing rules.")
    ] = False,
    fail_on: Annotated[
        str | None,
        typer.Option(
            "--fail-on",
            metavar="KIND[,KIND]",
            help="wrong, or missing for missing rules as well. Of `rules diff`: lost, wrong, or both.",
            show_default="wrong; of `rules diff` lost,wrong",
        ),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option("--table", metavar="FILE", help="Write the table of all claimed rules there.", show_default=False),
    ] = None,
    seed: Seed = 0,
    imports: Imports = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", help="Worker processes.", show_default="one for each core")
    ] = None,
    output: FormatOption = Format.TEXT,
    out: Out = DEFAULT_REPORTS,
    baseline: BaselineOption = DEFAULT_BASELINE,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    log_level: LogLevelOption = LogLevel.WARNING,
) -> None:
    """Check rules without DTensor's runtime: every combination of placements, exactly (level 1).

    `rules diff A.json B.json` compares two tables, which --table writes: rules lost, gained, become wrong, mended, and
    claimed at other calls.
    """
    log_to_stderr(log_level)
    detail = Detail.of(quiet, verbose)
    if patterns and patterns[0] == "diff" and len(patterns) > 1 and all(one.endswith(".json") for one in patterns[1:]):
        _diff(patterns[1:], fail_on, output, typed(context, "fail_on"))
    fails = FailOn.parse(fail_on or FailOn.WRONG, FailOn.WRONG, FailOn.MISSING, typed=typed(context, "fail_on"))
    check_imports(imports)
    with Loading(hash_seeds=1, workers=OF_IMPORTS if imports else WORKER_STEP):
        from verifier.cli.common import command_line
        from verifier.cli.rules_work import check
        from verifier.rules.campaign.request import RulesRequest
    request = RulesRequest(
        patterns or (), world_size, mesh or (), dtype, max_samples, sizes, seed, claims_only, jobs, imports or (),
        command_line(), products,
    )  # fmt: skip
    check(context, request, fails, output, out, baseline, dry_run, detail, table)


def _diff(files: Sequence[str], fail_on: str | None, output: Format, typed: bool) -> NoReturn:
    """Compare two rule tables and end: with status 1 if a change is of a kind in ``fail_on``."""
    from verifier.core.wording import plain_text
    from verifier.gate.rule_changes import Change, changes_between, changes_json, changes_lines, changes_markdown
    from verifier.records.rule_table import read_table

    if len(files) != 2:
        raise ValueError(f"rules diff {' '.join(files)}: two tables are compared, not {len(files)}")
    if output not in (Format.TEXT, Format.JSON, Format.MARKDOWN):
        raise ValueError(f"rules diff --format {output}: text, json or markdown")
    kinds = {Change(one) for one in FailOn.parse(fail_on or "lost,wrong", FailOn.LOST, FailOn.WRONG, typed=typed)}
    before, after = (read_table(Path(file)) for file in files)
    changes = changes_between(before, after)
    if output is Format.JSON:
        typer.echo(changes_json(changes))
    elif output is Format.MARKDOWN:
        typer.echo(plain_text(changes_markdown(changes)), nl=False)
    else:
        for line in changes_lines(changes):
            typer.echo(plain_text(line))
    raise typer.Exit(1 if changes.fails(kinds) else 0)
