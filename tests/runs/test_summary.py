"""The summary counts what happened, and workers' records add up to the record of one run."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_records import a_finding, a_header
from run_factory import make_op_rules, make_rules
from torch.distributed.tensor import Replicate, Shard

from strategies.redistribution.programs import CHAIN
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Fate, Observation, ProcessReport, Redistribution
from verifier.core.verdict import Phase, Verdict, VerdictKind
from verifier.events import (
    CaseSkipped,
    Event,
    FindingReported,
    MeshStarted,
    PoolRestarted,
    RulesClaimed,
    RunFinished,
    RunStarted,
    TrialFinished,
)
from verifier.records.schema import (
    ConfirmationRecord,
    EdgeCoverageRecord,
    EdgeRecord,
    GraphRecord,
    KnownRecord,
    MatrixRecord,
    RuleCoverageRecord,
    RulesRecord,
    RunRecord,
    UntestedRecord,
)
from verifier.runs.merging import MAX_REASONS, OTHER_REASONS, join_levels, merge_records
from verifier.runs.summary import Summary

OPS = ("aten.embedding.default", "aten.sum.default")
MESHES = (MeshSpec((4,)), MeshSpec((2, 2), "simulated"))


class EdgePerTrial:
    """A graph that takes one edge for each trial, by the trial's mesh."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, observation: Observation, passed: bool = True) -> None:
        mesh = str(observation.trial.mesh)
        self.counts[mesh] = self.counts.get(mesh, 0) + 1

    def to_record(self) -> GraphRecord:
        edges = [EdgeRecord("S(0)", "R", m, 0, "all_gather", 8 * n, n, {"forward": n}) for m, n in self.counts.items()]
        return GraphRecord(nodes=["R", "S(0)"] if edges else [], edges=sorted(edges, key=lambda edge: edge.mesh))


def a_trial(op: str = OPS[0], mesh: MeshSpec = MESHES[0], tags: frozenset[str] = frozenset()) -> Trial:
    return Trial(OpCase(op, "torch.op", (torch.ones(2),), tags=tags), mesh, ((Shard(0),),))


def finished(
    kind: VerdictKind,
    message: str = "",
    rows: tuple[tuple[str, str], ...] = (("weight", "S(0)"), ("indices", "R")),
    trial: Trial | None = None,
    seconds: float = 0.0,
) -> TrialFinished:
    reports = (ProcessReport((0,), Phase.DONE, seconds=(("op", 0.25), ("compare", 0.5))), None)
    observation = Observation(trial or a_trial(), Fate.COMPLETED, reports, seconds=seconds)
    return TrialFinished(observation, Verdict(kind, message), rows)


def summed(*events: Event) -> RunRecord:
    summary = Summary(EdgePerTrial())
    for event in (RunStarted(a_header()), *events):
        summary(event)
    return summary.record()


def test_counts_are_by_verdict_op_and_mesh_and_only_of_what_occurred() -> None:
    sums = a_trial(OPS[1], MESHES[1], frozenset({"0-d"}))
    run = summed(
        finished(VerdictKind.WRONG_VALUE),
        finished(VerdictKind.PASS),
        finished(VerdictKind.PASS, trial=sums),
        RunFinished(2.5, complete=True),
    )
    assert (run.trials, run.seconds, run.complete) == (3, 2.5, True)
    assert list(run.counts.items()) == [("PASS", 2), ("WRONG_VALUE", 1)]
    assert run.counts_by_op == {OPS[0]: {"PASS": 1, "WRONG_VALUE": 1}, OPS[1]: {"PASS": 1}}
    assert run.counts_by_mesh == {"4": {"PASS": 1, "WRONG_VALUE": 1}, "simulated:2x2": {"PASS": 1}}
    assert run.coverage == {"0-d": 1}
    assert run.seconds_by == {"op": 0.75, "compare": 1.5}
    assert [edge.count for edge in run.graph.edges] == [2, 1]


def test_matrix_takes_the_first_two_tensor_arguments() -> None:
    run = summed(
        finished(VerdictKind.PASS, rows=(("weight", "S(0)"), ("indices", "R"), ("offsets", "S(0)"))),
        finished(VerdictKind.CRASH, rows=(("weight", "S(0)"), ("indices", "R"), ("offsets", "R"))),
        finished(VerdictKind.PASS, rows=(("input", "S(1)"),)),
        finished(VerdictKind.PASS, rows=()),
    )
    cells = {(matrix.row_name, matrix.column_name): matrix.cells for matrix in run.matrices}
    assert cells == {
        ("-", "-"): {"-": {"-": {"PASS": 1}}},
        ("input", "-"): {"S(1)": {"-": {"PASS": 1}}},
        ("weight", "indices"): {"S(0)": {"R": {"PASS": 1, "CRASH": 1}}},
    }


