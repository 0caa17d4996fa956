"""Pools that remember: a resumed campaign is the same campaign, whose first trials are answered from its past."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verifier.campaign.history import Answer, Past
from verifier.core.arguments import combination_rows
from verifier.core.case import Trial
from verifier.events import Listener, TrialRepeated
from verifier.meshes.pool import PoolSet

__all__ = ["RememberingPool"]


class RememberingPool:
    """Runs the trials of a campaign: those in its past are answered from there, the others run on ``pools``."""

    def __init__(self, pools: PoolSet, past: Past, emit: Listener) -> None:
        self._pools, self._past, self._emit = pools, past, emit

    def run(self, trials: Sequence[tuple[str, Trial]]) -> Iterator[Answer]:
        """Yield the answer to each of ``trials``, which are named by their positions and are of one mesh.

        Answers from the past come first. A trial in which a rank was killed is run once more, after the others.
        """
        unknown: list[tuple[str, Trial]] = []
        for position, trial in trials:
            if (answer := self._past.result(position, trial)) is not None:
                yield answer
            else:
                unknown.append((position, trial))
        if not unknown:
            return
        killed: list[tuple[str, Trial]] = []
        observations = self._pools.of(unknown[0][1].mesh).run([trial for _, trial in unknown])
        for (position, trial), observation in zip(unknown, observations, strict=True):
            if observation.killed:
                killed.append((position, trial))
            else:
                yield Answer(position, observation)
        for position, trial in killed:
            self.repeat(position, trial)
            yield Answer(position, self._pools.run_alone(trial))

    def repeat(self, position: str, trial: Trial) -> None:
        """Announce that a trial is run again."""
        self._emit(TrialRepeated(trial, combination_rows(trial.case, trial.combination), position))
