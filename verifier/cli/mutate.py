"""The command ``mutate``."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, closing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from verifier.cli.loading import Loading
from verifier.cli.options import Imports, LogLevelOption, Seed, check_imports, checked_meshes
from verifier.core.logs import LogLevel, log_to_stderr
from verifier.core.wording import plain_text

if TYPE_CHECKING:
    from verifier.mutation.outcomes import MutationRun

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
            "given. With a file of torch that has no strategies, such as _redistribute.py: ops as `run` names them.",
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
    level: Annotated[
        int, typer.Option("--level", help="1: rules alone; 2: what these do not tell is tried on ranks as well.")
    ] = 2,
    meshes: Annotated[
        list[str] | None, typer.Option("--mesh", help="Meshes of the ranks.", callback=checked_meshes, show_default="2")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Write each outcome to this file at once; with a FILE that exists, go on where that run ended.",
            show_default=False,
        ),
    ] = None,
    shard: Annotated[
        str | None, typer.Option("--shard", metavar="I/N", help="Try the I-th of N parts.", show_default=False)
    ] = None,
    join: Annotated[
        list[str] | None,
        typer.Option(
            "--join", metavar="FILE", help="Try nothing; print what such files hold together.", show_default=False
        ),
    ] = None,
    output: Annotated[_Format, typer.Option("--format", help="What to print on stdout.")] = _Format.TEXT,
    log_level: LogLevelOption = LogLevel.WARNING,
) -> None:
    """Change the source of strategies, and list the changes that the rule check and trials on ranks do not notice.

    Exit status: 0 if no change survived, 1 if one did.
    """
    log_to_stderr(log_level)
    check_imports(imports)
    with Loading():
        from verifier.campaign.request import Request, make_plan
        from verifier.cli.common import consoles, refuse_cluster
        from verifier.core.parts import RunPart
        from verifier.gate.baseline import Baseline
        from verifier.mutation.campaign import BENEATH_ARE, MutationOptions, run_mutants, run_on_ranks
        from verifier.mutation.journal import Journal, joined, question_of
        from verifier.mutation.ranks import RankTrials
        from verifier.planning.budgets import DEFAULT_PROFILE
        from verifier.rules.campaign.request import MAX_JOBS, RulesRequest, make_rules_plan
        from verifier.torch_internals.amending.mutating import files_of_torchs_rules, is_of_torch
    refuse_cluster(context)
    for name, value in (("--max", most), ("--samples", samples)):
        if value is not None and value < 1:
            raise ValueError(f"{name} {value}: must be at least 1")
    if jobs is not None and not 1 <= jobs <= MAX_JOBS:  # 0: in this process, which a mutant could end
        raise ValueError(f"--jobs {jobs}: must be from 1 to {MAX_JOBS}")
    if level not in (1, 2):
        raise ValueError(f"--level {level}: must be 1 or 2")
    if join:
        if patterns or out or shard:
            raise ValueError("--join: takes no ops, no --out and no --shard, because it tries nothing")
        _tell(joined(join), output)
    part = None if shard is None else RunPart.parse(shard)
    named = [name for name in patterns or () if name.endswith(".py") or Path(name).is_file()]
    globs = [name for name in patterns or () if name not in named]
    beneath = [os.path.realpath(name) for name in named if is_of_torch(name)]  # what strategies rest on
    given = [name for name in named if not is_of_torch(name)]
    if beneath and (given or level == 1):
        raise ValueError(f"{beneath[0]}: a file of torch is tried by itself, and on ranks (--level 2)")
    plan = None
    if not beneath:
        plan = make_rules_plan(
            RulesRequest(globs, seed=seed, jobs=jobs, imports=[*(imports or ()), *given]), Baseline()
        )
        if not plan.targets:
            raise ValueError(f"{', '.join(given)}: no source has samples of an op that it registers")
    display = consoles()[1]

    def progress(what: str, done: int, total: int) -> None:
        if display.is_terminal:
            display.print(f"{what}: {done} of {total}", end="\r", highlight=False)

    files = beneath or [os.path.realpath(name) for name in given] or list(files_of_torchs_rules())
    all_imports = list(imports or ()) if plan is None else plan.header.imports
    with ExitStack() as stack:
        journal = ranks = None
        if out is not None:
            question = question_of(globs, files, all_imports, seed, most, samples, level, shard)
            journal = stack.enter_context(closing(Journal(out, question)))
        if level == 2:
            request = Request((), meshes or ["2"], profile=DEFAULT_PROFILE, seed=seed, imports=all_imports, jobs=1)
            ranks = stack.enter_context(closing(RankTrials(make_plan(request, Baseline()))))
        options = MutationOptions(most, seed, samples, jobs or 0 if plan is None else plan.jobs, part)
        if plan is None:
            assert ranks is not None
            made = run_on_ranks(files, globs or BENEATH_ARE, options, progress, ranks, journal)
        else:
            made = run_mutants(plan, files, bool(given) or not patterns, options, progress, ranks, journal)
    _tell(made, output)


def _tell(made: MutationRun, output: _Format) -> NoReturn:
    """Print what came of mutants, and end."""
    from verifier.cli.common import write_out
    from verifier.mutation.outcomes import Kind
    from verifier.mutation.text import mutation_json, mutation_lines

    if output is _Format.JSON:
        write_out(mutation_json(made) + "\n", output)
    else:
        write_out("".join(f"{line}\n" for line in mutation_lines(made)))
    for error in made.errors:
        sys.stderr.write(plain_text(f"error of the verifier: {error}\n"))
    raise typer.Exit(2 if made.errors else 1 if made.counts()[Kind.SURVIVED] else 0)