def test_reasons_are_kept_by_first_line_and_their_number_is_bounded() -> None:
    many = [finished(VerdictKind.INCONCLUSIVE, f"reason {n}\nmore") for n in range(MAX_REASONS + 7)]
    run = summed(
        *many,
        finished(VerdictKind.INCONCLUSIVE, "reason 3\nelse"),
        finished(VerdictKind.UNSUPPORTED, "sparse"),
        finished(VerdictKind.TOOL_ERROR, "KeyError: 'x'"),
        finished(VerdictKind.TOOL_ERROR, "KeyError: 'x'"),
    )
    assert len(run.inconclusive) == MAX_REASONS + 1
    assert (run.inconclusive["reason 3"], run.inconclusive[OTHER_REASONS]) == (2, 7)
    assert sum(run.inconclusive.values()) == run.counts["INCONCLUSIVE"]
    assert run.unsupported == {"sparse": 1}
    assert run.tool_errors == ["KeyError: 'x'"]


def test_tool_error_without_a_message_is_still_an_error() -> None:
    assert summed(finished(VerdictKind.TOOL_ERROR)).tool_errors == ["no reason given in aten.embedding.default"]


def test_skipped_restarts_and_findings_are_recorded() -> None:
    run = summed(
        MeshStarted(MESHES[0], "embedding", 10),
        CaseSkipped("mesh 8", "only 4 ranks", 2),
        CaseSkipped("mesh 8", "only 4 ranks"),
        PoolRestarted(MESHES[0], "HANG", 1.5),
        FindingReported(a_finding("b2")),
        FindingReported(a_finding("a1")),
    )
    assert [(one.what, one.reason, one.count) for one in run.untested] == [("mesh 8", "only 4 ranks", 3)]
    assert run.pool_restarts == 1
    assert [finding.fingerprint for finding in run.findings] == ["a1", "b2"]


def test_rules_that_ran_are_told_from_those_that_are_only_claimed() -> None:
    claimed = RulesClaimed(OPS[0], ("R", "S(0)"))
    refused = replace(finished(VerdictKind.UNSUPPORTED), verdict=Verdict(VerdictKind.UNSUPPORTED, phase=Phase.FORWARD))
    never, ran = summed(claimed, refused), summed(claimed, finished(VerdictKind.PASS))
    assert never.rule_coverage == {OPS[0]: RuleCoverageRecord(["R", "S(0)"], [])}
    assert ran.rule_coverage == {OPS[0]: RuleCoverageRecord(["R", "S(0)"], ["S(0)"])}
    assert merge_records([never, ran]).rule_coverage == merge_records([ran, never]).rule_coverage == ran.rule_coverage
    other = summed(RulesClaimed(OPS[0], ("P(sum)",)), RulesClaimed(OPS[1], ("R",)))
    assert merge_records([ran, other]).rule_coverage == {
        OPS[0]: RuleCoverageRecord(["P(sum)", "R", "S(0)"], ["S(0)"]),
        OPS[1]: RuleCoverageRecord(["R"], []),
    }


def test_edges_that_redistributions_took_are_recorded() -> None:
    moved = OpCase("dtensor.redistribute", CHAIN, (torch.ones(3), [[Replicate()]]))
    step = Redistribution(Phase.FORWARD, "S(0)", "R", 0, "all_gather", 8, ("S(0)", "R"))
    report = ProcessReport((0,), Phase.DONE, redistributions=(step,))
    trial = Trial(moved, MESHES[0], ((Shard(0),),))
    taken = TrialFinished(Observation(trial, Fate.COMPLETED, (report,)), Verdict(VerdictKind.PASS), ())
    run = summed(taken)
    (possible,) = (edges.possible for edges in run.edge_coverage.values())
    assert run.edge_coverage == {"1": EdgeCoverageRecord(possible, ["S(0) -> R"], [])}
    assert merge_records([summed(), run]).edge_coverage == run.edge_coverage
    assert summed().edge_coverage == {}


def test_interrupted_run_is_not_complete_and_takes_as_long_as_its_trials() -> None:
    run = summed(finished(VerdictKind.PASS, seconds=0.5), PoolRestarted(MESHES[0], "HANG", 1.5))
    assert (run.complete, run.seconds) == (False, 2.0)


def test_run_that_never_started_has_no_record() -> None:
    with pytest.raises(ValueError, match="none was received"):
        Summary(EdgePerTrial()).record()


