"""What is found out about ranks that choose by their hash seeds, by runners that stand for the ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import date

import msgspec
import pytest
import torch

from strategies.opinfo.family import FAMILY
from verifier.campaign.hash_seed import HashSeed
from verifier.campaign.history import Answer, Past
from verifier.campaign.investigation import Investigation
from verifier.campaign.outcomes import Outcomes
from verifier.campaign.plan import Plan
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Difference, DifferenceKind, Executed, Fate, Observation, ProcessReport, Raised
from verifier.core.verdict import Phase, VerdictKind
from verifier.events import FindingReported, GroupSettled
from verifier.findings import record
from verifier.gate.baseline import Baseline
from verifier.gate.entries import BaselineEntry
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.placements.parsing import parse_placements
from verifier.records.schema import FAILS, FindingRecord, RunHeader
from verifier.records.values import trial_record
from verifier.torch_internals.placements import Placements

MESH = MeshSpec((2, 2))
SHARDED, PARTIAL = parse_placements("(S(0), R)"), parse_placements("(R, P(sum))")
CAUSE = "ranks that have one hash seed all do the same"
Runner = Callable[[Trial], Observation]


@pytest.fixture(autouse=True)
def _scripts_fail_as_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for processes that run the scripts of findings."""
    monkeypatch.setattr(record, "run_script", lambda source: (FAILS, ""))


def hangs(trial: Trial) -> Observation:
    return Observation(trial, Fate.HANG, (None,) * 4, "after 20 s: ranks 0, 1 in exchange, ranks 2, 3 in forward")


def dies(trial: Trial) -> Observation:
    return Observation(trial, Fate.DIED, (None,) * 4, "rank 1 ended with signal SIGABRT in forward")


def crashes(trial: Trial) -> Observation:
    raised = Raised(
        Phase.FORWARD, "RuntimeError", "expects a width that is divisible", "view (_view_ops.py)", file="_view_ops.py"
    )
    reports = (ProcessReport((rank,), Phase.FORWARD, raised) for rank in range(4))
    return Observation(trial, Fate.COMPLETED, tuple(reports))


def stuck(trial: Trial) -> Observation:
    where, file = "propagate (_sharding_prop.py)", "_sharding_prop.py"
    raised = Raised(Phase.BACKWARD, "NotImplementedError", "no strategy", where, refusal=True, file=file)
    reports = (ProcessReport((0,), Phase.BACKWARD, raised), None, None, None)
    return Observation(trial, Fate.STUCK, reports, "after 2.5 s: rank 0 raised NotImplementedError in backward")


def crashes_on_one(trial: Trial) -> Observation:
    raised = Raised(Phase.FORWARD, "RuntimeError", "targets are between 0 and 1", "__call__ (_ops.py)", file="_ops.py")
    others = passes(trial).reports
    return Observation(trial, Fate.COMPLETED, (*others[:2], ProcessReport((2,), Phase.FORWARD, raised), others[3]))


def wrong_on(*placements: str) -> Runner:
    """Return what ranks say of a wrong value, where the op ran on ``placements[rank]`` on each."""

    def wrong(trial: Trial) -> Observation:
        difference = Difference(DifferenceKind.VALUE, Phase.FORWARD, "output", 0, "1.0", "-1.0", (0, 0))
        reports = (
            ProcessReport(
                (rank,), Phase.DONE, placements=(("output", "R"),), differences=(difference,),
                executed=(Executed(Phase.FORWARD, None, trial.case.op, (placed,)),) * bool(placed),
            )
            for rank, placed in enumerate(placements)
        )  # fmt: skip
        return Observation(trial, Fate.COMPLETED, tuple(reports))

    return wrong


chosen_differently = wrong_on("(S(0), R)", "(R, R)", "(S(0), R)", "")
chosen_alike = wrong_on(*["(S(0), R)"] * 4)


def passes(trial: Trial) -> Observation:
    reports = (ProcessReport((rank,), Phase.DONE, placements=(("output", "R"),)) for rank in range(4))
    return Observation(trial, Fate.COMPLETED, tuple(reports))


def hangs_sharded(trial: Trial) -> Observation:
    return hangs(trial) if trial.combination == (SHARDED,) else passes(trial)


