"""Functions that several commands share."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from verifier.cli.options import DEFAULT_BASELINE, Detail, Format
from verifier.core.interrupts import ReportInterrupted
from verifier.core.wording import plain_json, plain_text
from verifier.gate.baseline import Baseline, load_baseline
from verifier.gate.decision import GateDecision, decide
from verifier.gate.formats import Place, render_github, render_junit, render_markdown, render_sarif
from verifier.gate.text import as_json, render
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
    "meanwhile",
    "page_written",
    "refuse_cluster",
    "write_decision",
    "write_out",
    "write_run",
]

ResultT = TypeVar("ResultT")


def command_line() -> str:
    """Return the command line that was typed."""
    return shlex.join(["python", "-m", "verifier", *sys.argv[1:]])


def load_given_baseline(path: Path) -> Baseline:
    """Return the baseline; an unchanged file is read once. Only the default file may be missing."""
    try:
        state = path.stat()
    except OSError:  # which reading it reports
        return load_baseline(path, missing_ok=path == DEFAULT_BASELINE)
    return _read_baseline(path, state.st_ino, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=1)
def _read_baseline(path: Path, *_state: int) -> Baseline:
    return load_baseline(path)


class _PlainConsole(Console):
    """A console that shows control characters in a text instead of obeying them; all styles are ours."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain_text(segment.text))


def consoles() -> tuple[Console, Console]:
    """Return the consoles of stdout and stderr."""
    return _PlainConsole(soft_wrap=True), _PlainConsole(stderr=True, soft_wrap=True)


def write_out(text: str, output: str = "text") -> None:
    """Write ``text`` to stdout with control characters made visible; ``output`` is its format."""
    sys.stdout.write(plain_json(text) if output == "json" else plain_text(text))


@contextmanager
def page_written(run: RunRecord, store: RunStore) -> Iterator[Path | None]:
    """Write the page of ``run`` and yield its path, or None if it cannot be written; the error is raised at the end.

    Raises
    ------
    RunStoreError
        If the file system refuses.
    ReportInterrupted
        If a Ctrl-C comes in the block; the record of the run is kept.
    """
    from verifier.report.latest import write_report  # loads networkx and jinja2, which the gate does not need

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


def meanwhile(work: Callable[[], ResultT]) -> Future[ResultT]:
    """Return what will be the result of ``work``, which runs in a thread that an interrupt need not wait for."""
    future: Future[ResultT] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - is raised where the result is asked for
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def cluster_of(context: typer.Context, fresh: bool = True) -> Cluster | None:
    """Return the ranks that torchrun started, if any; refuse a command that makes no run (not ``fresh``)."""
    cluster: Cluster | None = context.obj
    if cluster is not None and not fresh:
        remedy = f"add --fresh, or run {context.command.name} by itself"
        raise ValueError(f"{context.command.name} under torchrun has no use for its ranks; {remedy}")
    return cluster


def refuse_cluster(context: typer.Context) -> None:
    """Refuse to run under torchrun, whose ranks the command would not use."""
    if context.obj is not None:
        raise ValueError(f"{context.command.name} uses no ranks; run it by itself, without torchrun")


def write_decision(decision: GateDecision, output: Format, folder: Path, detail: Detail = Detail.SCREEN) -> None:
    """Write a decision to stdout in the format ``output``; the runs are recorded in ``folder``."""
    writers = {
        Format.GITHUB: render_github,
        Format.JUNIT: render_junit,
        Format.MARKDOWN: render_markdown,
        Format.SARIF: render_sarif,
    }
    if output in writers:
        places = {op: Place(*place) for op, place in _places().items()}
        write_out(writers[output](decision, folder, places), "json" if output is Format.SARIF else output)
    else:
        quiet, brief = detail is Detail.QUIET, detail is not Detail.FULL
        said = as_json(decision) if output is Format.JSON else render(decision, folder, brief, quiet)
        write_out(said.rstrip() + "\n", output)


def _places() -> dict[str, tuple[str, int]]:
    """Return the places of the user's strategies; none in a process that has imported nothing."""
    if "verifier.execution.imports" not in sys.modules:  # it loads torch
        return {}
    from verifier.execution.imports import places_of_rules

    return places_of_rules()


def write_run(run: RunRecord, baseline: Path, output: Format, folder: Path) -> None:
    """Write what the gate decides on a run alone, today, in the format ``output``."""
    write_decision(decide(run, load_given_baseline(baseline), datetime.now(UTC).date()), output, folder)


def exit_status(run: RunRecord, baseline: Path) -> int:
    """Return the exit status of the gate for a run today: 0, 1 or 2; say on stderr of what it is no evidence."""
    decision = decide(run, load_given_baseline(baseline), datetime.now(UTC).date())
    for one in decision.unanswered:
        sys.stderr.write(plain_text(f"NO EVIDENCE {one.why}\n  {one.remedy}\n"))
    return decision.exit_status
