"""What becomes of failures and of known findings, with ranks that are none and a clock that they move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from run_factory import make_header

from verifier.campaign import investigation
from verifier.campaign.history import Answer, Past
from verifier.campaign.investigation import Investigation
from verifier.campaign.outcomes import Outcomes
from verifier.campaign.plan import Plan
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Difference, DifferenceKind, Fate, Observation, ProcessReport
from verifier.core.verdict import Phase
from verifier.events import CaseSkipped, Event, FindingReported, RunStarted
from verifier.findings import record
from verifier.findings.failures import Failure
from verifier.findings.grouping import group_key
from verifier.gate.baseline import Baseline
from verifier.gate.entries import BaselineEntry
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.placements.parsing import parse_placements
from verifier.records.schema import FAILS, OUT_OF_TIME, FindingRecord
from verifier.records.values import trial_record
from verifier.runs.graph import RedistributionGraph
from verifier.runs.summary import Summary

HEADER = make_header(device="cpu")
FAMILY = SimpleNamespace(
    name="family", shrinks=False, covers=lambda ops, op: op in ops, likely_cause=lambda trial, verdict: ""
)


class Clock:
    """Stands for ``time.monotonic``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _scripts_fail_as_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for processes that run the scripts of findings."""
    monkeypatch.setattr(record, "run_script", lambda source: (FAILS, ""))


@pytest.fixture
def clock() -> Clock:
    return Clock()


def trial_of(placement: str, dtype: torch.dtype = torch.float64, ranks: int = 2, op: str = "neg") -> Trial:
    case = OpCase(f"aten.{op}.default", f"torch.{op}", (torch.tensor([1.0, 2.0], dtype=dtype),), family=FAMILY.name)
    return Trial(case, MeshSpec((ranks,)), (parse_placements(placement),))


def observed(trial: Trial, *differences: Difference) -> Observation:
    reports = [ProcessReport((rank,), Phase.DONE, differences=differences) for rank in range(trial.mesh.world_size)]
    return Observation(trial, Fate.COMPLETED, tuple(reports))


def wrong_where_cut(trial: Trial) -> Observation:
    """Return what ranks say of an op whose only wrong rule is that for shards."""
    difference = Difference(DifferenceKind.VALUE, Phase.FORWARD, "output", 0, "1.0", "-1.0", (0,))
    cut = any(placement.is_shard() for placement in trial.combination[0])
    return observed(trial, *(difference,) * cut)


class Investigated:
    """An investigation, what it tells, and what it has tried."""

    def __init__(
        self,
        clock: Clock,
        run: Callable[[Trial], Observation] = wrong_where_cut,
        baseline: Baseline | None = None,
        past: Past | None = None,
        meshes: Sequence[MeshSpec] = (),
    ) -> None:
        self.told: list[Event] = []
        self.tried: list[Trial] = []
        ops = ("aten.neg.default", "aten.abs.default")
        plan = Plan(
            HEADER, {FAMILY.name: FAMILY}, {FAMILY.name: ops}, tuple(meshes), (), seed=0, max_examples=1,  # type: ignore[dict-item]
            combinations=1, time_limit=None, imports=(), baseline=baseline or Baseline(),
            meshes_named=bool(meshes),
        )  # fmt: skip
        self.outcomes = Outcomes(self.told.append)

        def run_one(trial: Trial) -> Observation:
            self.tried.append(trial)
            return run(trial)

        self.it = Investigation(plan, past or Past(), self.outcomes, run_one, self.told.append, clock=clock)

    def see(self, *observations: Observation) -> None:
        """Have trials come out so while a mesh is explored."""
        for observation in observations:
            self.outcomes.take(Answer("", observation))

    @property
    def reported(self) -> list[FindingReported]:
        return [event for event in self.told if isinstance(event, FindingReported)]

    @property
    def findings(self) -> list[FindingRecord]:
        """The findings as the record of the run has them."""
        summary = Summary(RedistributionGraph())
        for event in (RunStarted(HEADER), *self.reported):
            summary(event)
        return summary.record().findings


# ------------------------------------------------------------------------------------------------------ what is counted
def seen_on_two_meshes(clock: Clock, past: Past | None = None) -> Investigated:
    """Return what is made of failures of two dtypes, which turn out to be one finding on the first mesh."""
    one = Investigated(clock, past=past)
    narrow, wide = trial_of("S(0)", torch.bfloat16), trial_of("S(0)")
    one.see(*map(wrong_where_cut, (narrow, wide, wide)))
    one.it.investigate()
    one.see(*(wrong_where_cut(trial_of("S(0)", dtype, ranks=3)) for dtype in (torch.bfloat16, torch.float64)))
    one.it.investigate()
    one.it.settle()
    return one


def test_every_trial_that_failed_in_the_way_of_a_finding_is_counted(clock: Clock) -> None:
    one = seen_on_two_meshes(clock)
    assert len(one.outcomes.failures.groups) == 2
    (finding,) = one.findings
    assert finding.occurrences == 5
    assert any(where.startswith("3: ") for where in finding.also)
    assert finding.groups == sorted(one.outcomes.failures.groups)


def test_a_run_that_was_resumed_counts_as_if_it_had_not_been(clock: Clock) -> None:
    one = seen_on_two_meshes(clock)
    first = one.reported[0]
    again = seen_on_two_meshes(clock, Past(resumed=True, groups={first.group: first}))
    assert again.tried == []
    assert again.findings == one.findings


# ---------------------------------------------------------------------------------------------------- what time is left
@pytest.mark.parametrize("left", [60.0, -1.0])
def test_failures_are_made_small_while_there_is_time(clock: Clock, left: float) -> None:
    one = Investigated(clock)
    one.see(wrong_where_cut(trial_of("S(0)", torch.bfloat16)))
    one.it.until = clock.now + left
    one.it.investigate()
    (finding,) = one.findings
    assert (finding.minimised, finding.dtype) == ((True, "float") if left > 0 else (False, "half"))
    assert finding.confirmed.text == "confirmed on gloo, 2 ranks"
    assert any(isinstance(event, CaseSkipped) for event in one.told) == (left < 0)


def test_what_hangs_is_tried_again_only_while_there_is_time_and_to_confirm_it(clock: Clock) -> None:
    failing = trial_of("S(0)", torch.bfloat16, ranks=4)

    def hangs(trial: Trial) -> Observation:
        clock.now += investigation.MINIMISING_LIMIT + 1
        reached = Phase.FORWARD if trial == failing else Phase.GATHER
        return Observation(trial, Fate.HANG, (ProcessReport((0,), reached), None, None, None))

    one = Investigated(clock, hangs)
    one.see(hangs(failing))
    one.it.investigate()
    assert len(one.tried) == 2
    assert one.tried[-1] == failing
    assert [finding.confirmed.text for finding in one.findings] == ["confirmed on gloo, 4 ranks"]


# ------------------------------------------------------------------------------------------------------- known findings
def entry_of(name: str, trial: Trial) -> BaselineEntry:
    stored = msgspec.json.encode(trial_record(trial)).decode()
    return BaselineEntry(
        fingerprint=name, op=trial.case.op, family=FAMILY.name, verdict="WRONG_VALUE", rule="", mesh=str(trial.mesh),
        summary="", reason="known", torch=(), expires=date.max, replay=stored,
    )  # fmt: skip


def replayed(clock: Clock, seconds: float, entries: Sequence[BaselineEntry]) -> tuple[Investigated, list[Any]]:
    def slow(trial: Trial) -> Observation:
        clock.now += 10.0
        return observed(trial)

    one = Investigated(clock, slow, Baseline(tuple(entries)))
    one.it.until = clock.now + seconds
    one.it.replay_known()
    return one, [(known.fingerprint, known.status, known.detail) for known in one.it.known]


def test_known_findings_are_replayed_by_ranks_and_reported_as_they_are_listed(clock: Clock) -> None:
    entries = [entry_of(name, trial_of("S(0)", ranks=ranks)) for name, ranks in (("a", 4), ("b", 2), ("c", 4))]
    one, known = replayed(clock, 60.0, entries)
    assert [trial.mesh.world_size for trial in one.tried] == [2, 4, 4]
    assert known == [(name, "fixed", "passed when it was run again") for name in ("a", "b", "c")]


def test_entries_on_meshes_that_were_not_asked_for_are_left_out(clock: Clock) -> None:
    entries = [entry_of(name, trial_of("S(0)", ranks=ranks)) for name, ranks in (("a", 4), ("b", 2))]
    one = Investigated(clock, baseline=Baseline(tuple(entries)), meshes=[MeshSpec((2,))])
    one.it.replay_known()
    one.it.settle()
    assert [trial.mesh.world_size for trial in one.tried] == [2]
    said = {known.fingerprint: (known.status, known.detail, known.selected) for known in one.it.known}
    assert said == {"a": ("untested", "mesh 4 is not selected", False), "b": ("known", "in 1 trial", True)}


def test_an_entry_on_another_mesh_explains_failures_that_look_like_it_once_its_own_trial_fails_again(
    clock: Clock,
) -> None:
    failing = wrong_where_cut(trial_of("S(0)"))
    looks = group_key(Failure(failing.trial, failing, judge(failing, make_reference(failing.trial.case))))
    entry = replace(entry_of("a", trial_of("S(0)", ranks=4)), groups=(looks,))
    for run, status, found in ((wrong_where_cut, "known", [True]), (observed, "fixed", [False])):
        one = Investigated(clock, run, Baseline((entry,)), meshes=[MeshSpec((2,))])
        one.it.replay_known()
        assert one.tried == []
        one.see(failing)
        one.it.investigate()
        one.it.settle()
        assert one.tried[0].mesh.world_size == 4
        assert [(known.fingerprint, known.status) for known in one.it.known] == [("a", status)]
        assert [finding.known for finding in one.findings] == found


def test_known_findings_that_there_is_no_time_for_are_untested(clock: Clock) -> None:
    entries = [entry_of(name, trial_of("S(0)", ranks=ranks)) for name, ranks in (("a", 4), ("b", 2), ("c", 4))]
    one, known = replayed(clock, 15.0, entries)
    assert len(one.tried) == 2
    assert [(name, status) for name, status, _ in known] == [("a", "fixed"), ("b", "fixed"), ("c", "untested")]
    assert known[-1][-1] == OUT_OF_TIME


def test_an_entry_whose_call_is_outside_the_boundary_is_untested_and_says_why(clock: Clock) -> None:
    trial = trial_of("S(0)")
    calls = {"f0": "os.system", "f1": "my_rules.twice", "f2": "torch.neg"}
    entries = [entry_of(name, replace(trial, case=replace(trial.case, call=call))) for name, call in calls.items()]
    one = Investigated(clock, baseline=Baseline(tuple(entries)))
    one.it.replay_known()
    one.it.settle()
    outside = "which is no op of torch and no program of an installed family"
    assert {known.fingerprint: (known.status, known.detail) for known in one.it.known} == {
        "f0": ("untested", f"calls os.system, {outside}"),
        "f1": ("untested", f"calls my_rules.twice, {outside}; needs --import my_rules"),
        "f2": ("known", "in 1 trial"),
    }
    assert [trial.case.call for trial in one.tried] == ["torch.neg"]
