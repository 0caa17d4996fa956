"""Which findings a rule of the imports causes, although torch has the same wrong rule."""

from __future__ import annotations

import pytest
from run_factory import make_finding

from verifier.cli.own_rules import is_caused_by_rule_of
from verifier.records.schema import FindingRecord

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
