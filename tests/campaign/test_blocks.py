"""A campaign tells the same, in the same order, however many trials are in flight."""

from __future__ import annotations

import os
import random
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import fault_trials
import pytest
import torch

from strategies.embedding import FAMILY as LOOKUPS
from strategies.embedding_bag import FAMILY as BAGS
from verifier.campaign import campaign as campaigns
from verifier.campaign import recorded
from verifier.campaign import request as requests
from verifier.campaign.campaign import Campaign
from verifier.campaign.investigation import Investigation
from verifier.campaign.plan import Plan
from verifier.campaign.request import Request, make_plan
from verifier.core.case import MeshSpec, Trial
from verifier.core.observation import Fate, Observation, ProcessReport, Raised
from verifier.core.verdict import Phase
from verifier.events import CaseSkipped, PoolRestarted, RunFinished, TrialFinished, TrialRepeated
from verifier.gate.baseline import Baseline
from verifier.meshes import crew
from verifier.meshes.pool import Pool, PoolSet, Stopped
from verifier.planning.trials import CasePlan, plan_case
from verifier.records.schema import RunHeader

MESH = MeshSpec((2,))
FAMILIES = {LOOKUPS.name: LOOKUPS, BAGS.name: BAGS}
SELECTED = {LOOKUPS.name: LOOKUPS.ops, BAGS.name: BAGS.ops[:2]}
REFUSED = Raised(Phase.FORWARD, "NotImplementedError", "no strategy", "propagate (_sharding_prop.py)", refusal=True)


def plan(max_examples: int = 20, **changes: Any) -> Plan:
    header = RunHeader("run", "", 0, "dev", list(FAMILIES), [str(MESH)], [], "cpu", max_examples, None, [], {}, "")
    given = Plan(
        header, FAMILIES, SELECTED, (MESH,), (torch.float64,), 0, max_examples, combinations=8, time_limit=None
    )
    return replace(given, **changes)


def told(event: Any) -> object:
    """Return what does not differ from run to run: not the tensors, which are drawn again, nor the seconds."""
    match event:
        case TrialFinished(observation, verdict, rows, position):
            # what is said of ranks that hang or die includes how long they took, and how far the others came
            return position, verdict.kind if observation.fate in (Fate.HANG, Fate.DIED) else verdict, rows
        case RunFinished(complete=complete):
            return complete
        case PoolRestarted(mesh, reason):
            return mesh, reason.partition(":")[0]
        case TrialRepeated(rows=rows, position=position):
            return position, rows
        case _ if hasattr(event, "case"):
            return event.number, event.case.op, event.digest
        case _:
            return event


class Scripted(PoolSet):
    """Pools without ranks: what becomes of a trial depends on the trial alone, and takes a random time."""

    def __init__(self, fates: Callable[[Trial], Fate]) -> None:
        super().__init__(Pool)
        self.fates = fates
        self.tried: list[Trial] = []
        self.first: set[int] = set()
        """The seeds of trials before which ranks forget earlier calls."""
        self.pause = random.Random()  # Hypothesis manages that of the module

    def of(self, _: MeshSpec) -> Scripted:  # type: ignore[override]
        return self

    def start(self) -> None:
        pass

    def run_alone(self, trial: Trial) -> Observation:
        return next(self.run([trial]))

    def run(self, trials: Sequence[Trial], *, fresh: bool = False) -> Iterator[Observation]:
        if fresh:
            self.first.add(trials[0].seed)
        for trial in trials:
            if self._stop.is_set():
                raise Stopped
            time.sleep(self.pause.choice([0.0, 0.0, 0.001]))
            self.tried.append(trial)
            fate = self.fates(trial)
            if fate is not Fate.COMPLETED and self.on_restart is not None:
                self.on_restart(MESH, f"{fate}: scripted", 0.1)
            yield Observation(trial, fate, (ProcessReport((0, 1), Phase.FORWARD, REFUSED),), "detail")


def nothing_special(_: Trial) -> Fate:
    return Fate.COMPLETED


def ends_some(trial: Trial) -> Fate:
    number = zlib.crc32(f"{trial.combination} {trial.seed}".encode()) % 40
    return {0: Fate.DIED, 1: Fate.HANG}.get(number, Fate.COMPLETED)


def slow_later(trial: Trial) -> Fate:
    return Fate.SLOW if trial.seed % 1000 > 3 and trial.seed // 1000 > 4 else Fate.COMPLETED


def campaign(jobs: int, fates: Callable[[Trial], Fate], given: Plan) -> tuple[list[Any], list[Scripted]]:
    pools = [Scripted(fates) for _ in range(jobs)]
    events: list[Any] = []
    pools[0].on_restart = lambda *restart: events.append(PoolRestarted(*restart))
    made = Campaign(given, pools[0], events.append, beside=pools[1:])
    made._investigation.investigate = lambda: None  # type: ignore[method-assign]
    made.run()
    return events, pools


@pytest.mark.parametrize("fates", [nothing_special, ends_some, slow_later])
def test_events_and_skips_do_not_depend_on_the_number_in_flight(fates: Callable[[Trial], Fate]) -> None:
    given = plan()
    events, (alone,) = campaign(1, fates, given)
    expected = [told(event) for event in events]
    fates_of_trials = Counter(event.observation.fate for event in events if isinstance(event, TrialFinished))
    assert fates_of_trials[Fate.COMPLETED] > 50
    if fates is ends_some:
        assert min(fates_of_trials[Fate.DIED], fates_of_trials[Fate.HANG]) > 2
        assert sum(isinstance(event, CaseSkipped) and "that ended" in event.reason for event in events) > 2
    for jobs in (2, 5):
        again, pools = campaign(jobs, fates, given)
        assert [told(event) for event in again] == expected
        assert set.union(*(one.first for one in pools)) >= alone.first
        if fates is nothing_special:
            assert set.union(*(one.first for one in pools)) == alone.first
        tried = [len(one.tried) for one in pools]
        assert sorted(tried)[-2] > 0
        assert sum(tried) >= len(alone.tried)  # some are tried in vain, behind one that ends the ranks


