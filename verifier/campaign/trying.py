"""Tries the planned cases of a block, one after the other, on one set of pools.

A block is some consecutive cases, before which the ranks forget earlier calls. So its outcomes depend on its cases and
on what trials have cost before, and not on which pools run it or on what these ran before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from verifier.campaign.costs import Costs
from verifier.campaign.history import Answer, Past, case_position
from verifier.core.arguments import combination_rows
from verifier.core.case import Trial
from verifier.events import CaseSkipped, CaseStarted, Event, TrialRepeated
from verifier.findings.failures import Drawn
from verifier.meshes.pool import PoolSet
from verifier.oracle.reference import Reference
from verifier.records.schema import OUT_OF_TIME

__all__ = ["LOOK_AT_CLOCK", "BlockRun", "PlannedCase"]

LOOK_AT_CLOCK = 16
"""Number of trials between two looks at the clock, under a time limit."""

_Placed = tuple[str, Trial]
"""A trial with its position."""


@dataclass(frozen=True)
class PlannedCase:
    """A case as it was drawn, with its trials.

    Parameters
    ----------
    announced
        Events that come before those of the trials.
    until
        When to stop, by the clock of the campaign.
    at_once
        Whether the case is begun even if the time is over.
    """

    started: CaseStarted
    trials: tuple[Trial, ...]
    reference: Reference
    drawn: Drawn
    announced: tuple[Event, ...]
    until: float
    at_once: bool

    @property
    def placed(self) -> Iterator[_Placed]:
        """Yield each trial with its position."""
        for index, trial in enumerate(self.trials, 1):
            yield case_position(self.started.number, index), trial

    def skipped(self, reason: str, count: int) -> CaseSkipped:
        """Return the event that ``count`` trials are not tried."""
        what = f"{self.started.case.op} on mesh {self.started.mesh}"
        return CaseSkipped(what, reason, count, recalled=self.started.recalled)


class BlockRun:
    """Tries the cases of a block.

    Parameters
    ----------
    past
        Answers the trials that were run before.
    costs
        What trials have cost before the block; the run notes its own trials there.
    """

    def __init__(self, pools: PoolSet, past: Past, costs: Costs, clock: Callable[[], float]) -> None:
        self._pools, self._past, self._costs, self._clock = pools, past, costs, clock
        self._fresh = True

    def of(self, case: PlannedCase) -> Iterator[Event | Answer]:
        """Yield what comes of a case: answers, and events about trials that are skipped or repeated.

        Answers from the past come first.
        """
        known: list[Answer] = []
        waiting: list[_Placed] = []
        for position, trial in case.placed:
            if (answer := self._past.result(position, trial)) is not None:
                known.append(answer)
            elif reason := self._costs.unaffordable(trial):
                yield case.skipped(reason, 1)
            else:
                waiting.append((position, trial))
        for answer in known:
            yield self._noted(answer)
        if not waiting:
            return
        if reason := self._why_not_begun(case, waiting[0][1]):
            yield case.skipped(reason, len(waiting))
            return
        if case.started.recalled:  # the run was cut short in this trial
            yield _repeated(*waiting[0])
        yield from self._try(case, waiting)

    def _why_not_begun(self, case: PlannedCase, first: Trial) -> str:
        late = not (case.at_once or case.started.recalled) and self._clock() >= case.until
        ended = self._past.why_ended(case.started.number)
        return self._costs.given_up(first) or ended or (OUT_OF_TIME if late else "")

    def _try(self, case: PlannedCase, waiting: list[_Placed]) -> Iterator[Event | Answer]:
        """Run the trials of a case until the time is over or the op is given up."""
        at_once = len(waiting) if case.until == float("inf") else LOOK_AT_CLOCK
        while waiting:
            now, rest = waiting[:at_once], waiting[at_once:]
            answered: set[str] = set()
            reason = ""
            for told in self._run(now):
                yield told
                if isinstance(told, Answer):
                    answered.add(told.position)
                    if reason := self._costs.given_up(told.observation.trial):
                        break
            waiting = [one for one in now if one[0] not in answered] + rest
            if waiting and (reason := reason or (OUT_OF_TIME if self._clock() >= case.until else "")):
                yield case.skipped(reason, len(waiting))
                return

    def _run(self, trials: Sequence[_Placed]) -> Iterator[Event | Answer]:
        """Run trials of one mesh. A trial in which a rank was killed is run once more, after the others."""
        fresh, self._fresh = self._fresh, False
        killed: list[_Placed] = []
        observations = self._pools.of(trials[0][1].mesh).run([trial for _, trial in trials], fresh=fresh)
        for (position, trial), observation in zip(trials, observations, strict=True):
            if observation.killed:
                killed.append((position, trial))
            else:
                yield self._noted(Answer(position, observation))
        for position, trial in killed:
            yield _repeated(position, trial)
            yield self._noted(Answer(position, self._pools.run_alone(trial)))

    def _noted(self, answer: Answer) -> Answer:
        self._costs.note(answer.observation)
        return answer


def _repeated(position: str, trial: Trial) -> TrialRepeated:
    return TrialRepeated(trial, combination_rows(trial.case, trial.combination), position)
