"""The gate's decision follows from the run and the baseline alone; each input that matters changes it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date, timedelta

import pytest
from plain_records import EMBEDDING, a_finding, a_run
from run_factory import BY_LEVEL_1, make_op_rules, make_rules

from verifier.gate.baseline import Baseline
from verifier.gate.decision import GateDecision, decide, decide_all
from verifier.gate.entries import NOT_EXPLAINED
from verifier.gate.evidence import Evidence
from verifier.gate.question import Question
from verifier.gate.text import as_json, render
from verifier.records.schema import ConfirmationRecord, FindingRecord, RunRecord

TODAY = date(2026, 5, 20)


def a_baseline(*fingerprints: str, **changes: object) -> Baseline:
    """Return a baseline that knows the findings of these fingerprints until the day after today."""
    made = Baseline().updated([a_run(*(a_finding(name) for name in fingerprints))], TODAY)
    values = {"reason": "pytorch#190063", "expires": TODAY + timedelta(days=1), **changes}
    return Baseline(tuple(replace(entry, **values) for entry in made.entries))  # type: ignore[arg-type]


def sorted_out(decision: GateDecision) -> dict[str, list[str]]:
    lists = {name: getattr(decision, name) for name in ("new", "known", "fixed", "expired", "untested")}
    return {name: [item.fingerprint for item in items] for name, items in lists.items() if items}


# ------------------------------------------------------------------------------------------------------ the five lists
def test_clean_run_with_an_empty_baseline_passes() -> None:
    decision = decide(a_run(), Baseline(), TODAY)
    assert (sorted_out(decision), decision.exit_status, decision.unverified) == ({}, 0, "")


def test_known_finding_passes_and_its_fingerprint_is_all_that_counts() -> None:
    baseline = a_baseline("a1")
    moved = a_finding("a1", message="another text", mesh="2x2", dtype="float32", known=False)
    decision = decide(a_run(moved), baseline, TODAY)
    assert (sorted_out(decision), decision.exit_status) == ({"known": ["a1"]}, 0)
    other = decide(a_run(replace(moved, fingerprint="a2")), baseline, TODAY)
    assert (sorted_out(other), other.exit_status) == ({"new": ["a2"], "untested": ["a1"]}, 1)


def test_what_the_run_took_for_known_does_not_count() -> None:
    decision = decide(a_run(a_finding("a1", known=True, reason="old baseline")), Baseline(), TODAY)
    assert (sorted_out(decision), decision.exit_status) == ({"new": ["a1"]}, 1)


@pytest.mark.parametrize(
    ("days", "where", "status"),
    [(-1, "expired", 1), (0, "known", 0), (1, "known", 0)],
    ids=["past", "last day", "future"],
)
def test_entry_expires_after_its_day(days: int, where: str, status: int) -> None:
    baseline = a_baseline("a1", expires=TODAY + timedelta(days=days))
    decision = decide(a_run(a_finding("a1")), baseline, TODAY)
    assert (sorted_out(decision), decision.exit_status) == ({where: ["a1"]}, status)


@pytest.mark.parametrize("reason", ["", "  ", NOT_EXPLAINED, f" {NOT_EXPLAINED}\n"])
def test_entry_without_a_reason_of_a_persons_excuses_nothing(reason: str) -> None:
    decision = decide(a_run(a_finding("a1")), a_baseline("a1", reason=reason), TODAY)
    assert (sorted_out(decision), decision.exit_status) == ({"new": ["a1"]}, 1)
    assert decision.new[0].note == "its baseline entry has no reason of a person's"
    assert "write in the baseline why what is new is accepted: 1 entry without a reason" in render(decision)


def test_entry_that_failed_when_it_was_replayed_is_known_or_expired() -> None:
    run = a_run(known={"a1": "known"})
    assert sorted_out(decide(run, a_baseline("a1"), TODAY)) == {"known": ["a1"]}
    late = decide(run, a_baseline("a1", expires=date(2026, 1, 1)), TODAY)
    assert (sorted_out(late), late.exit_status) == ({"expired": ["a1"]}, 1)
    assert late.expired[0].message == "weight.grad row 3: got 0.0, expected 1.7"


def test_not_observed_is_not_fixed() -> None:
    baseline = a_baseline("a1", "b2", "c3")
    decision = decide(a_run(known={"a1": "fixed", "b2": "untested"}), baseline, TODAY)
    assert (sorted_out(decision), decision.exit_status) == ({"fixed": ["a1"], "untested": ["b2", "c3"]}, 0)


def of_torch(version: str, run: RunRecord) -> RunRecord:
    return replace(run, header=replace(run.header, versions={"torch": version}))


def test_what_another_torch_has_mended_is_not_to_be_dropped() -> None:
    seen, since = a_baseline("a1"), a_baseline("a1", mended=("2.15.0",))
    passes = of_torch("2.15.0+cpu", a_run(known={"a1": "fixed"}))
    for baseline in (seen, since):
        decision = decide(passes, baseline, TODAY)
        assert (sorted_out(decision), decision.exit_status) == ({}, 0)
        assert [item.note for item in decision.mended] == ["in torch 2.15.0; seen under 2.13.0"]
        assert "drop what is fixed" not in render(decision)
        assert "1 mended" in render(decision)
    assert sorted_out(decide(of_torch("2.13.0", passes), since, TODAY)) == {"fixed": ["a1"]}


def test_what_a_torch_has_mended_is_new_if_it_is_back() -> None:
    fails = of_torch("2.15.0", a_run(a_finding("a1")))
    back = decide(fails, a_baseline("a1", mended=("2.15.0",)), TODAY)
    assert (sorted_out(back), back.exit_status) == ({"new": ["a1"]}, 1)
    assert back.new[0].note == "it was mended in torch 2.15.0, and is back"
    assert "without a reason" not in render(back)
    assert sorted_out(decide(fails, a_baseline("a1"), TODAY)) == {"known": ["a1"]}


def test_what_was_not_checked_under_a_new_torch_is_said_to_be_so() -> None:
    fails, silent = (of_torch("2.14.1", run) for run in (a_run(a_finding("a1")), a_run()))
    assert decide(fails, a_baseline("a1"), TODAY).known[0].note.endswith("; not seen under torch 2.14.1 before")
    assert decide(silent, a_baseline("a1"), TODAY).untested[0].note.endswith("; not checked under torch 2.14.1 yet")
    assert "torch" not in decide(silent, a_baseline("a1", mended=("2.14.1",)), TODAY).untested[0].note


def test_met_again_is_not_fixed_even_if_its_replay_passed() -> None:
    decision = decide(a_run(a_finding("a1"), known={"a1": "fixed"}), a_baseline("a1"), TODAY)
    assert sorted_out(decision) == {"known": ["a1"]}


@pytest.mark.parametrize("known", [{}, {"a1": "untested"}, {"a1": "fixed"}])
def test_day_of_an_entry_that_does_not_fail_here_accuses_nobody(known: dict[str, str]) -> None:
    decision = decide(a_run(known=known), a_baseline("a1", expires=date(2020, 1, 1)), TODAY)
    assert (decision.expired, decision.exit_status) == ((), 0)


def test_untested_says_why() -> None:
    other_family = replace(a_baseline("a1").entries[0], fingerprint="b2", family="torchrec")
    other_op = replace(other_family, fingerprint="c3", family="embedding", op="aten.sum.default")
    baseline = Baseline((*a_baseline("a1").entries, other_family, other_op))
    notes = {item.fingerprint: item.note for item in decide(a_run(), baseline, TODAY).untested}
    assert notes == {
        "a1": "was not tried again",
        "b2": "family torchrec was not selected",
        "c3": "aten.sum.default was not tried",
    }


# --------------------------------------------------------------------------------------------- rules of the user's own
def under(run: RunRecord, *imports: str, own_rules: tuple[str, ...] = (EMBEDDING,)) -> RunRecord:
    """Return ``run`` as one whose imports registered rules."""
    return replace(run, header=replace(run.header, imports=list(imports), own_rules=list(own_rules)))


def test_entry_about_a_rule_of_torchs_does_not_explain_the_users_own_rule() -> None:
    decision = decide(under(a_run(a_finding("a1")), "my_rules.py"), a_baseline("a1"), TODAY)
    assert (sorted_out(decision), decision.exit_status) == ({"new": ["a1"], "untested": ["a1"]}, 1)
    assert decision.new[0].note == "not in the baseline; it is about the rules of --import my_rules.py"
    said = "--import my_rules.py registers the rules of aten.embedding.default in the place of torch's"
    assert decision.untested[0].note == said


def test_entry_about_a_backward_rule_goes_by_the_op_of_the_rule() -> None:
    backward = "aten.embedding_dense_backward.default"
    entry = replace(a_baseline("a1").entries[0], rule=f"{backward}: R,S(0)")
    run = under(a_run(a_finding("a1", rule=entry.rule)), "my_rules.py", own_rules=(backward,))
    assert sorted_out(decide(run, Baseline((entry,)), TODAY)) == {"new": ["a1"], "untested": ["a1"]}


def test_torchs_own_defects_stay_known_under_imports_that_leave_the_op_alone() -> None:
    run = under(a_run(a_finding("a1")), "my_rules.py", own_rules=("aten.mm.default",))
    assert sorted_out(decide(run, a_baseline("a1"), TODAY)) == {"known": ["a1"]}


def test_update_keeps_the_users_finding_apart_from_torchs_of_the_same_look() -> None:
    run = under(a_run(a_finding("a1")), "my_rules.py")
    torchs = a_baseline("a1")
    updated = torchs.updated([run], TODAY)
    assert [(entry.imports, entry.explained) for entry in updated.entries] == [((), True), (("my_rules.py",), False)]
    reasons = {(): "torch's", ("my_rules.py",): "ours"}
    explained = Baseline(tuple(replace(entry, reason=reasons[entry.imports]) for entry in updated.entries))
    assert sorted_out(decide(run, explained, TODAY)) == {"known": ["a1"], "untested": ["a1"]}
    assert sorted_out(decide(a_run(a_finding("a1")), explained, TODAY)) == {"known": ["a1"], "untested": ["a1"]}
    other = under(a_run(a_finding("a1")), "other_rules.py")
    assert sorted_out(decide(other, explained, TODAY)) == {"new": ["a1"], "untested": ["a1", "a1"]}


# ------------------------------------------------------------------------------------------------------------- level 1
def a_rules_run(*findings: FindingRecord, **changes: object) -> RunRecord:
    made = a_run(*findings, **({"rules": make_rules()} | changes))  # type: ignore[arg-type]
    made.header = replace(made.header, families=["opinfo"])
    return made


def a_rules_finding(fingerprint: str = "a1") -> FindingRecord:
    return a_finding(fingerprint, op="aten.renorm.default", family="opinfo", level=1, confirmed=BY_LEVEL_1, mesh="2")


def test_finding_of_level_1_is_new_or_known_as_any_other() -> None:
    run = a_rules_run(a_rules_finding())
    decision = decide(run, Baseline(), TODAY)
    assert (sorted_out(decision), decision.exit_status) == ({"new": ["a1"]}, 1)
    decision = decide(run, a_baseline("a1"), TODAY)
    assert (sorted_out(decision), decision.exit_status) == ({"known": ["a1"]}, 0)
    assert "412 trials and rules, 36 of them without evidence" in render(decision)


def test_untested_entry_of_level_1_says_why() -> None:
    (entry,) = a_baseline("a1").entries
    ops = {"a1": "aten.renorm.default", "b2": "aten.bernoulli.default", "c3": "aten.exp.default"}
    baseline = Baseline(tuple(replace(entry, fingerprint=name, op=op, family="opinfo") for name, op in ops.items()))
    notes = {item.fingerprint: item.note for item in decide(a_rules_run(), baseline, TODAY).untested}
    assert notes == {
        "a1": "was not tried again",
        "b2": "aten.bernoulli.default is not testable at level 1: it draws random numbers",
        "c3": "aten.exp.default was not tried",
    }
    on_meshes = decide(a_run(), baseline, TODAY).untested
    assert {item.note for item in on_meshes} == {"family opinfo was not selected"}


def test_missing_and_unconfirmed_rules_alone_accuse_nobody() -> None:
    run = a_rules_run(rules=make_rules(ops={"sum": make_rules().ops["sum"], "neg": make_op_rules()}))
    assert decide(run, Baseline(), TODAY).exit_status == 0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"trials": 0, "counts": {}}, "nothing was tested: the run has no trials and no rules"),
        ({"trials": 5, "counts": {"INCONCLUSIVE": 5}}, "nothing was tested: all 5 trials and rules are unsupported"),
        ({"complete": False}, "the run is incomplete: it stopped before it had reached every op and mesh"),
    ],
)
def test_rules_that_were_not_verified_never_pass(changes: dict[str, object], why: str) -> None:
    decision = decide(a_rules_run(**changes), Baseline(), TODAY)  # type: ignore[arg-type]
    assert decision.exit_status == 2
    assert decision.unverified.startswith(why)


# --------------------------------------------------------------------------------------------------------- exit status
@pytest.mark.parametrize(
    ("changes", "status", "why"),
    [
        ({"trials": 0, "counts": {}}, 2, "nothing was tested: the run has no trials"),
        (
            {"trials": 9, "counts": {"UNSUPPORTED": 4, "INCONCLUSIVE": 5}},
            2,
            "nothing was tested: all 9 trials are unsupported or inconclusive",
        ),
        ({"tool_errors": ["KeyError: 'x'"]}, 2, "the verifier itself failed, with 1 distinct error"),
        ({"counts": {"PASS": 3, "TOOL_ERROR": 1}}, 2, "the verifier itself failed, with 1 distinct error"),
        ({"complete": False}, 2, "the run is incomplete: it stopped before it had reached every mesh"),
        ({"counts": {"PASS": 1, "INCONCLUSIVE": 411}}, 0, ""),
    ],
)
def test_what_was_not_verified_never_passes(changes: dict[str, object], status: int, why: str) -> None:
    decision = decide(a_run(**changes), Baseline(), TODAY)  # type: ignore[arg-type]
    assert (decision.exit_status, decision.unverified) == (status, why)


def test_new_finding_is_a_fact_even_if_the_run_was_interrupted() -> None:
    assert decide(a_run(a_finding(), complete=False), Baseline(), TODAY).exit_status == 1
    assert decide(a_run(a_finding(), complete=False), a_baseline("a1"), TODAY).exit_status == 2


def test_error_of_ours_outranks_findings() -> None:
    assert decide(a_run(a_finding(), tool_errors=["KeyError: 'x'"]), Baseline(), TODAY).exit_status == 2


# ------------------------------------------------------------------------------------------------------------- writing
def test_text_of_a_new_finding_ends_with_what_to_do() -> None:
    baseline = Baseline((*a_baseline("b2").entries, *a_baseline("c3", expires=date(2026, 1, 1)).entries))
    run = a_run(a_finding("a1"), a_finding("c3"), known={"b2": "fixed"})
    assert render(decide(run, baseline, TODAY)).splitlines() == [
        "gate on python -m verifier run, torch 2.13.0",
        "  judged   20260520T131502-048211-9f3a1c: 1 op on 4, no imports: python -m verifier run",
        "",
        "NEW a1 WRONG_GRADIENT: not in the baseline",
        "  weight.grad row 3: got 0.0, expected 1.7",
        "    in aten.embedding on mesh (4,)",
        "    likely: padding_idx is used as a local row index",
        "    reproduce: python -m verifier replay a1",
        "",
        "EXPIRED c3 WRONG_GRADIENT: expired on 2026-01-01",
        "  weight.grad row 3: got 0.0, expected 1.7",
        "    in aten.embedding on mesh (4,)",
        "    likely: padding_idx is used as a local row index",
        "    reproduce: python -m verifier replay c3",
        "  reason: pytorch#190063",
        "",
        "fixed b2 WRONG_GRADIENT in aten.embedding.default on mesh 4: tried again, and passed",
        "",
        "412 trials, 36 of them without evidence; 1 new, 1 expired, 0 known, 1 fixed, 0 untested",
        "next: fix what is new, or accept it: `python -m verifier gate --update`, then give each a reason",
        "next: fix what has expired, or move its `expires` in the baseline, with a reason that still holds",
        "next: drop what is fixed from the baseline: `python -m verifier gate --update`",
        "gate failed: new or expired findings (exit status 1)",
    ]


def test_what_is_fixed_by_an_import_is_said_to_be_so() -> None:
    run = a_run(known={"b2": "fixed"})
    imported = replace(run, header=replace(run.header, imports=["a.rules", "b.py"]))
    said = render(decide(imported, a_baseline("b2"), TODAY))
    assert (
        "next: these entries passed because of --import a.rules --import b.py; if every run will have it, remove them: "
        "`python -m verifier gate --update`\n"
    ) in said
    assert "drop what is fixed" in render(decide(run, a_baseline("b2"), TODAY))


def test_unconfirmed_finding_counts_and_is_said_to_be_so() -> None:
    decision = decide(
        a_run(a_finding(confirmed=ConfirmationRecord("unconfirmed", why="did not fail a second time"))),
        Baseline(),
        TODAY,
    )
    assert decision.exit_status == 1
    assert "NEW a1 WRONG_GRADIENT: not in the baseline; unconfirmed: did not fail a second time\n" in render(decision)


def test_text_of_a_pass_names_what_is_known_and_untested() -> None:
    lines = render(decide(a_run(a_finding("a1")), a_baseline("a1", "b2"), TODAY)).splitlines()
    place = f"WRONG_GRADIENT in {EMBEDDING} on mesh 4"
    assert f"known a1 {place}: until 2026-05-21; pytorch#190063" in lines
    assert f"untested b2 {place}: was not tried again" in lines
    assert lines[-1] == "gate passed: nothing new (exit status 0)"


def test_text_of_what_could_not_be_verified_says_why() -> None:
    incomplete = render(decide(a_run(complete=False), Baseline(), TODAY)).splitlines()
    assert incomplete[-2].startswith(
        "next: the run is incomplete: it stopped before it had reached every mesh; run again"
    )
    assert incomplete[-1] == "gate could not verify (exit status 2)"
    broken = render(decide(a_run(tool_errors=["KeyError: 'x'"]), Baseline(), TODAY))
    assert "TOOL_ERROR KeyError: 'x'\n" in broken
    assert "next: report the error of the verifier" in broken


def test_entry_that_only_failed_its_replay_still_says_how_to_reproduce_it() -> None:
    decision = decide(a_run(known={"a1": "known"}), a_baseline("a1", expires=date(2026, 1, 1)), TODAY)
    assert "  reproduce: python -m verifier replay a1\n" in render(decision)


def test_json_says_the_same_and_does_not_depend_on_the_order_of_findings() -> None:
    findings = [a_finding("b2"), a_finding("a1")]
    baseline = a_baseline("c3")
    written = as_json(decide(a_run(*findings), baseline, TODAY))
    assert written == as_json(decide(a_run(*reversed(findings)), baseline, TODAY))
    content = json.loads(written)
    assert list(content)[:3] == ["format_version", "exit_status", "unverified"]
    assert (content["format_version"], content["exit_status"]) == (8, 1)
    assert [item["fingerprint"] for item in content["new"]] == ["a1", "b2"]
    assert content["untested"][0]["expires"] == "2026-05-21"


@pytest.mark.parametrize(
    ("op", "own", "where", "status"),
    [
        ("aten.nan_to_num.default", True, "new", 1),
        ("aten.nan_to_num.default", False, "special", 0),
        ("aten.exp.default", True, "special", 0),
    ],
)
def test_special_values_count_for_a_users_rule_of_an_op_that_exists_for_them(
    op: str, own: bool, where: str, status: int
) -> None:
    run = a_run(a_finding("a1", op=op, verdict="SPECIAL_VALUE", rule=f"{op}: P(sum)"))
    run = replace(run, header=replace(run.header, imports=["mine.py"], own_rules=[op] if own else []))
    decision = decide(run, Baseline(), TODAY)
    assert ([item.fingerprint for item in getattr(decision, where)], decision.exit_status) == (["a1"], status)
    assert decide(run, Baseline(), TODAY, special_values=True).exit_status == 1


def test_lines_of_a_strategy_that_no_call_reached_are_named_and_fail_nothing() -> None:
    op = "aten.flip.default"
    rules = make_rules(ops={"flip": make_op_rules(overloads=[op], unreached=["a.py:3", "a.py:14"])})
    status = decide(a_run(), Baseline(), TODAY).exit_status
    for patterns, named in (((), True), ((op,), True), (("aten.neg.default",), False)):
        decision = decide_all(Evidence(Question(patterns), (a_run(rules=rules),)), Baseline(), TODAY)
        text = render(decision)
        assert (f"\nunreached {op}: no call reaches a.py:3, 14\n" in text) is named
        assert ("next: nothing is proved of lines that no call reaches" in text) is named
        assert decision.exit_status == status
