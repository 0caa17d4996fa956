"""What becomes of wrong rules on real processes: which are one defect."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import date

import msgspec
import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import strategies.opinfo.second_calls  # noqa: F401 - declares second calls
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Fate, Observation, ProcessReport, Raised
from verifier.core.verdict import Phase, VerdictKind
from verifier.execution.remedies import Remedy
from verifier.findings.attribution import Attribution
from verifier.findings.grouping import unlike
from verifier.gate.baseline import Baseline
from verifier.gate.entries import BaselineEntry, Cause
from verifier.meshes.lanes import Lanes
from verifier.meshes.pool import Pool, PoolSet
from verifier.records.schema import CONFIRMED, FAILS, GONE, UNCONFIRMED
from verifier.records.values import load_trial, trial_record
from verifier.rules.campaign import confirm
from verifier.rules.campaign.collect import special_rules
from verifier.rules.campaign.confirm import Confirmer
from verifier.rules.results import Rule, SampleReport, WrongRule
from verifier.torch_internals.placements import Combination

FLAT, SQUARE = MeshSpec((2,)), MeshSpec((2, 2))


def fails(trial: Trial) -> Observation:
    """Return what ranks report that all raise in the forward call."""
    reports = (
        ProcessReport((rank,), Phase.FORWARD, Raised(Phase.FORWARD, "RuntimeError", "no"))
        for rank in range(trial.mesh.world_size)
    )
    return Observation(trial, Fate.COMPLETED, tuple(reports))


def wrong(op: str, inputs: str, outputs: str, mesh: MeshSpec, combination: Combination) -> WrongRule:
    case = OpCase(f"aten.{op}", f"torch.ops.aten.{op}", (torch.ones(4, 4),), family="opinfo")
    return WrongRule(
        Rule(case.op, (inputs,), (outputs,)), str(mesh), ((4, 4),), "", "by hand", VerdictKind.CRASH,
        "a rank raised RuntimeError: no", trial_record(Trial(case, mesh, combination)), 16, 1, raised="RuntimeError",
    )  # fmt: skip


ROWS = wrong("neg.default", "S(0)", "S(1)", FLAT, ((Shard(0),),))


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What comes of each script that is to be run; it takes what is put in front."""
    statuses = [FAILS]
    monkeypatch.setattr(confirm, "run_script", lambda source: (statuses[0], compile(source, "script", "exec") and ""))
    return statuses


def fingerprints(*wrongs: WrongRule) -> list[str]:
    confirmer = Confirmer(fails, Baseline(), ["opinfo"])
    records = confirmer.confirm([(one, "opinfo") for one in wrongs])
    assert all(record.fingerprint for record in records), "not confirmed"
    confirmer.settle()
    assert {finding.fingerprint for finding in confirmer.findings} == {record.fingerprint for record in records}
    return [record.fingerprint for record in records]


def test_a_product_of_a_wrong_rule_is_the_defect_of_that_rule() -> None:
    product = wrong("neg.default", "(S(1), P(sum))", "(S(0), P(sum))", SQUARE, ((Shard(1), Partial()),))
    first, second = fingerprints(ROWS, product)
    assert first == second


def test_no_further_split_of_a_trial_is_tried_that_is_too_slow() -> None:
    trials = []

    def slow(trial: Trial) -> Observation:
        trials.append(trial)
        return Observation(trial, Fate.SLOW, (None, None))

    (record,) = Confirmer(slow, Baseline(), ["opinfo"]).confirm([(ROWS, "opinfo")])
    assert len(trials) == 1
    assert record.confirmed.unsure
    assert "slow" in record.confirmed.why


CUT = wrong("neg.default", "(S(0), P(sum))", "(S(1), P(max))", SQUARE, ((Shard(0), Partial()),))


def tried_on(mesh: MeshSpec, baseline: Baseline, products: Sequence[WrongRule]) -> int:
    """Return how many trials on ``mesh`` it takes to confirm ROWS, and then ``products``."""
    trials = []

    def run(trial: Trial) -> Observation:
        trials.append(trial.mesh)
        return fails(trial)

    confirmer = Confirmer(run, baseline, ["opinfo"])
    (rows,) = confirmer.confirm([(ROWS, "opinfo")])
    records = confirmer.confirm([(one, "opinfo") for one in products])
    confirmer.settle()
    assert all(record.fingerprint for record in (rows, *records))
    assert sum(finding.occurrences for finding in confirmer.findings) == 1 + len(products)
    return trials.count(mesh)


