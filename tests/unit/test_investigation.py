"""What becomes of failures and of known findings, with ranks that are none and a clock that they move."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from run_factory import make_header

from verifier import investigation, minimising
from verifier.baseline import Baseline
from verifier.cases import (
    Difference,
    DifferenceKind,
    Fate,
    MeshSpec,
    Observation,
    OpCase,
    Phase,
    ProcessReport,
    Trial,
    parse_placements,
)
from verifier.events import Event, FindingReported, RunStarted
from verifier.graph import RedistributionGraph
from verifier.investigation import Investigation
from verifier.oracle import judge
from verifier.outcomes import Outcomes
from verifier.past import Past, Settled
from verifier.plan import Plan
from verifier.records import FindingRecord
from verifier.reference import make_reference
from verifier.summary import Summary

HEADER = make_header(device="cpu")
FAMILY = SimpleNamespace(
    name="family", shrinks=False, covers=lambda ops, op: op in ops, likely_cause=lambda trial, verdict: ""
)


class Clock:
    """Stands for the module ``time``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(investigation, "time", clock)
    monkeypatch.setattr(minimising, "time", clock)
    return clock


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
        run: Callable[[Trial], Observation] = wrong_where_cut,
        baseline: Baseline | None = None,
        past: Past | None = None,
    ) -> None:
        self.told: list[Event] = []
        self.tried: list[Trial] = []
        ops = ("aten.neg.default", "aten.abs.default")
        plan = Plan(
            HEADER, {FAMILY.name: FAMILY}, {FAMILY.name: ops}, (), (), seed=0, max_examples=1,  # type: ignore[dict-item]
            combinations=1, time_limit=None, imports=("rules.py",), baseline=baseline or Baseline(),
        )  # fmt: skip
        self.outcomes = Outcomes(self.told.append)

        def run_one(trial: Trial) -> Observation:
            self.tried.append(trial)
            return run(trial)

        self.it = Investigation(plan, past or Past(), self.outcomes, run_one, self.told.append, self.told.append)

    def see(self, *observations: Observation) -> None:
        """Have trials come out so while a mesh is explored."""
        for observation in observations:
            verdict = judge(observation, make_reference(observation.trial.case))
            self.outcomes.keep(observation, verdict, None, "", self.told.append)

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
def seen_on_two_meshes(past: Past | None = None) -> Investigated:
    """Return what is made of failures of two dtypes, which turn out to be one finding on the first mesh."""
    one = Investigated(past=past)
    narrow, wide = trial_of("S(0)", torch.bfloat16), trial_of("S(0)")
    one.see(*map(wrong_where_cut, (narrow, wide, wide)))
    one.it.investigate()
    one.see(*(wrong_where_cut(trial_of("S(0)", dtype, ranks=3)) for dtype in (torch.bfloat16, torch.float64)))
    one.it.investigate()
    one.it.settle()
    return one


def test_every_trial_that_failed_in_the_way_of_a_finding_is_counted(clock: Clock) -> None:
    one = seen_on_two_meshes()
    assert len(one.outcomes.failures.groups) == 2
    (finding,) = one.findings
    assert finding.occurrences == 5
    assert any(where.startswith("3: ") for where in finding.also)
    assert finding.groups == sorted(one.outcomes.failures.groups)


def test_a_run_that_was_resumed_counts_as_if_it_had_not_been(clock: Clock) -> None:
    one = seen_on_two_meshes()
    first = one.reported[0]
    again = seen_on_two_meshes(Past(resumed=True, groups={first.group: Settled(first.became, first.finding)}))
    assert again.tried == []
    assert again.findings == one.findings