def entry_of(trial: Trial) -> BaselineEntry:
    """Return an entry for a trial that hangs; its name is that of the op."""
    name, replay = trial.case.op.split(".")[1], msgspec.json.encode(trial_record(trial)).decode()
    return BaselineEntry(
        fingerprint=name, op=trial.case.op, family=FAMILY.name, verdict="HANG", rule="a rule", mesh=str(MESH),
        summary="hangs", reason="a reason", torch=(), expires=date.max, replay=replay,
    )  # fmt: skip


def trial(placements: Placements, op: str = "neg") -> Trial:
    case = OpCase(f"aten.{op}.default", f"torch.{op}", (torch.tensor([[1.0, -2.0], [3.0, -4.0]]),), family=FAMILY.name)
    return Trial(case, MESH, (placements,))


def findings_of(run: Runner, alike: Runner | None, *failed: Trial, was: Runner = hangs) -> list[FindingRecord]:
    """Return what becomes of trials that failed as ``was`` has it, when they are run again by ``run`` and ``alike``."""
    events = events_of(run, alike, failed, was=was)
    assert not any(isinstance(event, GroupSettled) for event in events)
    return [event.finding for event in events if isinstance(event, FindingReported)]


def events_of(
    run: Runner, alike: Runner | None, failed: Sequence[Trial], known: Sequence[Trial] = (), was: Runner = hangs
) -> list[object]:
    """Return what is told of trials that failed, some of them in the baseline, when they are run again."""
    header = RunHeader("run", "", 0, "dev", [FAMILY.name], [str(MESH)], [], "cpu", 3, None, [], {}, "")
    plan = Plan(
        header, {FAMILY.name: FAMILY}, {FAMILY.name: ("neg",)}, (MESH,), (torch.float64,), seed=0, max_examples=3,
        combinations=16, time_limit=None, baseline=Baseline(tuple(map(entry_of, known))),
    )  # fmt: skip
    events: list[object] = []
    outcomes = Outcomes(lambda _: None)
    for number, one in enumerate(failed):
        outcomes.take(Answer(f"1/{number}", was(one)))
    diagnoses = [HashSeed(run, alike)] if alike is not None else []
    investigation = Investigation(plan, Past(), outcomes, run, events.append, diagnoses)
    investigation.replay_known()
    investigation.investigate()
    return events


def test_the_trials_are_what_they_are_taken_for() -> None:
    one = trial(SHARDED)
    assert judge(hangs(one), make_reference(one.case)).kind is VerdictKind.HANG
    assert judge(dies(one), make_reference(one.case)).kind is VerdictKind.DIED
    assert judge(crashes(one), make_reference(one.case)).kind is VerdictKind.CRASH
    assert judge(stuck(one), make_reference(one.case)).kind is VerdictKind.CRASH
    assert judge(passes(one), make_reference(one.case)).kind is VerdictKind.PASS


def test_hangs_that_one_hash_seed_avoids_are_one_finding_of_the_op() -> None:
    first, second = findings_of(hangs, passes, trial(SHARDED), trial(PARTIAL))
    assert first.fingerprint == second.fingerprint
    assert CAUSE in first.message
    assert first.confirmed.text == "confirmed on gloo, 4 ranks"
    assert [finding.occurrences for finding in (first, second)] == [1, 1]
    (other,) = findings_of(hangs, passes, trial(SHARDED, "abs"))
    assert other.fingerprint != first.fingerprint


def test_ranks_with_one_hash_seed_may_all_fail_of_something_else() -> None:
    (found,) = findings_of(hangs, crashes, trial(SHARDED))
    assert CAUSE in found.message


def test_what_some_ranks_raise_and_others_do_not_is_asked_too() -> None:
    """A rank that chose other placements gives its kernel other values."""
    (found,) = findings_of(crashes_on_one, passes, trial(SHARDED), was=crashes_on_one)
    assert CAUSE in found.message
    assert found.message.startswith("rank 2 raised RuntimeError")
    (found,) = findings_of(crashes_on_one, crashes_on_one, trial(SHARDED), was=crashes_on_one)  # an empty shard, say
    assert CAUSE not in found.message
    (found,) = findings_of(crashes, passes, trial(SHARDED), was=crashes)
    assert CAUSE not in found.message


