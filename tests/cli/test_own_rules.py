"""Which findings a rule of the imports causes, although torch has the same wrong rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from run_factory import make_finding, make_op_rules, make_rules, make_rules_run, make_run, make_wrong_rule

from verifier.cli.own_rules import MANY, kept_off_ranks, why_unproved
from verifier.findings.torchs_own import explained, is_caused_by_rule_of
from verifier.records.schema import ConfirmationRecord, FindingRecord

MINE, OTHER = "aten.cumsum.default", "aten.flip.default"


def finding(rule: str, phase: str = "forward", given: str = "S(0)", op: str = MINE) -> FindingRecord:
    return make_finding(op=op, rule=rule, phase=phase, input_placements={"self": given})


@pytest.mark.parametrize(
    "one",
    [
        finding(f"{MINE}: S(0)"),
        finding(f"{MINE}: S(0)", phase="gather"),
        finding(f"{MINE}: at any placements"),
        finding(f"{MINE}: S(0),S(0)", phase="backward", op=OTHER),
    ],
)
def test_an_op_that_fails_on_the_placements_it_was_given_fails_by_its_rule(one: FindingRecord) -> None:
    assert is_caused_by_rule_of([MINE], one)
    assert not is_caused_by_rule_of(["aten.exp.default"], one)


@pytest.mark.parametrize(
    "one",
    [
        finding(f"{OTHER}: S(0)", phase="backward"),
        finding(f"{MINE}: S(0)", phase="backward"),
        finding(f"{MINE}: R", given="P(product)"),
        finding(f"{MINE}: R", given="R"),
    ],
    ids=["another op", "gradients", "redistributed before", "all replicated"],
)
def test_what_other_code_of_torch_may_cause_is_not_blamed_on_the_rule(one: FindingRecord) -> None:
    assert not is_caused_by_rule_of([MINE], one)


def test_ranks_try_no_other_op_of_many_if_level_1_has_accused_one() -> None:
    few, many = [f"op{number}" for number in range(MANY)], [f"op{number}" for number in range(MANY + 1)]
    assert kept_off_ranks(few, ("op3",)) == ("op3",)
    assert kept_off_ranks(many, ("op3",)) == tuple(many)
    assert kept_off_ranks(many, ()) == ()


def numbered(*numbers: int) -> list[FindingRecord]:
    return [replace(finding(f"{OTHER}: S(0)"), fingerprint=str(number)) for number in numbers]


def test_findings_are_tried_until_so_many_are_left_however_many_are_explained() -> None:
    tried: list[str] = []

    def explain(block: Sequence[FindingRecord]) -> dict[str, str]:
        tried.extend(one.fingerprint for one in block)
        return {one.fingerprint: "torch" for one in block if int(one.fingerprint) < 7}

    assert set(explained(numbered(*range(8)), 2, explain)) == {str(number) for number in range(7)}
    tried.clear()
    assert explained(numbered(7, 8, 0, 1), 2, explain) == {}
    assert tried == ["7", "8"]


def test_what_one_reason_explains_is_not_tried_for_another() -> None:
    asked: list[str] = []

    def first(block: Sequence[FindingRecord]) -> dict[str, str]:
        return {"1": "torch alone"}

    def second(block: Sequence[FindingRecord]) -> dict[str, str]:
        asked.extend(one.fingerprint for one in block)
        return {"2": "a remedy"}

    assert explained(numbered(1, 2), 6, first, second) == {"1": "torch alone", "2": "a remedy"}
    assert asked == ["2"]


def test_trials_that_fail_prove_nothing_of_a_rule_if_no_finding_is_left_of_them() -> None:
    crashes = make_run(counts_by_op={MINE: {"CRASH": 3, "UNSUPPORTED": 2}}, findings=[])
    assert "none of its 5 trials and rules passes" in why_unproved(MINE, [crashes])
    assert "all of its 2 trials" in why_unproved(MINE, [replace(crashes, counts_by_op={MINE: {"UNSUPPORTED": 2}})])
    assert why_unproved(MINE, [replace(crashes, findings=[finding(f"{MINE}: S(0)")])]) == ""
    assert why_unproved(MINE, [crashes, replace(crashes, counts_by_op={MINE: {"PASS": 1}})]) == ""
    assert "has no samples" in why_unproved(MINE, [])


def test_what_level_1_proves_of_an_op_does_not_count_where_ranks_leave_a_refuted_rule_open() -> None:
    unsure = make_wrong_rule("", op=MINE, confirmed=ConfirmationRecord("unconfirmed", why="it is UNSUPPORTED"))
    rules = make_rules_run(make_rules(ops={"mine": make_op_rules(overloads=[MINE], unconfirmed=[unsure])}))
    level_1 = replace(rules, counts_by_op={MINE: {"PASS": 2, "INCONCLUSIVE": 1}}, findings=[])
    ranks = make_run(counts_by_op={MINE: {"UNSUPPORTED": 4}}, findings=[])
    assert "all of its 4 trials" in why_unproved(MINE, [level_1, ranks])
    assert why_unproved(MINE, [level_1, replace(ranks, counts_by_op={MINE: {"PASS": 1}})]) == ""
    assert why_unproved(MINE, [replace(level_1, rules=make_rules(ops={"mine": make_op_rules()})), ranks]) == ""