def test_a_product_follows_from_a_rule_that_is_refuted_and_new() -> None:
    assert not tried_on(SQUARE, Baseline(), [CUT])


@pytest.mark.parametrize(
    ("product", "known"),
    [
        (CUT, True),
        (wrong("neg.default", "(S(1), P(sum))", "(S(1), P(max))", SQUARE, ((Shard(1), Partial()),)), False),
        (wrong("neg.default", "(S(0), P(sum))", "(S(0), P(max))", SQUARE, ((Shard(0), Partial()),)), False),
        (wrong("abs.default", "(S(0), P(sum))", "(S(1), P(max))", SQUARE, ((Shard(0), Partial()),)), False),
        (replace(CUT, verdict=VerdictKind.WRONG_VALUE), False),
        (replace(CUT, special=True), False),
    ],
    ids=["the rule is known", "another dim", "another result", "another op", "another verdict", "special values"],
)
def test_a_product_is_tried_where_no_new_rule_explains_it(product: WrongRule, known: bool) -> None:
    (name,) = fingerprints(ROWS)
    entry = BaselineEntry(
        fingerprint=name, op="aten.neg.default", family="opinfo", verdict="CRASH", rule="", mesh="2", summary="",
        reason="a test", torch=("2.13.0",), expires=date.max, replay=msgspec.json.encode(ROWS.trial).decode(),
    )  # fmt: skip
    assert tried_on(SQUARE, Baseline((entry,) if known else ()), [product])


@pytest.mark.parametrize(
    "other",
    [
        wrong("neg.default", "(S(0), P(sum))", "(S(0), P(sum))", SQUARE, ((Shard(0), Partial()),)),
        wrong("neg.default", "P(sum)", "R", FLAT, ((Partial(),),)),
        wrong("abs.default", "(S(0), R)", "(S(1), R)", SQUARE, ((Shard(0), Replicate()),)),
    ],
    ids=["no rule of it is wrong by itself", "another kind of rule", "another op"],
)
def test_another_defect_is_a_finding_of_its_own(other: WrongRule) -> None:
    # S(0) -> S(1) and S(0) -> S(0) are one kind: which tensor dim is cut does not tell defects apart
    sharded = wrong("neg.default", "P(max)", "S(0)", FLAT, ((Partial("max"),),))
    first, second = fingerprints(sharded, other)
    assert first != second


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (1, 2, 0)], ids=str)
def test_rules_that_look_alike_may_have_a_known_cause_and_none(order: tuple[int, ...]) -> None:
    """Each is told by what mends it, whichever comes first; the one that nothing mends is new."""
    rows, columns = (wrong("neg.default", f"S({dim})", "R", FLAT, ((Shard(dim),),)) for dim in (0, 1))
    known = Cause(
        fingerprint="c0", op="aten.neg.default", family="opinfo", verdict="CRASH", rule="", mesh="2", summary="",
        reason="a test", torch=("2.13.0",), expires=date.max, remedy="rows", title="", where=(),
        replay=msgspec.json.encode(rows.trial).decode(),
    )  # fmt: skip

    def run(trial: Trial, remedies: tuple[str, ...]) -> Observation:
        if "rows" in remedies and trial.combination == ((Shard(0),),):
            done = tuple(ProcessReport((rank,), Phase.DONE) for rank in range(2))
            return Observation(trial, Fate.COMPLETED, done)
        return fails(trial)

    attribution = Attribution(run, (known,), {"rows": Remedy("rows", "", nullcontext, ("aten.neg.*",))})
    confirmer = Confirmer(fails, Baseline((known,)), ["opinfo"], attribution=attribution)
    rules = [(rows, columns, rows)[number] for number in order]
    records = confirmer.confirm([(one, "opinfo") for one in rules])
    assert [record.fingerprint == "c0" for record in records] == [one is rows for one in rules]


