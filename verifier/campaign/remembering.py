"""Pools that remember: a resumed campaign is the same campaign, whose first trials are answered from its past."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from verifier.campaign.history import Answer, Past
from verifier.core.arguments import combination_rows
from verifier.core.case import MeshSpec, Trial
from verifier.core.observation import Observation
from verifier.events import Listener, TrialRepeated
from verifier.findings.failures import Runner

__all__ = ["Pools", "RememberingPool", "alone_on"]


class OnePool(Protocol):
    """Runs trials on one number of ranks, as :class:`verifier.meshes.pool.Pool` does."""

    def start(self) -> None: ...

    def run(self, trials: Sequence[Trial], *, fresh: bool = False) -> Iterator[Observation]: ...


class Pools(Protocol):
    """The pools of a campaign, as a :class:`verifier.meshes.pool.PoolSet`."""

    def of(self, mesh: MeshSpec) -> OnePool: ...

    def close(self) -> None: ...


def alone_on(pools: Pools) -> Runner:
    """Return what runs one trial on ``pools``, with DTensor's caches empty."""

    def run(trial: Trial) -> Observation:
        (observation,) = pools.of(trial.mesh).run([trial], fresh=True)
        return observation

    return run


class RememberingPool:
    """Runs the trials of a campaign: those in its past are answered from there, the others run on ``pools``."""

    def __init__(self, pools: Pools, past: Past, emit: Listener) -> None:
        self._pools, self._past, self._emit = pools, past, emit
        self.alone = alone_on(pools)

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
            yield Answer(position, self.alone(trial))

    def repeat(self, position: str, trial: Trial) -> None:
        """Announce that a trial is run again."""
        self._emit(TrialRepeated(trial, combination_rows(trial.case, trial.combination), position))