def test_ranks_that_chose_differently_and_hold_the_same_placements_are_asked_too() -> None:
    """One reduces what another does not, in one all-reduce; both end with one placement, and a wrong value."""
    (found,) = findings_of(chosen_differently, passes, trial(SHARDED), was=chosen_differently)
    assert found.verdict == "WRONG_VALUE"
    assert CAUSE in found.message
    chose = "ranks 0, 2: aten.neg.default on ((S(0), R)); rank 1: aten.neg.default on ((R, R)); rank 3: nothing more"
    assert f"ranks chose different rules: {chose}" in found.message


def test_ranks_that_chose_differently_may_all_be_wrong() -> None:
    """By one rule that all have, say: that they would also be wrong with one hash seed shows it."""
    for alike in (chosen_alike, crashes, chosen_differently):
        (found,) = findings_of(chosen_differently, alike, trial(SHARDED), was=chosen_differently)
        assert CAUSE not in found.message
        assert "ranks chose different rules" in found.message


def test_wrong_values_of_ranks_that_chose_alike_are_not_asked() -> None:
    asked: list[Trial] = []

    def alike(one: Trial) -> Observation:
        asked.append(one)
        return passes(one)

    (found,) = findings_of(chosen_alike, alike, trial(SHARDED), was=chosen_alike)
    assert not asked
    assert "ranks chose" not in found.message


def test_a_known_finding_of_ranks_that_choose_is_that_of_wrong_values_as_well() -> None:
    def hangs_or_is_wrong(one: Trial) -> Observation:
        return hangs(one) if one.combination == (SHARDED,) else chosen_differently(one)

    events = events_of(hangs_or_is_wrong, passes, [trial(PARTIAL)], [trial(SHARDED)], was=hangs_or_is_wrong)
    assert [event.fingerprint for event in events if isinstance(event, GroupSettled)] == ["neg"]


def test_ranks_that_choose_may_fail_in_another_way_each_time() -> None:
    ends = itertools.cycle([dies, stuck, hangs])
    (found,) = findings_of(lambda one: next(ends)(one), passes, trial(SHARDED))
    assert CAUSE in found.message
    assert found.confirmed.text == "confirmed on gloo, 4 ranks"


def test_a_failure_that_minimising_changes_is_reported_as_it_was() -> None:
    def depends_on_seeds_as_drawn(one: Trial) -> Observation:
        return passes(one) if one.combination == (SHARDED,) else hangs(one)

    (found,) = findings_of(hangs, depends_on_seeds_as_drawn, trial(SHARDED))
    assert CAUSE in found.message
    assert found.input_placements == {"argument 0": "(S(0), R)"}
    (smaller,) = findings_of(hangs, passes, trial(SHARDED))
    assert smaller.input_placements == {"argument 0": "(R, R)"}


@pytest.mark.parametrize(("alike", "known"), [(passes, True), (hangs_sharded, False)], ids=["so do they", "not they"])
def test_ranks_that_choose_are_known_where_one_hash_seed_avoids_a_known_finding_of_the_op(
    alike: Runner, known: bool
) -> None:
    events = events_of(hangs, alike, [trial(PARTIAL)], [trial(SHARDED, "abs"), trial(SHARDED)])
    settled = [event.fingerprint for event in events if isinstance(event, GroupSettled)]
    assert settled == (["neg"] if known else [])
    assert len([event for event in events if isinstance(event, FindingReported)]) == (not known)


def test_only_the_first_finding_of_ranks_that_choose_is_minimised() -> None:
    runs: list[Trial] = []

    def hangs_and_is_counted(one: Trial) -> Observation:
        runs.append(one)
        return hangs(one)

    findings_of(hangs_and_is_counted, passes, trial(SHARDED))
    alone = len(runs)
    runs.clear()
    findings_of(hangs_and_is_counted, passes, trial(SHARDED), trial(PARTIAL))
    assert len(runs) == alone + 1


@pytest.mark.parametrize("alike", [hangs, None], ids=["hangs with one hash seed, too", "no such ranks"])
def test_other_hangs_are_told_apart_by_their_placements(alike: Runner | None) -> None:
    run = hangs
    found = findings_of(run, alike, trial(SHARDED), trial(PARTIAL))
    assert not any(CAUSE in finding.message for finding in found)
    (marked, _) = findings_of(run, passes, trial(SHARDED), trial(PARTIAL))
    assert marked.fingerprint not in {finding.fingerprint for finding in found}


def test_what_does_not_show_again_says_nothing_of_hash_seeds() -> None:
    (found,) = findings_of(passes, passes, trial(SHARDED))
    assert CAUSE not in found.message
    assert found.confirmed.unsure