def test_special_values_are_told_of_where_other_calls_refute_the_same_rule() -> None:
    special = replace(ROWS, special=True, verdict=VerdictKind.WRONG_VALUE)
    reports = [SampleReport(ROWS.rule.op, "one call", wrong=[ROWS]), SampleReport(ROWS.rule.op, "x", special=[special])]
    assert [one.rule for one in special_rules(reports)] == [ROWS.rule]
    again = SampleReport(ROWS.rule.op, "a call of the same shapes", special=[replace(ROWS, special=True)])
    assert not special_rules([reports[0], again]), "the values are not why"


def test_a_product_is_a_defect_of_its_own_where_its_rules_are_right() -> None:
    product = wrong("neg.default", "(S(0), S(0))", "(S(0), R)", SQUARE, ((Shard(0), Shard(0)),))
    strided = wrong("neg.default", "(S(0), S(0))", "(_S(0, 2), R)", SQUARE, ((Shard(0), Shard(0)),))
    assert len(set(fingerprints(product, strided))) == 1
    assert len(set(fingerprints(wrong("neg.default", "P(sum)", "R", FLAT, ((Partial(),),)), product))) == 2


def test_an_entry_whose_call_is_outside_the_boundary_is_not_run() -> None:
    case = OpCase("aten.neg.default", "os.system", (torch.ones(2),), family="opinfo")
    stored = msgspec.json.encode(trial_record(Trial(case, FLAT, ((Replicate(),),)))).decode()
    entry = BaselineEntry(
        fingerprint="f0", op=case.op, family="opinfo", verdict="CRASH", rule="", mesh="2", summary="", reason="known",
        torch=(), expires=date.max, replay=stored,
    )  # fmt: skip
    tried: list[Trial] = []

    def run(trial: Trial) -> Observation:
        tried.append(trial)
        return fails(trial)

    confirmer = Confirmer(run, Baseline((entry,)), ["opinfo"])
    confirmer.replay_known({case.op})
    (status,) = confirmer.statuses
    assert status.status == "untested"
    assert status.detail.startswith("calls os.system, which is no op of torch")
    assert not tried


@pytest.mark.parametrize("imports", [(), ("a_module_of_rules",)])
def test_what_its_script_did_is_said_of_a_finding(scripts: list[str], imports: tuple[str, ...]) -> None:
    scripts.insert(0, "broke with exit status 2")
    confirmer = Confirmer(fails, Baseline(), ["opinfo"], imports)
    confirmer.confirm([(ROWS, "opinfo")])
    confirmer.settle()
    (finding,) = confirmer.findings
    assert finding.script_status == "broke with exit status 2"
    assert ("IMPORTS = ['a_module_of_rules']" in finding.script) == bool(imports)


def test_what_its_script_does_not_show_is_withdrawn(scripts: list[str]) -> None:
    scripts.insert(0, GONE)
    confirmer = Confirmer(fails, Baseline(), ["opinfo"])
    (record,) = confirmer.confirm([(ROWS, "opinfo")])
    confirmer.settle()
    assert not confirmer.findings
    assert confirmer.withdrawn == {record.fingerprint}


def with_zeros_beside() -> WrongRule:
    """Return a wrong rule that two calls show, the second one on zeros."""
    trial = load_trial(ROWS.trial)
    zeros = replace(trial, case=replace(trial.case, args=(torch.zeros(4, 4),)))
    return replace(ROWS, others=(replace(ROWS, trial=trial_record(zeros), arguments="zeros"),))


def is_of_zeros(trial: Trial) -> bool:
    return not trial.case.args[0].any()  # type: ignore[attr-defined]


def test_another_call_confirms_a_rule_that_the_smallest_does_not() -> None:
    def run(trial: Trial) -> Observation:
        reports = tuple(ProcessReport((rank,), Phase.DONE) for rank in (0, 1))
        return fails(trial) if is_of_zeros(trial) else Observation(trial, Fate.COMPLETED, reports)

    confirmer = Confirmer(run, Baseline(), ["opinfo"])
    (record,) = confirmer.confirm([(with_zeros_beside(), "opinfo")])
    confirmer.settle()
    assert (record.confirmed.unsure, record.arguments) == (False, "zeros")
    assert [is_of_zeros(load_trial(finding.trial)) for finding in confirmer.findings] == [True]
    (record,) = confirmer.confirm([(ROWS, "opinfo")])
    assert record.confirmed.unsure