# -------------------------------------------------------------------------------------------------------------- merge
trial_events = st.builds(
    finished,
    st.sampled_from(list(VerdictKind)),
    st.sampled_from(["", "one", "two"]),
    st.sampled_from([(("input", "S(0)"),), (("weight", "R"), ("indices", "S(0)"))]),
    st.builds(
        a_trial, st.sampled_from(OPS), st.sampled_from(MESHES), st.frozensets(st.sampled_from(["0-d", "empty shard"]))
    ),
)
finding_events = st.builds(
    lambda name, mesh, confirmed, occurrences, also: FindingReported(
        a_finding(name, mesh=mesh, confirmed=confirmed, occurrences=occurrences, also=also)
    ),
    st.sampled_from(["a1", "b2"]),
    st.sampled_from(["4", "2x2"]),
    st.just(ConfirmationRecord("unconfirmed")),
    st.integers(1, 5),
    st.lists(st.sampled_from(["x", "y"]), unique=True).map(sorted),
)
other_events = st.builds(CaseSkipped, st.sampled_from(["mesh 8", "bool"]), st.just("why"), st.integers(1, 4)) | st.just(
    PoolRestarted(MESHES[0], "DIED", 0.5)
)
event_lists = st.lists(trial_events | finding_events | other_events, max_size=12)


@settings(deadline=None, max_examples=80)
@given(event_lists, st.integers(0, 12))
def test_merging_the_records_of_two_workers_is_recording_one_run(events: list[Event], cut: int) -> None:
    whole = summed(*events)
    merged = merge_records([summed(*events[:cut]), summed(*events[cut:])])
    whole.seconds = merged.seconds = 0.0
    # Of equally good records of one finding the first is kept; what is added up does not depend on which that is.
    assert [(f.fingerprint, f.occurrences) for f in merged.findings] == [
        (f.fingerprint, f.occurrences) for f in whole.findings
    ]
    assert [{f.mesh, *f.also} for f in merged.findings] == [{f.mesh, *f.also} for f in whole.findings]
    merged.findings, whole.findings = [], []
    assert merged == whole


@settings(deadline=None, max_examples=40)
@given(st.lists(event_lists, min_size=2, max_size=4))
def test_merging_does_not_depend_on_grouping(parts: list[list[Event]]) -> None:
    records = [summed(*events) for events in parts]
    assert merge_records([merge_records(records[:-1]), records[-1]]) == merge_records(records)


def test_merge_prefers_the_better_evidence_and_remembers_where_else() -> None:
    unsure = a_finding(mesh="2x2", confirmed=ConfirmationRecord("unconfirmed"), occurrences=3)
    sure = a_finding(mesh="8", occurrences=2, known=True)
    for order in ([unsure, sure], [sure, unsure]):
        [merged] = merge_records([summed(FindingReported(one)) for one in order]).findings
        assert (merged.mesh, merged.confirmed.text, merged.occurrences, merged.known) == (
            "8",
            "confirmed on gloo, 4 ranks",
            5,
            True,
        )
        assert merged.also == ["2x2: weight=S(0), indices=R"]


def test_merge_of_baseline_entries_believes_the_worker_that_still_saw_it_fail() -> None:
    def worker(*known: KnownRecord) -> RunRecord:
        return replace(summed(), baseline=list(known))

    merged = merge_records(
        [
            worker(KnownRecord("a1", "fixed"), KnownRecord("b2", "untested")),
            worker(KnownRecord("a1", "known"), KnownRecord("b2", "fixed")),
        ]
    )
    assert merged.baseline == [KnownRecord("a1", "known"), KnownRecord("b2", "fixed")]


def test_merge_takes_the_longest_time_and_all_meshes_and_the_incompleteness() -> None:
    one = replace(summed(), seconds=3.0, complete=True)
    other = replace(summed(), seconds=5.0, complete=False, header=a_header(meshes=["4", "2x2"]))
    merged = merge_records([one, other])
    assert (merged.seconds, merged.complete, merged.header.meshes) == (5.0, False, ["4", "2x2"])


def test_merging_ignores_no_field() -> None:
    """A field that is new has to be filled here, and merging has to say how two of its values become one."""
    plain = replace(summed(), complete=True)
    full = RunRecord(
        header=a_header(meshes=["4", "2x2"]),
        seconds=5.0,
        complete=False,
        trials=2,
        counts={"PASS": 2},
        counts_by_op={"op": {"PASS": 2}},
        counts_by_mesh={"4": {"PASS": 2}},
        coverage={"empty shard": 1},
        findings=[a_finding("a1")],
        baseline=[KnownRecord("a1", "known")],
        untested=[UntestedRecord("mesh 8", "why", 1)],
        matrices=[MatrixRecord("op", "4", "a", "b", {"R": {"S(0)": {"PASS": 1}}})],
        graph=GraphRecord(["R", "S(0)"], [EdgeRecord("S(0)", "R", "4", 0, "all_gather", 8, 1, {"forward": 1})]),
        pool_restarts=1,
        seconds_by={"op": 0.5},
        inconclusive={"why": 1},
        unsupported={"why": 1},
        tool_errors=["KeyError"],
        rules=make_rules(),
        rule_coverage={"op": RuleCoverageRecord(["R"], ["R"])},
        edge_coverage={"1": EdgeCoverageRecord(3, ["S(0) -> R"], [])},
    )
    names = {field.name for field in fields(RunRecord)} - {"format_version"}
    for records in ([plain, full], [full, replace(plain, header=a_header(meshes=["8"]))]):
        merged = merge_records(records)
        assert {name for name in names if getattr(merged, name) == getattr(plain, name)} == set()
    twice = merge_records([full, full])
    assert (twice.trials, twice.counts, twice.graph.edges[0].bytes) == (4, {"PASS": 4}, 16)
    assert twice.matrices[0].cells == {"R": {"S(0)": {"PASS": 2}}}


