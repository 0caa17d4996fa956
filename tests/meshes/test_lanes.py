"""Trials in several lanes at a time have the observations that they have one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from fault_trials import trial

from verifier.core.case import Trial
from verifier.core.observation import Fate, Observation
from verifier.meshes.lanes import Lanes
from verifier.meshes.pool import Pool, PoolSet
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge

Run = Callable[[Trial], Observation]
FAULTS = (None, "kill:1", None, "raise:1", None, None)


class Scripted(PoolSet):
    """Pools without ranks."""

    def __init__(self) -> None:
        super().__init__(Pool)

    def run_alone(self, trial: Trial) -> Observation:
        return Observation(trial, Fate.COMPLETED, ())


def test_two_lanes_work_at_a_time_and_results_come_in_order() -> None:
    both = threading.Barrier(2, timeout=30)
    lanes = Lanes(Scripted, 2)

    def function(run: Run, number: int) -> int:
        run(trial("R"))
        both.wait()  # raises unless another call is under way
        return number

    assert lanes.map(function, range(8)) == list(range(8))


def test_a_failure_ends_the_other_calls_before_their_next_trial() -> None:
    lanes = Lanes(Scripted, 2)
    calls: list[int] = []

    def function(run: Run, number: int) -> None:
        calls.append(number)
        if number == 0:
            raise ValueError("number 0")
        while True:
            run(trial("R"))

    with pytest.raises(ValueError, match="number 0"):
        lanes.map(function, range(50))
    assert len(calls) < 50


@pytest.mark.ranks
def test_faults_in_one_lane_cost_the_others_nothing() -> None:
    trials = [trial("P(sum)", fault) for fault in FAULTS]

    def verdict(run: Run, trial: Trial) -> tuple[Fate, str, str | None]:
        observation = run(trial)
        return observation.fate, judge(observation, make_reference(trial.case)).kind, observation.trial.fault

    told = []
    for count in (1, 3):
        lanes = Lanes(lambda: PoolSet(lambda key: Pool(key, trial_limit=30.0)), count)
        try:
            told.append(lanes.map(verdict, trials))
        finally:
            lanes.close()
    assert told[0] == told[1]
    fates = [fate for fate, _, _ in told[0]]
    assert fates == [Fate.STUCK if f == "raise:1" else Fate.DIED if f else Fate.COMPLETED for f in FAULTS]
