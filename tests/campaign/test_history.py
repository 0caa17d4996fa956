"""What a journal says of a run is what the run was told: what is kept, what was in flight, what may go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_factory import make_finding, make_header
from torch.distributed.tensor import Replicate, Shard

from verifier.campaign.history import Past, PastError, case_digest
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Executed, Fate, Issued, Observation, ProcessReport, Raised, Redistribution
from verifier.core.verdict import Phase, Verdict, VerdictKind
from verifier.events import (
    CaseStarted,
    EntryStarted,
    Event,
    FindingReported,
    GroupSettled,
    GroupStarted,
    MeshStarted,
    PoolRestarted,
    RunFinished,
    RunStarted,
    TrialFinished,
)
from verifier.findings.failures import Failure
from verifier.findings.grouping import group_key, is_of_several_ranks
from verifier.records.files import RunFormatError
from verifier.runs.graph import RedistributionGraph
from verifier.runs.journal import read_journal
from verifier.runs.journal_lines import journal_listener, load_observation
from verifier.runs.store import RunStore
from verifier.runs.summary import Summary

MESH, OTHER = MeshSpec((2,)), MeshSpec((4,))
CASE = OpCase("aten.neg.default", "torch.neg", (torch.tensor([1.0, 2.0]),), tags=frozenset({"even"}))
TRIAL = Trial(CASE, MESH, ((Shard(0),),), (((Replicate(),),),), seed=7)
STEP = Redistribution(Phase.FORWARD, "S(0)", "R", 0, "all_gather", 8, ("S(0)", "R"))
MEASURED = replace(
    STEP,
    tensor="float64[2]",
    issued=(Issued("all_gather_into_tensor", (0, 1), "float64", 8, 16),),
    peak=24,
    seconds=0.5,
)
LOCAL = replace(STEP, source="R", target="S(0)", collective=None, bytes=16)
RAISED = Raised(Phase.BACKWARD, "IndexError", "index 3", "kernel (file.py)", "Traceback ...", backward=0)
EXECUTED = Executed(Phase.BACKWARD, 0, "aten.neg.default", ("S(0)", "P(sum)"))


def report(rank: int, **fields: object) -> ProcessReport:
    told = ProcessReport((rank,), Phase.DONE, redistributions=(STEP, LOCAL, MEASURED), seconds=(("forward", 0.25),))
    return replace(told, **fields)  # type: ignore[arg-type]


OBSERVED = [
    (Observation(TRIAL, Fate.COMPLETED, (report(0), report(1)), seconds=0.5), Verdict(VerdictKind.PASS)),
    (Observation(TRIAL, Fate.COMPLETED, (report(0),)), Verdict(VerdictKind.INCONCLUSIVE, "all 0\nof output")),
    (
        Observation(TRIAL, Fate.COMPLETED, (report(0, executed=(EXECUTED,), placements=(("output 0", "S(0)"),)),)),
        Verdict(VerdictKind.WRONG_GRADIENT, "got 0, expected 1", Phase.BACKWARD, "input.grad", 0, "more"),
    ),
    (
        Observation(TRIAL, Fate.COMPLETED, (report(0), report(1), report(2, executed=(EXECUTED,)))),
        Verdict(VerdictKind.WRONG_VALUE, "got 0, expected 1", Phase.FORWARD, "output"),
    ),
    (
        Observation(TRIAL, Fate.STUCK, (report(0), report(1, raised=RAISED, executed=(EXECUTED,))), "rank 1 raised"),
        Verdict(VerdictKind.CRASH, "rank 1 raised IndexError", Phase.BACKWARD, "", 0),
    ),
    (Observation(TRIAL, Fate.HANG, (None, None), "ranks 0, 1 in forward"), Verdict(VerdictKind.HANG, "after 20 s")),
    (Observation(TRIAL, Fate.DIED, (None, report(1)), "rank 0 ended"), Verdict(VerdictKind.DIED, "rank 0 ended")),
]


def case_started(number: int, digest: str = "d1", trials: int = 3) -> CaseStarted:
    return CaseStarted(number, CASE, MESH, trials, digest)


def trial_finished(position: str) -> TrialFinished:
    return TrialFinished(*OBSERVED[0], (("input", "S(0)"),), position)


def past_of(folder: Path, *told: Event, time_limit: float | None = None) -> Past:
    """Return the past of a run that was told of so much when it was killed."""
    store, header = RunStore(folder), make_header(id="20260101T000000-000000-abcdef", time_limit=time_limit)
    with store.open_run(header) as writer:
        listen = journal_listener(writer, clock=iter(range(1000)).__next__)
        for event in told:
            listen(event)
    return Past.of_run(read_journal(writer.journal_path))


# --------------------------------------------------------------------------------------------------------- what is kept
@pytest.mark.parametrize(("observation", "verdict"), OBSERVED, ids=[str(verdict.kind) for _, verdict in OBSERVED])
def test_a_trial_from_the_journal_is_as_good_as_the_trial(
    tmp_path: Path, observation: Observation, verdict: Verdict
) -> None:
    rows = (("input", "S(0)"),)
    past = past_of(tmp_path, case_started(1), TrialFinished(observation, verdict, rows, "1/1"))
    result = past.result("1/1", TRIAL)
    assert result is not None
    again, judged = result.observation, result.verdict
    assert judged == verdict
    assert (again.fate, again.detail, again.seconds) == (observation.fate, observation.detail, observation.seconds)
    records = []
    for seen in (observation, again):
        summary = Summary(RedistributionGraph())
        for event in (RunStarted(make_header()), TrialFinished(seen, verdict, rows), RunFinished(1.0, True)):
            summary(event)
        records.append(summary.record())
    assert records[0] == records[1]
    if verdict.kind.bad:
        before, after = Failure(TRIAL, observation, verdict), Failure(TRIAL, again, judged)
        assert group_key(before) == group_key(after)
        assert is_of_several_ranks(before) == is_of_several_ranks(after)
        assert before.costly == after.costly
    assert past.result("1/2", TRIAL) is None


def test_a_trial_is_in_the_past_once(tmp_path: Path) -> None:
    past = past_of(tmp_path, case_started(1), trial_finished("1/1"), trial_finished("1/1"))
    assert list(past.trials) == ["1/1"]


def test_findings_restarts_and_time_are_kept(tmp_path: Path) -> None:
    finding = make_finding("a1")
    told = [
        PoolRestarted(MESH, "HANG", 1.5),
        FindingReported(finding, "group", "became"),
        FindingReported(make_finding("b2")),  # a known one, which is settled at the end of each run
        GroupSettled("another", "c3"),
    ]
    past = past_of(tmp_path, *told)
    assert past.restarts == [told[0]]
    assert past.groups == {"group": told[1], "another": told[3]}
    assert past.seconds == len(told)


def test_of_shards_the_trials_are_taken_and_not_what_they_were_minimised_to(tmp_path: Path) -> None:
    parts = []
    for number in (1, 2):
        told = [case_started(number), trial_finished(f"{number}/1"), FindingReported(make_finding("a1"), "g", "b")]
        past_of(tmp_path / str(number), *told)
        (path,) = (tmp_path / str(number)).glob("runs/*/journal.jsonl")
        parts.append(read_journal(path))
    past = Past.of_shards(parts, complete=True)
    assert list(past.trials) == ["1/1", "2/1"]
    assert past.groups == {}
    assert past.over(MESH, "any")


def test_a_line_that_is_no_trial_is_named() -> None:
    with pytest.raises(RunFormatError, match="trial 1/1 of the journal cannot be read"):
        load_observation({"trial": "1/1", "verdict": "FINE", "seconds": 1}, TRIAL)


# ----------------------------------------------------------------------------------------------------------- in flight
@pytest.mark.parametrize(
    ("told", "in_flight"),
    [
        ([], ""),
        ([EntryStarted("a1")], "entry a1 of the baseline"),
        ([EntryStarted("a1"), trial_finished("entry:a1")], ""),
        ([case_started(5)], "trial 1 of 3 of case 5, aten.neg.default on mesh 2"),
        (
            [case_started(5), trial_finished("5/1"), trial_finished("5/2")],
            "trial 3 of 3 of case 5, aten.neg.default on mesh 2",
        ),
        ([case_started(5), *(trial_finished(f"5/{trial}") for trial in (1, 2, 3))], ""),
        ([case_started(5), trial_finished("5/1"), MeshStarted(OTHER, "f", 3)], ""),
        ([GroupStarted("the group")], "minimising of the group"),
        ([GroupStarted("the group"), GroupSettled("the group", "c3")], ""),
        ([GroupStarted("the group"), FindingReported(make_finding("a1"), "the group", "b")], ""),
    ],
)
def test_what_was_in_flight(tmp_path: Path, told: Sequence[Event], in_flight: str) -> None:
    assert past_of(tmp_path, *told).in_flight == in_flight


def test_the_time_of_a_mesh_is_over_once_the_run_went_on_from_it(tmp_path: Path) -> None:
    first, second = MeshStarted(MESH, "f", 3), MeshStarted(OTHER, "f", 3)
    past = past_of(tmp_path, first, time_limit=60.0)
    assert (past.begun(MESH, "f"), past.over(MESH, "f"), past.begun(OTHER, "f")) == (True, False, False)
    past = past_of(tmp_path / "later", first, second, time_limit=60.0)
    assert (past.over(MESH, "f"), past.over(OTHER, "f")) == (True, False)
    past = past_of(tmp_path / "minimising", first, GroupStarted("g"), time_limit=60.0)
    assert past.over(MESH, "f")
    past = past_of(tmp_path / "no limit", first, second)
    assert (past.begun(MESH, "f"), past.over(MESH, "f")) == (True, False)


# -------------------------------------------------------------------------------------------------------------- digests
def test_another_case_of_the_same_number_is_an_error(tmp_path: Path) -> None:
    past = past_of(tmp_path, case_started(5))
    assert past.has_case(case_started(5))
    assert not past.has_case(case_started(6, "other"))
    with pytest.raises(PastError, match=r"case 5 .* is drawn as other now and was d1"):
        past.has_case(case_started(5, "other"))


def test_the_digest_stands_for_values_trials_and_choices() -> None:
    same = replace(CASE, args=(torch.tensor([1.0, 2.0]),))
    digest = case_digest(CASE, [TRIAL], b"choices")
    assert case_digest(same, [replace(TRIAL, case=same)], b"choices") == digest
    others = [
        case_digest(replace(CASE, args=(torch.tensor([1.0, 3.0]),)), [TRIAL], b"choices"),
        case_digest(replace(CASE, args=(torch.tensor([1.0, 2.0], dtype=torch.float64),)), [TRIAL], b"choices"),
        case_digest(replace(CASE, kwargs={"out": None}), [TRIAL], b"choices"),
        case_digest(CASE, [TRIAL, TRIAL], b"choices"),
        case_digest(CASE, [replace(TRIAL, seed=8)], b"choices"),
        case_digest(CASE, [replace(TRIAL, combination=((Replicate(),),))], b"choices"),
        case_digest(CASE, [replace(TRIAL, cotangents=())], b"choices"),
        case_digest(CASE, [TRIAL], b"other choices"),
    ]
    assert len({digest, *others}) == 1 + len(others)


def test_a_case_that_no_file_can_hold_has_a_digest() -> None:
    sparse = replace(CASE, args=(torch.eye(2).to_sparse(),))
    assert case_digest(sparse, [], b"a") != case_digest(sparse, [], b"b")