def test_merge_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no records"):
        merge_records([])


# ---------------------------------------------------------------------------------------------------------- two levels
def checked(started: str = "2026-05-21T00:00:00Z", rules: RulesRecord | None = None, **changes: object) -> RunRecord:
    """Return a run of level 1, by default a day newer than those on meshes."""
    made = replace(
        summed(),
        header=a_header(id="checked", started=started, families=["opinfo"], meshes=["2"], command="verifier rules"),
        seconds=3.0,
        complete=True,
        rules=rules or make_rules(),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_rules_of_workers_are_united_and_their_work_is_added_up() -> None:
    first, later = make_op_rules(combinations=1), make_op_rules(combinations=2)
    one = checked(rules=make_rules(ops={"sum": first, "neg": first}, meshes=["2"], seconds=4.0, jobs=1))
    other = checked(rules=make_rules(ops={"abs": later, "sum": later}, meshes=["3"], seconds=1.0, claims_only=True))
    merged = merge_records([one, summed(), other]).rules
    assert merged is not None
    assert merged.ops == {"abs": later, "neg": first, "sum": later}
    assert list(merged.ops) == ["abs", "neg", "sum"]
    assert (merged.seconds, merged.jobs, merged.meshes, merged.claims_only) == (5.0, 2, ["2", "3"], True)
    assert merged.combinations == 2 * make_rules().combinations
    assert merge_records([merge_records([one, summed()]), other]).rules == merged
    assert merge_records([summed(), summed()]).rules is None


def test_levels_are_joined_under_the_newer_header_with_both_commands() -> None:
    level2 = replace(summed(), seconds=2.0, complete=True)
    for started, name in (("2026-05-21T00:00:00Z", "checked"), ("2026-05-19T00:00:00Z", a_header().id)):
        joined = join_levels(level2, checked(started))
        assert joined.header.id == name
        assert joined.header.command == "python -m verifier run ; verifier rules"
        assert (joined.header.families, joined.header.meshes) == (["embedding", "opinfo"], ["4", "2"])
        assert (joined.seconds, joined.complete) == (5.0, True)
        assert joined.rules == make_rules()
    assert join_levels(level2, checked(a_header().started)).header.id == "checked", "the id decides between equal times"


def test_joined_levels_have_the_findings_counts_and_errors_of_both() -> None:
    level2 = replace(summed(finished(VerdictKind.PASS), FindingReported(a_finding("a1"))), tool_errors=["KeyError"])
    rules = checked(
        findings=[a_finding("a1", level=1), a_finding("b2", level=1)],
        counts={"PASS": 3, "WRONG_VALUE": 2},
        counts_by_op={OPS[0]: {"PASS": 3}, "aten.neg.default": {"WRONG_VALUE": 2}},
        trials=5,
        untested=[UntestedRecord("combinations at level 1", "why", 4)],
        tool_errors=["IndexError"],
        complete=False,
    )
    joined = join_levels(level2, rules)
    assert [(one.fingerprint, one.occurrences) for one in joined.findings] == [("a1", 2), ("b2", 1)]
    assert (joined.trials, joined.counts) == (6, {"PASS": 4, "WRONG_VALUE": 2})
    assert joined.counts_by_op == {OPS[0]: {"PASS": 4}, "aten.neg.default": {"WRONG_VALUE": 2}}
    assert [entry.count for entry in joined.untested] == [4]
    assert (joined.tool_errors, joined.complete) == (["IndexError", "KeyError"], False)
    assert joined.matrices == level2.matrices


@pytest.mark.parametrize("statuses", [("known", "untested"), ("untested", "known"), ("fixed", "untested")])
def test_an_entry_that_one_level_tried_is_not_untested(statuses: tuple[str, str]) -> None:
    on_meshes, by_rules = statuses
    level2 = replace(summed(), baseline=[KnownRecord("a1", on_meshes)])
    joined = join_levels(level2, checked(baseline=[KnownRecord("a1", by_rules)]))
    assert [entry.status for entry in joined.baseline] == ["fixed" if "fixed" in statuses else "known"]