def test_the_script_of_another_call_takes_the_place_of_one_that_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter((GONE, FAILS))
    monkeypatch.setattr(confirm, "run_script", lambda source: (next(told), ""))
    confirmer = Confirmer(fails, Baseline(), ["opinfo"])
    (record,) = confirmer.confirm([(with_zeros_beside(), "opinfo")])
    confirmer.settle()
    (finding,) = confirmer.findings
    assert (finding.script_status, is_of_zeros(load_trial(finding.trial))) == (FAILS, True)
    assert confirmer.instead[record.fingerprint].arguments == "zeros"
    assert not confirmer.withdrawn


@pytest.mark.parametrize(
    ("whole", "record"),
    [
        ("no", (VerdictKind.CRASH, ["R"], [], True, False)),
        ("something else", (VerdictKind.WRONG_VALUE, ["S(0)"], ["S(1)"], False, True)),
        (None, (VerdictKind.WRONG_VALUE, ["S(0)"], ["S(1)"], False, True)),
    ],
    ids=["the same", "another exception", "none"],
)
def test_a_rule_of_an_op_that_never_runs_is_not_wrong(whole: str | None, record: tuple[object, ...]) -> None:
    def run(trial: Trial) -> Observation:
        text = whole if trial.combination == ((Replicate(),),) else "no"
        raised = None if text is None else Raised(Phase.FORWARD, "RuntimeError", f"{text}\n\nof {trial.combination}")
        phase = Phase.DONE if raised is None else Phase.FORWARD
        return Observation(trial, Fate.COMPLETED, tuple(ProcessReport((rank,), phase, raised) for rank in (0, 1)))

    confirmer = Confirmer(run, Baseline(), ["opinfo"])
    (told,) = confirmer.confirm([(replace(ROWS, verdict=VerdictKind.WRONG_VALUE, raised=""), "opinfo")])
    confirmer.settle()
    unsure = told.confirmed.unsure
    assert (told.verdict, told.input_placements, told.output_placements, told.fails, unsure) == record
    assert [load_trial(one.trial).combination for one in confirmer.findings] == [((Replicate(),),)] * (not unsure)


def test_what_no_remedy_mends_is_new_though_causes_look_like_it_and_like_each_other() -> None:
    (name,) = fingerprints(ROWS)
    causes = tuple(
        Cause(
            fingerprint=looks, op="aten.neg.default", family="opinfo", verdict="CRASH", rule="", mesh="2", summary="",
            reason="a test", torch=(), expires=date.max, replay="", remedy="mend", title="", where=(),
        )
        for looks in (name, unlike(name))
    )  # fmt: skip
    (record,) = Confirmer(fails, Baseline(causes), ["opinfo"]).confirm([(ROWS, "opinfo")])
    assert (record.fingerprint, record.known) == (unlike(unlike(name)), False)


@pytest.mark.parametrize("own", [True, False])
def test_an_entry_about_another_overload_explains_no_rule_of_the_users(own: bool) -> None:
    (name,) = fingerprints(ROWS)
    entry = BaselineEntry(
        fingerprint=name, op="aten.neg.out", family="opinfo", verdict="CRASH", rule="aten.neg.out: S(0),S(1)", mesh="2",
        summary="", reason="torch's", torch=(), expires=date.max, replay="",
    )  # fmt: skip
    rules = ["aten.neg.default"] * own
    (record,) = Confirmer(fails, Baseline((entry,)), ["opinfo"], own_rules=rules).confirm([(ROWS, "opinfo")])
    assert (record.fingerprint, record.known) == ((unlike(name), False) if own else (name, True))


@pytest.mark.parametrize(
    ("own", "twice_fails", "found"), [("flip", False, True), ("neg", False, False), ("flip", True, False)]
)
def test_what_passes_alone_is_tried_after_another_call_of_a_strategy_of_ones_own(
    own: str, twice_fails: bool, found: bool
) -> None:
    def alone(trial: Trial) -> Observation:
        done = tuple(ProcessReport((rank,), Phase.DONE) for rank in (0, 1))
        return Observation(trial, Fate.COMPLETED, done)

    def afresh(trial: Trial) -> Observation:
        changes = trial.case.args[1]
        return fails(trial) if changes or twice_fails else alone(trial)

    x = torch.arange(16.0).reshape(4, 4)
    case = OpCase("aten.flip.default", "torch.ops.aten.flip.default", (x, [0]), family="opinfo")
    accused = replace(
        wrong("flip.default", "S(0)", "S(0)", FLAT, ((Shard(0),),)),
        trial=trial_record(Trial(case, FLAT, ((Shard(0),),))),
    )
    confirmer = Confirmer(alone, Baseline(), ["opinfo"], own_rules=[f"aten.{own}.default"], afresh=afresh)
    (record,) = confirmer.confirm([(accused, "opinfo")])
    confirmer.settle()
    assert [finding.verdict for finding in confirmer.findings] == [VerdictKind.STALE_CACHE] * found
    assert record.confirmed.status == (CONFIRMED if found else UNCONFIRMED)


