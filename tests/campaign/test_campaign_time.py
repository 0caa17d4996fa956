"""What a time limit leaves to each mesh, family and op, told by a clock that the trials move; and what kills do."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis.strategies import nothing

from strategies.embedding import FAMILY as LOOKUPS
from strategies.embedding_bag import FAMILY as BAGS
from verifier.campaign import campaign, trying
from verifier.campaign.campaign import Campaign
from verifier.campaign.history import Past, case_digest
from verifier.campaign.plan import Plan
from verifier.core.case import MeshSpec, Trial
from verifier.core.observation import Fate, Observation, ProcessReport
from verifier.core.verdict import Phase, VerdictKind
from verifier.events import CaseSkipped, CaseStarted, RunFinished, TrialFinished, TrialRepeated
from verifier.planning.families import DrawContext, Family
from verifier.records.schema import RunHeader

MESHES = (MeshSpec((2,)), MeshSpec((2, 2)))
FAMILIES = {LOOKUPS.name: LOOKUPS, BAGS.name: BAGS}
SECONDS = 2.0
"""What a trial takes."""


class Clock:
    """Stands for ``time.monotonic``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Slow:
    """Stands for pools whose ranks find nothing wrong with anything, and take their time."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.started = 0

    def of(self, _: MeshSpec) -> Slow:
        return self

    def start(self) -> None:
        self.started += 1

    def close(self) -> None:
        pass

    def run(self, trials: Sequence[Trial], *, fresh: bool = False) -> Iterator[Observation]:
        for trial in trials:
            yield self.run_alone(trial)

    def run_alone(self, trial: Trial) -> Observation:
        self.clock.now += SECONDS
        return self.observe(trial)

    def observe(self, trial: Trial) -> Observation:
        reports = tuple(ProcessReport((rank,), Phase.DONE) for rank in range(trial.mesh.world_size))
        return Observation(trial, Fate.COMPLETED, reports)


class Dying(Slow):
    """Stands for a pool of which a rank ends in the third trial, so many times."""

    def __init__(self, clock: Clock, ending: signal.Signals, times: int) -> None:
        super().__init__(clock)
        self.ending, self.times = ending, times
        self.tried: list[Trial] = []

    def observe(self, trial: Trial) -> Observation:
        self.tried.append(trial)
        if self.times and len(self.tried) > 2 and trial is self.tried[2]:
            self.times -= 1
            detail = f"rank 0 ended with signal {self.ending.name} in forward"
            return Observation(trial, Fate.DIED, (None,) * trial.mesh.world_size, detail, signals=(self.ending,))
        return super().observe(trial)


class Planning(Slow):
    """Stands for a pool whose ranks compute too long for every backward pass of a lookup on the first mesh."""

    def observe(self, trial: Trial) -> Observation:
        if trial.case.family == LOOKUPS.name and trial.mesh == MESHES[0] and trial.cotangents:
            return Observation(trial, Fate.SLOW, (None,) * 2, "after 50 s: ranks 0, 1 in backward")
        return super().observe(trial)


class Hanging(Slow):
    """Stands for a pool whose ranks wait for each other in every backward pass of a lookup on the first mesh."""

    def observe(self, trial: Trial) -> Observation:
        if trial.case.family == LOOKUPS.name and trial.mesh == MESHES[0] and trial.cotangents:
            return Observation(trial, Fate.HANG, (None,) * 2, "after 10 s: ranks 0, 1 in backward")
        return super().observe(trial)


def events_of(
    time_limit: float | None,
    max_examples: int = 30,
    past: Past | None = None,
    investigate: Callable[[Campaign, Clock, Slow], None] = lambda *_: None,
    make_pool: Callable[[Clock], Slow] = Slow,
    replay_known: Callable[[Campaign, Clock, Slow], None] = lambda *_: None,
    imports: Sequence[str] = (),
) -> list[Any]:
    """Return what a campaign tells; ``investigate`` takes the place of minimising what failed on a mesh.

    ``replay_known`` takes the place of trying the known findings again.
    """
    clock = Clock()
    pool = make_pool(clock)
    header = RunHeader(
        "run", "", 0, "dev", list(FAMILIES), [*map(str, MESHES)], [], "cpu", 3, time_limit, [*imports], {}, ""
    )
    selected = {LOOKUPS.name: LOOKUPS.ops, BAGS.name: BAGS.ops[:2]}
    plan = Plan(
        header, FAMILIES, selected, MESHES, (torch.float64,), seed=0, max_examples=max_examples, combinations=64,
        time_limit=time_limit,
    )  # fmt: skip
    events: list[Any] = []
    made = Campaign(plan, pool, events.append, past, clock=clock)  # type: ignore[arg-type]
    # that a trial without outputs fails is no finding
    made._investigation.investigate = lambda: investigate(made, clock, pool)  # type: ignore[method-assign]
    made._investigation.replay_known = lambda: replay_known(made, clock, pool)  # type: ignore[method-assign]
    made.run()
    return events


def trials_by_unit(events: Sequence[Any]) -> Counter[tuple[str, str]]:
    """Return how many trials each op of bags, and the lookups together, got on each mesh."""
    found: Counter[tuple[str, str]] = Counter()
    for event in events:
        if isinstance(event, TrialFinished):
            trial = event.observation.trial
            found[str(trial.mesh), LOOKUPS.name if trial.case.family == LOOKUPS.name else trial.case.op] += 1
    return found


def test_each_mesh_family_and_op_gets_its_part() -> None:
    events = events_of(3600.0)
    trials = trials_by_unit(events)
    assert len(trials) == 6  # two meshes, lookups and two ops of bags
    (finished,) = [event for event in events if isinstance(event, RunFinished)]
    assert 0.7 * 3600 < finished.seconds < 3600
    on_first = [count for (mesh, _), count in trials.items() if mesh == "2"]
    part = (1 - campaign.RESERVED_FOR_FINDINGS) * 3600 / len(MESHES) / 3 / SECONDS
    # each looks at the clock after so many trials; what one takes too much is missing in those after it
    assert all(abs(count - part) <= trying.LOOK_AT_CLOCK for count in on_first), (part, trials)


def test_each_mesh_has_its_part_for_findings_too() -> None:
    seen: list[tuple[float, float, int]] = []

    def investigate(made: Campaign, clock: Clock, pool: Slow) -> None:
        seen.append((clock.now - 1000.0, made._investigation.until - 1000.0, pool.started))
        clock.now += 700.0  # more than the first mesh has left

    events_of(3600.0, investigate=investigate)
    (explored, first, _), (again, second, _) = seen
    overrun = trying.LOOK_AT_CLOCK * SECONDS
    assert (first, second) == (1800.0, 3600.0)
    assert 0.7 * 1800 <= explored <= 0.7 * 1800 + overrun
    begun = explored + 700.0
    assert 0.7 * (3600 - begun) <= again - begun <= 0.7 * (3600 - begun) + overrun


def test_no_ranks_are_started_for_a_mesh_that_has_no_time() -> None:
    seen: list[int] = []

    def investigate(_: Campaign, clock: Clock, pool: Slow) -> None:
        seen.append(pool.started)
        clock.now += 400.0

    events = events_of(400.0, investigate=investigate)
    assert seen == [len(FAMILIES)] * len(MESHES)  # once for each family on the first mesh
    (finished,) = [event for event in events if isinstance(event, RunFinished)]
    assert not finished.complete


def test_known_findings_leave_half_of_the_time() -> None:
    def replay_known(made: Campaign, clock: Clock, _: Slow) -> None:
        assert made._investigation.until - clock.now == 1800.0
        clock.now += 1800.0

    events = events_of(3600.0, replay_known=replay_known)
    trials = trials_by_unit(events)
    assert len(trials) == 6
    assert all(
        abs(count - 0.7 * 1800 / 6 / SECONDS) <= trying.LOOK_AT_CLOCK for (m, _), count in trials.items() if m == "2"
    )


def test_what_there_is_no_time_for_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """To draw for an op of the database takes seconds, and a glob may name hundreds."""
    drawn: list[str] = []
    draw = Campaign._draw

    def noted(made: Campaign, family: Family, context: DrawContext, until: float, first_until: float) -> int:
        drawn.append(f"{'+'.join(context.ops)} on {context.mesh}")
        return draw(made, family, context, until, first_until)

    monkeypatch.setattr(Campaign, "_draw", noted)

    def investigate(made: Campaign, clock: Clock, _: Slow) -> None:
        clock.now = max(clock.now, made._until)  # all that the second mesh would have had

    events = events_of(3600.0, investigate=investigate)
    assert drawn
    assert {what.rpartition(" on ")[-1] for what in drawn} == {"2"}
    left = {e.what: e.count for e in events if isinstance(e, CaseSkipped) and e.what.endswith("on mesh 2x2")}
    assert left == {"cases on mesh 2x2": 30} | {f"cases of {op} on mesh 2x2": 30 for op in BAGS.ops[:2]}


def test_an_op_without_cases_has_no_cases_in_a_resumed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = type(BAGS).cases

    def none_of_the_first(family: Family, context: DrawContext) -> Any:
        return nothing() if context.ops == BAGS.ops[:1] else cases(family, context)  # type: ignore[arg-type]

    monkeypatch.setattr(type(BAGS), "cases", none_of_the_first)
    begun = [event for event in events_of(None, max_examples=2) if isinstance(event, CaseStarted)]
    past = Past(resumed=True, cases={event.number: event.digest for event in begun[:-1]})
    events = events_of(None, max_examples=2, past=past)
    assert not [event for event in events if isinstance(event, CaseSkipped) and event.what.startswith("cases of")]


def test_an_op_that_takes_its_part_to_be_drawn_gets_its_first_case(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: list[Clock] = []
    left_out = type(BAGS).left_out

    def slowly(family: Family, context: DrawContext) -> Sequence[tuple[str, str]]:
        clock[0].now += 400.0  # of the 280 that are its part, and of the 560 that there are
        return left_out(family, context)

    def replay_known(_: Campaign, now: Clock, __: Slow) -> None:
        clock.append(now)

    monkeypatch.setattr(type(BAGS), "left_out", slowly)
    trials = trials_by_unit(events_of(2400.0, replay_known=replay_known))
    assert trials["2", BAGS.ops[0]] == trying.LOOK_AT_CLOCK
    assert not trials["2", BAGS.ops[1]]  # now the mesh has no time either


def test_what_is_not_drawn_has_its_numbers() -> None:
    """Else what a resumed run draws would not be what the journal has."""

    def cases(events: Sequence[Any]) -> dict[int, str]:  # whatever steering chooses of their combinations
        begun = [event for event in events if isinstance(event, CaseStarted)]
        return {event.number: case_digest(event.case, [], b"") for event in begun}

    whole = cases(events_of(None, max_examples=4))

    def replay_known(_: Campaign, clock: Clock, __: Slow) -> None:
        clock.now += 2399.0

    def investigate(made: Campaign, clock: Clock, _: Slow) -> None:
        made._until = clock.now + 600.0  # the second mesh has time again

    begun = cases(events_of(2400.0, max_examples=4, replay_known=replay_known, investigate=investigate))
    assert 0 < len(begun) < len(whole)
    assert min(set(whole) - set(begun)) < max(begun)
    assert begun.items() <= whole.items()


def test_the_clock_ends_a_case_before_its_last_trial() -> None:
    events = events_of(400.0)
    trials = trials_by_unit(events)
    assert all(count < 64 for (_, unit), count in trials.items() if unit != LOOKUPS.name), trials
    cut = [e for e in events if isinstance(e, CaseSkipped) and e.reason == campaign.OUT_OF_TIME]
    assert {"aten._embedding_bag.default on mesh 2", "aten._embedding_bag.default on mesh 2x2"} <= {e.what for e in cut}
    assert all(event.count > 0 for event in cut)


def test_without_a_limit_the_clock_ends_nothing() -> None:
    events = events_of(None, max_examples=2)
    assert not [e for e in events if isinstance(e, CaseSkipped) and e.reason == campaign.OUT_OF_TIME]
    assert min(trials_by_unit(events).values()) >= 64


def test_a_case_that_the_clock_ended_is_not_taken_up_again() -> None:
    first, second, *_ = [e for e in events_of(None, max_examples=2) if isinstance(e, CaseStarted)]
    # both had been begun, so that the first one was cut short, and the second one is what was in flight
    past = Past(resumed=True, cases={first.number: first.digest, second.number: second.digest})
    events = events_of(3600.0, max_examples=2, past=past)
    positions = {event.position.split("/")[0] for event in events if isinstance(event, TrialFinished)}
    assert "1" not in positions
    assert "2" in positions
    assert [event.position for event in events if isinstance(event, TrialRepeated)] == ["2/1"]
    assert [e.count for e in events if isinstance(e, CaseSkipped) and e.reason == campaign.OUT_OF_TIME] == [
        first.trials
    ]


def test_an_op_whose_time_was_over_gets_none_from_those_after_it() -> None:
    """Else the numbers of its cases would stand in the journal behind those of the next op."""
    begun = [event for event in events_of(400.0) if isinstance(event, CaseStarted)]
    last = next(event for event in begun if event.case.op == BAGS.ops[1])  # as if killed in its first case
    kept = {event.number: event.digest for event in begun if event.number <= last.number}
    assert len(kept) < last.number  # the ops before it did not come to their last case
    events = events_of(3600.0, past=Past(resumed=True, cases=kept))
    again = [event.number for event in events if isinstance(event, CaseStarted)]
    assert again == sorted(again)
    assert [number for number in again if number <= last.number] == list(kept)
    assert again[-1] > last.number


# ---------------------------------------------------------------------------------------------------------------- kills
@pytest.mark.parametrize(
    ("ending", "times", "fates", "repeated"),
    [
        (signal.SIGKILL, 1, [Fate.COMPLETED], 1),  # by a person, or by the kernel
        (signal.SIGKILL, 2, [Fate.DIED], 1),  # by what the call does
        (signal.SIGSEGV, 1, [Fate.DIED], 0),
    ],
)
def test_a_trial_in_which_a_rank_is_killed_is_tried_once_more(
    ending: signal.Signals, times: int, fates: list[Fate], repeated: int
) -> None:
    pools: list[Dying] = []

    def make_pool(clock: Clock) -> Dying:
        pools.append(Dying(clock, ending, times))
        return pools[0]

    events = events_of(None, max_examples=2, make_pool=make_pool)
    third = pools[0].tried[2]
    finished = [event.observation for event in events if isinstance(event, TrialFinished)]
    assert [observation.fate for observation in finished if observation.trial is third] == fates
    assert [event.trial for event in events if isinstance(event, TrialRepeated)] == [third] * repeated
    others = {observation.fate for observation in finished if observation.trial is not third}
    assert others == {Fate.COMPLETED}
    assert len({id(observation.trial) for observation in finished}) == len(finished)


def test_of_what_ranks_compute_too_long_for_little_is_tried() -> None:
    events = events_of(None, 4, make_pool=Planning)
    slow: Counter[str] = Counter()
    for event in events:
        if isinstance(event, TrialFinished) and event.observation.fate is Fate.SLOW:
            assert event.verdict.kind is VerdictKind.INCONCLUSIVE
            assert "still computed" in event.verdict.message
            assert event.verdict.detail == "after 50 s: ranks 0, 1 in backward"
            slow[event.observation.trial.case.op] += 1
    assert slow
    assert set(slow.values()) == {2}
    reason = "ranks computed too long for the 2 combinations before"
    skipped = [event for event in events if isinstance(event, CaseSkipped) and event.reason == reason]
    assert {event.what for event in skipped} == {f"{op} on mesh 2" for op in slow}
    trials = [event for event in events if isinstance(event, TrialFinished)]
    undisturbed = [event for event in events_of(None, 4) if isinstance(event, TrialFinished)]
    assert len(trials) + sum(event.count for event in skipped) == len(undisturbed)
    assert any(event.observation.trial.case.op in slow for event in trials if event.observation.fate is Fate.COMPLETED)


def test_after_three_hangs_of_an_op_on_a_mesh_no_more_of_it_is_waited_for() -> None:
    """A rule that decides by rank hangs at almost every combination, and each takes the whole time limit."""
    events = events_of(None, 4, make_pool=Hanging, imports=["my_rules.py"])
    trials = [event for event in events if isinstance(event, TrialFinished)]
    hung = Counter(event.observation.trial.case.op for event in trials if event.observation.fate is Fate.HANG)
    assert hung
    assert max(hung.values()) == 3
    given_up = {op for op, count in hung.items() if count == 3}
    reason = "3 combinations of this op hung before"
    skipped = [event for event in events if isinstance(event, CaseSkipped) and event.reason == reason]
    assert {event.what for event in skipped} == {f"{op} on mesh {MESHES[0]}" for op in given_up}
    elsewhere = {event.observation.trial.case.op for event in trials if event.observation.trial.mesh != MESHES[0]}
    assert given_up <= elsewhere
    of_torch = [event for event in events_of(None, 4, make_pool=Hanging) if isinstance(event, CaseSkipped)]
    assert all(event.reason != reason for event in of_torch)
