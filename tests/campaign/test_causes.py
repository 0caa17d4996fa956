"""A campaign settles the failures that remedies mend, and reports the others, with ranks that are none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import date
from types import SimpleNamespace

import msgspec
import pytest
import torch
from run_factory import make_header

from verifier.campaign.history import Answer, Past
from verifier.campaign.investigation import Investigation
from verifier.campaign.outcomes import Outcomes
from verifier.campaign.plan import Plan
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Difference, DifferenceKind, Fate, Observation, ProcessReport
from verifier.core.verdict import Phase
from verifier.events import Event, FindingReported, GroupSettled
from verifier.execution.remedies import Remedy
from verifier.findings import record
from verifier.findings.attribution import Attribution
from verifier.findings.grouping import unlike
from verifier.gate.baseline import Baseline
from verifier.gate.entries import Cause
from verifier.placements.parsing import parse_placements
from verifier.records.schema import FAILS, FindingRecord
from verifier.records.values import load_trial, trial_record

FAMILY = SimpleNamespace(
    name="family", shrinks=False, covers=lambda ops, op: op in ops, likely_cause=lambda trial, verdict: ""
)
OP = "aten.neg.default"
Shows = Callable[[Trial, tuple[str, ...]], bool]
"""Whether a trial is wrong under these remedies."""


@pytest.fixture(autouse=True)
def _scripts_fail_as_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "run_script", lambda source: (FAILS, ""))


def trial_of(first: float, ranks: int = 2) -> Trial:
    case = OpCase(OP, "torch.neg", (torch.tensor([first, 2.0]),), family=FAMILY.name)
    return Trial(case, MeshSpec((ranks,)), (parse_placements("S(0)"),))


def first(trial: Trial) -> float:
    return float(trial.case.args[0][0])  # type: ignore[index]


def wrong_below_the_cause(trial: Trial, remedies: tuple[str, ...]) -> bool:
    """Return whether a trial is wrong: positive numbers by the known cause, negative ones whatever is mended."""
    return first(trial) < 0 or not remedies


CAUSE = Cause(
    fingerprint="ca05e0000000", op=OP, family=FAMILY.name, verdict="WRONG_VALUE", rule="", mesh="2", summary="",
    reason="a test", torch=("2.13.0",), expires=date(2099, 1, 1), remedy="mend", title="", where=(),
    replay=msgspec.json.encode(trial_record(trial_of(1.0))).decode(),
)  # fmt: skip


class Investigated:
    def __init__(
        self,
        shows: Shows,
        *given: Trial,
        past: Past | None = None,
        cause: Cause = CAUSE,
        before: tuple[Cause, ...] = (),
    ) -> None:
        self.told: list[Event] = []
        self.tried: list[Trial] = []
        self.under: list[tuple[str, ...]] = []
        causes = (*before, cause)
        self._shows = shows
        plan = Plan(
            make_header(device="cpu"), {FAMILY.name: FAMILY}, {FAMILY.name: ()}, (), (), seed=0, max_examples=1,  # type: ignore[dict-item]
            combinations=1, time_limit=None, baseline=Baseline(causes),
        )  # fmt: skip
        outcomes = Outcomes(self.told.append)
        remedies = {one.remedy: Remedy(one.remedy, "", nullcontext) for one in causes}
        attribution = Attribution(self._run, causes, remedies)
        self.it = Investigation(
            plan,
            past or Past(),
            outcomes,
            lambda trial: self._run(trial, ()),
            self.told.append,
            attribution=attribution,
        )
        self.it.replay_known()
        for trial in given:
            outcomes.take(Answer("", self._run(trial, ())))
        self.tried.clear()
        self.under.clear()
        self.it.investigate()
        self.it.settle()

    def _run(self, trial: Trial, remedies: tuple[str, ...]) -> Observation:
        self.tried.append(trial)
        self.under.append(remedies)
        difference = Difference(DifferenceKind.VALUE, Phase.FORWARD, "output", 0, "1.0", "-1.0", (0,))
        wrong = self._shows(trial, remedies)
        reports = [ProcessReport((rank,), Phase.DONE, differences=(difference,) * wrong) for rank in (0, 1)]
        return Observation(trial, Fate.COMPLETED, tuple(reports))

    @property
    def findings(self) -> list[FindingRecord]:
        return [event.finding for event in self.told if isinstance(event, FindingReported)]


def test_what_a_remedy_mends_is_known_and_not_minimised() -> None:
    one = Investigated(wrong_below_the_cause, trial_of(1.0))
    (finding,) = one.findings
    assert (finding.fingerprint, finding.known, finding.explained) == (CAUSE.fingerprint, True, "mended by remedy mend")
    assert [known.status for known in one.it.known] == ["known"]
    assert len(one.tried) == 4  # alone, under the remedy, and twice without it


def test_the_cause_that_explained_a_failure_of_the_op_with_this_symptom_is_tried_first() -> None:
    def shows(trial: Trial, remedies: tuple[str, ...]) -> bool:
        return "mend" not in remedies

    other = replace(CAUSE, fingerprint="ca05e1000000", remedy="idle")
    elsewhere = replace(trial_of(1.0), combination=(parse_placements("P(sum)"),))
    one = Investigated(shows, trial_of(1.0), elsewhere, before=(other,))
    assert [finding.fingerprint for finding in one.findings] == [CAUSE.fingerprint]
    assert one.under == [(), ("idle",), ("mend",), (), (), (), ("mend",), (), ()]


def test_what_no_remedy_mends_is_new_though_it_looks_like_what_one_mends() -> None:
    one = Investigated(wrong_below_the_cause, trial_of(1.0), trial_of(-1.0, ranks=3))
    known, new = sorted(one.findings, key=lambda finding: not finding.known)
    assert (known.fingerprint, known.known) == (CAUSE.fingerprint, True)
    assert not new.known
    assert first(load_trial(new.trial)) == -1.0


def test_a_new_finding_with_the_fingerprint_of_a_cause_gets_another() -> None:
    name = Investigated(wrong_below_the_cause, trial_of(-1.0)).findings[0].fingerprint
    cause = replace(CAUSE, fingerprint=name)
    (finding,) = Investigated(wrong_below_the_cause, trial_of(-1.0), cause=cause).findings
    assert (finding.fingerprint, finding.known) == (unlike(name), False)


def test_a_resumed_run_tells_the_same_and_tries_nothing_again() -> None:
    trials = trial_of(1.0), trial_of(-1.0, ranks=3)
    once = Investigated(wrong_below_the_cause, *trials)
    groups: dict[str, FindingReported | GroupSettled] = {}
    for event in once.told:
        match event:
            case GroupSettled(key):
                groups[key] = event
            case FindingReported(group=key) if key:
                groups[key] = event
    again = Investigated(wrong_below_the_cause, *trials, past=Past(resumed=True, groups=groups))
    assert again.tried == []
    assert [(f.fingerprint, f.known) for f in again.findings] == [(f.fingerprint, f.known) for f in once.findings]


def test_a_remedy_that_does_not_mend_its_own_trial_explains_nothing() -> None:
    one = Investigated(lambda trial, remedies: True, trial_of(1.0))
    (finding,) = one.findings
    assert not finding.known