@pytest.mark.parametrize(
    ("op", "own", "whole"),
    [("matmul.default", "", True), ("mm.default", "", False), ("mm.default", "aten.mm.default", True)],
)
def test_a_rule_of_a_composite_op_or_of_the_users_is_shown_in_inference_mode(op: str, own: str, whole: bool) -> None:
    tried: list[bool] = []

    def run(trial: Trial) -> Observation:
        tried.append(trial.case.in_inference_mode)
        done = tuple(ProcessReport((rank,), Phase.DONE) for rank in (0, 1))
        return fails(trial) if trial.case.in_inference_mode else Observation(trial, Fate.COMPLETED, done)

    case = OpCase(f"aten.{op}", f"torch.ops.aten.{op}", (torch.ones(4, 4), torch.ones(4, 4)), family="opinfo")
    trial = trial_record(Trial(case, FLAT, ((Shard(0),), (Replicate(),))))
    accused = replace(wrong(op, "S(0), R", "S(1)", FLAT, ((Shard(0),),)), trial=trial)
    confirmer = Confirmer(run, Baseline(), ["opinfo"], own_rules=[own] if own else [])
    (record,) = confirmer.confirm([(accused, "opinfo")])
    assert bool(record.fingerprint) == (True in tried) == whole


def test_few_rules_of_an_op_are_tried_after_other_calls() -> None:
    trials = []

    def alone(trial: Trial) -> Observation:
        trials.append(trial)
        return Observation(trial, Fate.COMPLETED, tuple(ProcessReport((rank,), Phase.DONE) for rank in (0, 1)))

    x = torch.arange(16.0).reshape(4, 4)
    case = OpCase("aten.flip.default", "torch.ops.aten.flip.default", (x, [0]), family="opinfo")

    def fresh_trials(rules: int) -> int:
        trials.clear()
        accused = replace(
            ROWS, rule=Rule(case.op, ("S(0)",), ("S(0)",)), trial=trial_record(Trial(case, FLAT, ((Shard(0),),)))
        )
        ran = Observation(
            Trial(case, FLAT, ((Shard(0),),)),
            Fate.COMPLETED,
            tuple(ProcessReport((rank,), Phase.DONE) for rank in (0, 1)),
        )
        confirmer = Confirmer(
            lambda trial: replace(ran, trial=trial), Baseline(), ["opinfo"], own_rules=[case.op], afresh=alone
        )
        confirmer.confirm([(accused, "opinfo")] * rules)
        return len(trials)

    assert 0 < fresh_trials(1) < fresh_trials(4) == fresh_trials(9)


def test_records_and_findings_do_not_depend_on_the_number_of_lanes() -> None:
    class Scripted(PoolSet):
        def run_alone(self, trial: Trial) -> Observation:
            time.sleep(0.02 if trial.case.op == "aten.neg.default" else 0.0)  # others overtake it
            return fails(trial)

    ops = ("neg.default", "abs.default", "sin.default", "neg.default")
    rules = [wrong(op, "S(0)", f"S({n})", FLAT, ((Shard(0),),)) for n, op in enumerate(ops)]
    told = []
    for lanes in (None, *(Lanes(lambda: Scripted(Pool), count) for count in (1, 2, 3))):
        confirmer = Confirmer(fails, Baseline(), ["opinfo"], lanes=lanes)
        records = confirmer.confirm([(one, "opinfo") for one in rules])
        confirmer.settle()
        told.append((records, confirmer.findings, confirmer.errors))
    assert all(each == told[0] for each in told)
    assert len({record.fingerprint for record in told[0][0]}) == 3
