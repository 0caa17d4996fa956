"""The command ``mutate``."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from verifier.cli.loading import Loading
from verifier.cli.options import Imports, LogLevelOption, Seed
from verifier.core.logs import LogLevel, log_to_stderr
from verifier.core.wording import plain_text

__all__ = ["mutate"]


class _Format(StrEnum):
    TEXT = "text"
    JSON = "json"


def mutate(
    context: typer.Context,
    patterns: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OP_GLOB | FILE]...",
            help="Ops, as `rules` names them, or a Python file that registers strategies; all of torch's if none is "
            "given.",
            show_default=False,
        ),
    ] = None,
    most: Annotated[
        int | None,
        typer.Option("--max", help="Try a seeded sample of so many mutants.", show_default="all"),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", help="Samples on which each mutant is tried, at most.")] = 12,
    seed: Seed = 0,
    imports: Imports = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", help="Worker processes.", show_default="one for each core")
    ] = None,
    output: Annotated[_Format, typer.Option("--format", help="What to print on stdout.")] = _Format.TEXT,
    log_level: LogLevelOption = LogLevel.WARNING,
) -> None:
    """Change the source of strategies, and list the changes that the rule check (level 1) does not notice.

    Exit status: 0 if no change survived, 1 if one did.
    """
    log_to_stderr(log_level)
    with Loading():
        from verifier.cli.common import consoles, refuse_cluster, write_out
        from verifier.gate.baseline import Baseline
        from verifier.mutation.campaign import Kind, MutationOptions, run_mutants
        from verifier.mutation.text import mutation_json, mutation_lines
        from verifier.rules.campaign.request import MAX_JOBS, RulesRequest, make_rules_plan
        from verifier.torch_internals.amending.mutating import files_of_torchs_rules
    refuse_cluster(context)
    for name, value in (("--max", most), ("--samples", samples)):
        if value is not None and value < 1:
            raise ValueError(f"{name} {value}: must be at least 1")
    if jobs is not None and not 1 <= jobs <= MAX_JOBS:  # 0: in this process, which a mutant could end
        raise ValueError(f"--jobs {jobs}: must be from 1 to {MAX_JOBS}")
    given = [name for name in patterns or () if name.endswith(".py") or Path(name).is_file()]
    globs = [name for name in patterns or () if name not in given]
    plan = make_rules_plan(RulesRequest(globs, seed=seed, jobs=jobs, imports=[*(imports or ()), *given]), Baseline())
    if not plan.targets:
        raise ValueError(f"{', '.join(given)}: no source has samples of an op that it registers")
    display = consoles()[1]

    def progress(what: str, done: int, total: int) -> None:
        if display.is_terminal:
            display.print(f"{what}: {done} of {total}", end="\r", highlight=False)

    made = run_mutants(
        plan,
        [os.path.realpath(name) for name in given] or files_of_torchs_rules(),
        bool(given) or not patterns,
        MutationOptions(most, seed, samples, plan.jobs),
        progress,
    )
    if output is _Format.JSON:
        write_out(mutation_json(made) + "\n", output)
    else:
        write_out("".join(f"{line}\n" for line in mutation_lines(made)))
    for error in made.errors:
        sys.stderr.write(plain_text(f"error of the verifier: {error}\n"))
    raise typer.Exit(2 if made.errors else 1 if made.counts()[Kind.SURVIVED] else 0)
