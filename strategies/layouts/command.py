"""The command ``layouts``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verifier.cli.loading import Loading
from verifier.cli.options import Command, LogLevelOption
from verifier.core.logs import LogLevel, log_to_stderr

__all__ = ["COMMAND", "layouts"]


def _counts(option: str, text: str | None) -> tuple[int, ...] | None:
    """Return the counts in a text such as ``1,3,1``; None if the option is not given."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{option} {text!r} is not a list of counts such as 1,3,1,3")
    return tuple(map(int, parts))


def layouts(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(metavar="[LAYOUT]", help="Which layout; all are shown without one.", show_default=False),
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", help="How many ranks share the table, up to 1024.")] = 4,
    rows: Annotated[int, typer.Option("--rows", help="Rows of the table.")] = 8,
    columns: Annotated[int, typer.Option("--columns", help="Columns of the table.")] = 4,
    splits: Annotated[
        str | None, typer.Option("--splits", metavar="N,N,...", help="Rows of each rank, of row-wise-uneven.")
    ] = None,
    owners: Annotated[
        str | None,
        typer.Option("--owners", metavar="N,N,...", help="Who holds the table or its column blocks: ranks, or hosts."),
    ] = None,
    ranks_per_host: Annotated[
        int | None, typer.Option("--ranks-per-host", help="How many ranks in a row share a host.")
    ] = None,
    page: Annotated[Path | None, typer.Option("--html", help="Write the pictures to this file as well.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check it on gloo ranks: chunks, lookup, one step, a checkpoint.")
    ] = False,
    log_level: LogLevelOption = LogLevel.WARNING,
) -> None:
    """Show which rank holds what of an embedding table, under one of the layouts of recommender systems."""
    log_to_stderr(log_level)
    with Loading():
        from strategies.layouts.demo import show_layouts
        from strategies.layouts.tables import LayoutOptions
        from verifier.cli.common import consoles, refuse_cluster
        from verifier.core.verdict import VerdictKind
    refuse_cluster(context)
    options = LayoutOptions(
        rows, columns, ranks, _counts("--splits", splits), _counts("--owners", owners), ranks_per_host
    )
    shown = show_layouts(name, options)
    if check:
        shown.refuse_check()
    consoles()[0].print("\n".join(shown.lines), highlight=False, markup=False)
    if page is not None:
        try:
            page.write_text(shown.page, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--html {page} cannot be written: {error.strerror}") from error
    if not check:
        return
    status = 0
    for line, kind in shown.checked():
        consoles()[0].print(line, highlight=False, markup=False)
        status = max(status, 1 if kind.bad else 0 if kind is VerdictKind.PASS else 2)
    raise typer.Exit(status)


COMMAND = Command("layouts", layouts)