def test_a_limit_of_time_ends_all_lanes() -> None:
    def in_a_while(_: Trial) -> Fate:
        time.sleep(0.01)
        return Fate.COMPLETED

    events, pools = campaign(3, in_a_while, plan(max_examples=60, time_limit=1.0))
    numbers = [int(event.position.split("/")[0]) for event in events if isinstance(event, TrialFinished)]
    assert numbers == sorted(numbers)
    assert 0 < len(numbers) == sum(len(one.tried) for one in pools) < 3 * 60 * 8
    assert any(isinstance(event, CaseSkipped) and "time limit" in event.reason for event in events)


def test_an_error_of_a_lane_is_raised_after_what_came_before_it() -> None:
    def fates(trial: Trial) -> Fate:
        if trial.seed >= 9000:
            raise ValueError("no rank starts")
        return Fate.COMPLETED

    seen = []
    for jobs in (1, 3):
        pools = [Scripted(fates) for _ in range(jobs)]
        events: list[Any] = []
        with pytest.raises(ValueError, match="no rank starts"):
            Campaign(plan(), pools[0], events.append, beside=pools[1:]).run()
        seen.append([told(event) for event in events if isinstance(event, TrialFinished)])
    assert seen[0] == seen[1]
    assert seen[0]


def test_an_interrupt_ends_trials_in_all_lanes_and_keeps_those_before() -> None:
    events: list[Any] = []
    entered = threading.Barrier(3, timeout=30)

    class Waiting(Scripted):
        def run(self, trials: Sequence[Trial], *, fresh: bool = False) -> Iterator[Observation]:
            for number, observation in enumerate(super().run(trials, fresh=fresh)):
                yield observation
                if number == 2:
                    entered.wait()
                    assert self._stop.wait(20)
                    raise Stopped

    def emit(event: Any) -> None:
        events.append(event)
        if isinstance(event, TrialFinished) and event.position == "1/2":
            entered.wait()
            raise KeyboardInterrupt

    pools = [Waiting(nothing_special) for _ in range(2)]
    started = time.monotonic()
    Campaign(plan(), pools[0], emit, beside=pools[1:]).run()
    assert time.monotonic() - started < 10
    assert [event.position for event in events if isinstance(event, TrialFinished)] == ["1/1", "1/2"]
    assert events[-2].reason == "interrupted"
    assert not events[-1].complete
    assert not [thread for thread in threading.enumerate() if thread.name == "lane"]


@pytest.mark.parametrize(
    ("jobs", "message"), [(0, "--jobs 0: must be from 1 to 64"), (65, "--jobs 65: must be from 1 to 64")]
)
def test_a_number_of_jobs_that_cannot_be_is_refused(jobs: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(Request(["embedding"], ["2"], jobs=jobs), Baseline())


def test_what_is_recorded_of_a_request_does_not_depend_on_the_number_of_jobs() -> None:
    one, three = (make_plan(Request(["embedding"], ["2"], jobs=jobs), Baseline()) for jobs in (1, 3))
    assert (one.jobs, three.jobs) == (1, 3)
    assert one.header.request == three.header.request


def test_by_default_there_is_a_job_for_each_core_for_which_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    for gibibytes, ranks, jobs in ((64, "4", 8), (3, "4", 3), (3, "2", 6), (0, "2", 1)):
        monkeypatch.setattr(requests, "available_memory", lambda size=gibibytes: size << 30)
        assert make_plan(Request(["embedding"], [ranks]), Baseline()).jobs == jobs


# ---------------------------------------------------------------------------------------------------------- real ranks
FAULTS = {1001: "raise:0", 2003: "hang:1", 7001: "kill:1"}
"""The faults of trials, by seed: 2003 is the fourth trial of the second case."""


@pytest.mark.ranks
def test_faults_in_one_lane_cost_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_faults(*args: Any) -> CasePlan:
        made = plan_case(*args)
        return replace(made, trials=tuple(replace(trial, fault=FAULTS.get(trial.seed)) for trial in made.trials))

    monkeypatch.setattr(campaigns, "plan_case", with_faults)
    monkeypatch.setattr(Investigation, "investigate", lambda _: None)
    monkeypatch.setattr(crew, "PAUSE_LIMIT", 0.3)
    given = plan(max_examples=9, selected={LOOKUPS.name: LOOKUPS.ops}, trial_limit=1.0)
    seen = []
    for jobs in (1, 2):
        events: list[Any] = []
        recorded.campaign_on_ranks(replace(given, jobs=jobs), events.append).run()
        seen.append([told(event) for event in events])
    assert seen[0] == seen[1]
    restarts = [event[1] for event in seen[0] if isinstance(event, tuple) and event[0] == MESH]
    assert restarts == ["stuck", "hang", "died", "died"]  # a trial in which a rank was killed is run once more


@pytest.mark.ranks
def test_a_trial_that_hangs_ends_when_another_thread_stops_the_pools() -> None:
    pools, ended = PoolSet(Pool), list[BaseException]()

    def hang() -> None:
        with pytest.raises(Stopped) as caught:
            pools.run_alone(fault_trials.trial("R", "hang:1"))
        ended.append(caught.value)

    thread = threading.Thread(target=hang)
    try:
        pools.of(MESH).start()
        thread.start()
        time.sleep(0.3)
        assert thread.is_alive()
        pools.stop()
        thread.join(5.0)
        assert ended
    finally:
        pools.close()
