"""The command ``derive``."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from verifier.cli.loading import Loading
from verifier.cli.options import (
    DeriveFormat,
    DeriveTarget,
    Imports,
    LogLevelOption,
    Seed,
    check_imports,
    checked_meshes,
)
from verifier.core.logs import LogLevel, log_to_stderr

__all__ = ["derive"]


def derive(
    context: typer.Context,
    op: Annotated[str, typer.Argument(metavar="OP", help="An overload, as aten.cumsum.default or mylib::my_op.")],
    target: Annotated[
        DeriveTarget, typer.Option("--target", help="In which of DTensor's ways the strategy is registered.")
    ] = DeriveTarget.SINGLE_DIM,
    torch: Annotated[
        str | None,
        typer.Option("--torch", metavar="VERSION", help="For which torch, as 2.15; it has to be the one that runs.",
                     show_default="the torch that runs"),
    ] = None,
    world_size: Annotated[str, typer.Option("--world-size", help="Sizes of the meshes of one dim, as 2,3,4.")] = "2,3",
    mesh: Annotated[
        list[str] | None,
        typer.Option(
            "--mesh", help="Mesh of ranks to check the code on; repeatable.", callback=checked_meshes,
            show_default="2, 3, 2x2",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="float64, float32 or bfloat16.")] = "float64",
    max_samples: Annotated[int, typer.Option("--max-samples", help="Calls of the op, at most.")] = 8,
    seed: Seed = 0,
    imports: Imports = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write the strategy to this file, and a test beside it.",
                     show_default="stdout"),
    ] = None,
    output: Annotated[DeriveFormat, typer.Option("--format", help="What to print on stdout.")] = DeriveFormat.TEXT,
    log_level: LogLevelOption = LogLevel.WARNING,
) -> None:  # fmt: skip
    """Write the sharding strategy of an op: rules that hold for all of its calls, as code that passed the checks.

    Exit status: 0 if the code passed, 1 if a check refuted it. What did not pass is not written.
    """
    log_to_stderr(log_level)
    if out is not None and (out.suffix != ".py" or not out.stem.isidentifier()):
        raise ValueError(f"--out {out}: the strategy is a module, so give a file name such as my_strategy.py")
    if out is not None and not out.parent.is_dir():  # deriving takes a minute, and would be lost
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    if out is not None:
        written = [one.resolve() for one in (out, out.with_name(f"test_{out.name}"))]
        for name in imports or ():
            if name.endswith(".py") and Path(name).resolve() in written:
                raise ValueError(f"--out {out}: this would write over the file of --import {name}")
    running = version("torch")
    if torch is not None and not f"{running.partition('+')[0]}.".startswith(f"{torch}."):
        raise ValueError(
            f"--torch {torch}: the code is checked with the torch that runs, {running}; run derive under torch {torch}"
        )
    check_imports(imports)
    with Loading(hash_seeds=1):
        from verifier.cli.common import command_line, refuse_cluster, write_out
        from verifier.deriving.derive import DeriveRequest, module_name
        from verifier.deriving.derive import derive as make
        from verifier.deriving.text import derivation_json, derivation_lines
        from verifier.deriving.writing.subject import Target
        from verifier.records.files import AS_IT_WAS, write_atomically
    refuse_cluster(context)
    request = DeriveRequest(
        op, Target(target.value), world_size, mesh or ("2", "3", "2x2"), dtype, max_samples, seed, imports or (),
        command_line(), Path() if out is None else out.parent,
    )  # fmt: skip
    made = make(request, out.stem if out is not None else module_name(op))
    passed = made.closed.passed
    if passed and out is not None:
        write_atomically(out, made.code.encode(), AS_IT_WAS)
        write_atomically(out.with_name(f"test_{out.name}"), made.test.encode(), AS_IT_WAS)
    if output is DeriveFormat.JSON:
        write_out(derivation_json(made) + "\n", output)
    else:
        write_out(made.code if passed and out is None else "")
    typer.echo("\n".join(derivation_lines(made, out)), err=True)
    raise typer.Exit(0 if passed else 1)
