"""Shows a run while it goes on: a progress bar on a terminal, a line per mesh elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from verifier.cases import OpCase
from verifier.events import Event, FindingReported, MeshStarted, PoolRestarted, RunFinished, RunStarted, TrialFinished

__all__ = ["ProgressDisplay"]


class ProgressDisplay:
    """A listener that shows where the run is, on stderr."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description:14}"),
            BarColumn(),
            TextColumn(
                "{task.completed:.0f}/{task.total:.0f} cases, {task.fields[trials]} trials, {task.fields[bad]} failed"
            ),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._case: OpCase | None = None
        self._trials = self._bad = 0
        self._started = time.monotonic()

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted(header):
                self._say(
                    f"run {header.id}: seed {header.seed}, profile {header.profile}, torch {header.versions['torch']}, "
                    f"device {header.device}, meshes {' '.join(header.meshes)}, families {' '.join(header.families)}"
                )
                self._bar.start()
            case MeshStarted(mesh, family, examples):
                self._close_mesh()
                self._started = time.monotonic()
                self._task = self._bar.add_task(f"{family} {mesh}", total=examples, trials=0, bad=0)
            case TrialFinished(observation, verdict, _):
                self._trials += 1
                self._bad += verdict.kind.bad
                if self._task is not None:
                    new_case = observation.trial.case is not self._case
                    self._case = observation.trial.case
                    self._bar.update(self._task, advance=new_case, trials=self._trials, bad=self._bad)
            case FindingReported(finding):
                known = "known" if finding.known else "new"
                self._say(f"{known} {finding.verdict} {finding.fingerprint}: {finding.message.splitlines()[0]}")
            case PoolRestarted(mesh, reason, seconds):
                self._say(f"ranks of mesh {mesh} started anew in {seconds:.1f} s: {reason.splitlines()[0]}")
            case RunFinished():
                self._close_mesh()
                self._bar.stop()
            case _:
                pass

    def _close_mesh(self) -> None:
        if self._task is None:
            return
        task = self._bar.tasks[self._task]
        self._bar.update(self._task, completed=task.total)
        if self._bar.disable:
            seconds = time.monotonic() - self._started
            self._say(f"{task.description}: {self._trials} trials, {self._bad} failed, {seconds:.1f} s")
        self._task = None
        self._trials = self._bad = 0

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
