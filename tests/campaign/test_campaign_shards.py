"""What the shards of a campaign plan is together what one campaign plans, where each case steers those after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from strategies.redistribution import FAMILY
from verifier.campaign.campaign import Campaign
from verifier.campaign.plan import Plan
from verifier.core.case import MeshSpec, Trial
from verifier.core.observation import Fate, Observation, ProcessReport
from verifier.core.parts import RunPart
from verifier.core.verdict import Phase
from verifier.events import TrialFinished
from verifier.records.schema import RunHeader

MESH = MeshSpec((2, 2))
OP = "dtensor.redistribute"


class Agreeable:
    """Stands for pools whose ranks find nothing wrong with anything."""

    def of(self, _: MeshSpec) -> Agreeable:
        return self

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    def run_alone(self, trial: Trial) -> Observation:
        raise AssertionError("nothing fails")

    def run(self, trials: Sequence[Trial], *, fresh: bool = False) -> Iterator[Observation]:
        for trial in trials:
            yield Observation(trial, Fate.COMPLETED, tuple(ProcessReport((rank,), Phase.DONE) for rank in range(4)))


def planned(shard: RunPart | None) -> dict[str, str]:
    """Return the combinations that are tried, by position."""
    header = RunHeader("run", "", 0, "dev", [FAMILY.name], [str(MESH)], ["float64"], "cpu", 3, None, [], {}, "")
    plan = Plan(
        header, {FAMILY.name: FAMILY}, {FAMILY.name: (OP,)}, (MESH,), (torch.float64,), seed=0, max_examples=12,
        combinations=16, time_limit=None, shard=shard,
    )  # fmt: skip
    events: list[Any] = []
    Campaign(plan, Agreeable(), events.append).run()  # type: ignore[arg-type]
    return {
        event.position: str(event.observation.trial.combination) for event in events if isinstance(event, TrialFinished)
    }


def test_what_shards_plan_is_what_one_campaign_plans() -> None:
    whole = planned(None)
    parts = [planned(RunPart(index, 3)) for index in (1, 2, 3)]
    assert all(parts)
    assert sum(map(len, parts)) == len(whole) > 100
    assert parts[0] | parts[1] | parts[2] == whole


def test_a_case_steers_those_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = planned(None)
    monkeypatch.setattr(
        Campaign, "_wanted", lambda self, case, mesh: ([], self.plan.families[case.family].alphabet(case, mesh))
    )
    assert planned(None) != whole  # else the test before this one would show nothing
