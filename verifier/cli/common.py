"""What several commands of the command line do alike."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from verifier.cli.options import DEFAULT_BASELINE
from verifier.core.interrupts import ReportInterrupted
from verifier.core.wording import plain_json, plain_text
from verifier.gate.baseline import Baseline, load_baseline
from verifier.gate.decision import decide
from verifier.records.files import RunStoreError
from verifier.records.schema import RunRecord
from verifier.runs.store import RunStore

if TYPE_CHECKING:
    from verifier.meshes.torchrun.controller import Cluster

__all__ = [
    "cluster_of",
    "command_line",
    "consoles",
    "exit_status",
    "load_given_baseline",
    "page_written",
    "refuse_cluster",
    "write_out",
]


def command_line() -> str:
    """Return the command line that was typed."""
    return shlex.join(["python", "-m", "verifier", *sys.argv[1:]])


def load_given_baseline(path: Path) -> Baseline:
    """Return the baseline; the default one need not exist, one that was asked for must."""
    return load_baseline(path, missing_ok=path == DEFAULT_BASELINE)


class _PlainConsole(Console):
    """A console that shows what a text holds and never obeys it: styles come from us alone."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain_text(segment.text))


def consoles() -> tuple[Console, Console]:
    """Return those of stdout and of stderr."""
    return _PlainConsole(soft_wrap=True), _PlainConsole(stderr=True, soft_wrap=True)


def write_out(text: str, output: str = "text") -> None:
    """Write ``text`` to stdout, with what a terminal would obey made visible; ``output`` is its format."""
    sys.stdout.write(plain_json(text) if output == "json" else plain_text(text))


@contextmanager
def page_written(run: RunRecord, store: RunStore) -> Iterator[Path | None]:
    """Write the page of ``run`` and have its path; None if it cannot be written, which is raised at the end.

    Raises
    ------
    RunStoreError
        If the file system refuses.
    ReportInterrupted
        If a Ctrl-C comes until the end; the record of the run is kept.
    """
    from verifier.report.latest import write_report  # loads networkx and jinja2, which the gate does without

    page, refusal = None, None
    try:
        try:
            page = write_report(run, store)
        except RunStoreError as error:
            refusal = error
        yield page
    except KeyboardInterrupt:
        raise ReportInterrupted(f"interrupted; {store.where_kept(run.header.id)}") from None
    if refusal is not None:
        raise refusal


def cluster_of(context: typer.Context, fresh: bool = True) -> Cluster | None:
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


def refuse_cluster(context: typer.Context) -> None:
    """Refuse to run under torchrun, whose ranks the command would not use."""
    if context.obj is not None:
        raise ValueError(f"{context.command.name} uses no ranks; run it by itself, without torchrun")


def exit_status(run: RunRecord, baseline: Path) -> int:
    """Return what the gate says of a run today: 0, 1 or 2."""
    return decide(run, load_given_baseline(baseline), datetime.now(UTC).date()).exit_status
