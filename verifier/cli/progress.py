"""Shows the progress of a run or of a rule check: a table or a bar on a terminal, otherwise a few lines."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Table

from verifier.core.case import OpCase
from verifier.core.wording import plural
from verifier.events import (
    Event,
    FindingReported,
    MeshStarted,
    PoolRestarted,
    RunFinished,
    RunStarted,
    TrialFinished,
    TrialRepeated,
)
from verifier.records.schema import OpRulesRecord
from verifier.rules.campaign.request import RulesPlan

__all__ = ["ProgressDisplay", "RulesProgress"]

RATE_WINDOW = 10.0
"""Seconds over which trials per second are counted."""


class _Rate:
    """Events per second over the last :data:`RATE_WINDOW` seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started = clock()
        self._times: deque[float] = deque()

    def count(self) -> None:
        self._times.append(self._clock())
        self._forget()

    def _forget(self) -> None:
        while self._times and self._times[0] < self._clock() - RATE_WINDOW:
            self._times.popleft()

    @property
    def value(self) -> float:
        self._forget()
        return len(self._times) / max(1e-3, min(RATE_WINDOW, self._clock() - self._started))


class _Row:
    """The row of one family on one mesh."""

    def __init__(self, name: str, examples: int, clock: Callable[[], float]) -> None:
        self.name = name
        self.examples = examples
        self.cases = self.trials = self.bad = self.restarts = 0
        self.seconds: float | None = None
        self._clock = clock
        self._started = clock()
        self._rate = _Rate(clock)

    def trial(self, new_case: bool, bad: bool) -> None:
        self.cases = min(self.examples, self.cases + new_case)
        self.trials += 1
        self.bad += bad
        self._rate.count()

    def finish(self) -> None:
        self.seconds = self._clock() - self._started

    @property
    def elapsed(self) -> float:
        return self._clock() - self._started if self.seconds is None else self.seconds

    @property
    def rate(self) -> float:
        """Trials per second: recent ones while the mesh runs, all of them afterwards."""
        return self._rate.value if self.seconds is None else self.trials / max(1e-3, self.seconds)


class ProgressDisplay:
    """A listener that shows the progress on stderr."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._rows: list[_Row] = []
        self._current: _Row | None = None
        self._case: OpCase | None = None
        self._unknown = "new"
        """What is said of a finding that is not known; it may be torch's own, which is asked once the run is done."""
        self._told: dict[str, bool] = {}
        """Whether each finding is known."""
        self._restarts = 0
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=4)

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted(header):
                self._unknown = "found" if header.own_rules else "new"
                self._say(
                    f"run {header.id}: seed {header.seed}, profile {header.profile}, torch {header.versions['torch']}, "
                    f"device {header.device}, meshes {' '.join(header.meshes)}, families {' '.join(header.families)}"
                    + (f", {header.places}" if header.places else "")
                )
                if self._console.is_terminal:
                    self._live.start()
            case MeshStarted(mesh, family, examples):
                self._close_mesh()
                self._current = _Row(f"{family} {mesh}", examples, self._clock)
                self._rows.append(self._current)
            case TrialFinished(observation, verdict, _):
                if self._current is not None:
                    self._current.trial(observation.trial.case is not self._case, verdict.kind.bad)
                    self._case = observation.trial.case
            case FindingReported(finding):
                if finding.fingerprint in self._told:  # other failures that turned out to be the same
                    return
                self._told[finding.fingerprint] = finding.known
                known = "known" if finding.known else self._unknown
                self._say(f"{known} {finding.verdict} {finding.fingerprint}: {finding.message.splitlines()[0]}")
            case PoolRestarted(mesh, reason, seconds):
                self._restarts += 1
                if self._current is not None:
                    self._current.restarts += 1
                self._say(f"ranks of mesh {mesh} mended in {seconds:.1f} s: {reason.splitlines()[0]}")
            case TrialRepeated(trial, rows, position):
                named = ", ".join(f"{name}={placements}" for name, placements in rows)
                self._say(f"tried again: trial {position}, {trial.case.op}({named}) on mesh {trial.mesh}")
            case RunFinished():
                self._close_mesh()
                self._live.stop()
            case _:
                pass

    def _table(self) -> Table:
        """Return the current table: a row for each mesh, and the number of findings below."""
        table = Table(box=None, pad_edge=False, show_footer=True)
        restarts = f"{self._restarts} restart{'s' * (self._restarts != 1)}" if self._restarts else ""
        known = sum(self._told.values())
        table.add_column("mesh", footer=f"findings: {len(self._told) - known} {self._unknown}, {known} known")
        for name in ("cases", "", "trials", "trials/s", "failed"):
            table.add_column(name, justify="right")
        table.add_column("restarts", justify="right", footer=restarts)
        table.add_column("seconds", justify="right")
        for row in self._rows:
            done = row.examples if row.seconds is not None else row.cases
            table.add_row(
                row.name,
                f"{row.cases}/{row.examples}",
                ProgressBar(total=max(1, row.examples), completed=done, width=16),
                f"{row.trials}",
                f"{row.rate:.0f}",
                f"{row.bad}",
                f"{row.restarts}",
                f"{row.elapsed:.0f}",
            )
        return table

    def _close_mesh(self) -> None:
        row, self._current = self._current, None
        if row is None:
            return
        row.finish()
        if not self._console.is_terminal:
            self._say(f"{row.name}: {plural(row.trials, 'trial')}, {row.bad} failed, {row.elapsed:.1f} s")

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class RulesProgress:
    """Says on stderr what is about to be done, and shows a bar on a terminal."""

    def __init__(self, console: Console, plan: RulesPlan) -> None:
        header = plan.header
        console.print(
            f"run {header.id}: level 1, seed {header.seed}, torch {header.versions['torch']}, "
            f"meshes {' '.join(header.meshes)}, dtype {header.dtypes[0]}, {plural(len(plan.targets), 'op')}, "
            f"{plural(plan.jobs, 'job')}",
            highlight=False,
            markup=False,
        )
        self._bar = Progress(
            TextColumn("{task.completed:.0f}/{task.total:.0f} ops"),
            BarColumn(),
            TextColumn("{task.fields[combinations]:,} combinations, {task.fields[missing]} missing {task.description}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("", total=len(plan.targets), combinations=0, missing=0)
        self._combinations = self._missing = 0
        self._bar.start()

    def __call__(self, done: int, total: int, name: str, record: OpRulesRecord | None) -> None:
        if record is not None:
            self._combinations += record.combinations
            self._missing += len(record.missing)
        self._bar.update(
            self._task, completed=done, description=name, combinations=self._combinations, missing=self._missing
        )
        if done == total:
            self._bar.stop()
