"""Shows a rule check while it goes on."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from verifier.core.wording import plural
from verifier.records.schema import OpRulesRecord
from verifier.rules.campaign.request import RulesPlan

__all__ = ["RulesProgress"]


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
