"""The ops that embedding bags and norms of rows are made of: their rules hold, and a wrong one is found out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from bag_mutants import MUTANTS, OPS, BagMutant, check, sample_of, texts

from verifier.torch_internals.registries import replaced_sharded_op


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with ExitStack() as stack:
        for sharded in OPS.values():
            stack.enter_context(replaced_sharded_op(sharded))
        yield


@pytest.mark.parametrize(
    ("name", "origin", "expected"),
    [
        ("sum_bags", "sum, sample weights", {
            "S(0), R, R, R, R -> P(sum)", "S(1), R, R, R, R -> S(1)", "R, S(0), R, R, S(0) -> P(sum)",
            "R, R, S(0), S(0), R -> S(0)", "P(avg), R, R, R, R -> P(avg)", "R, R, R, R, P(sum) -> P(sum)",
        }),
        ("sum_bags", "mean", {
            "S(0), R, R, R, R -> P(sum)", "R, S(0), R, R, R -> P(sum)", "R, R, S(0), S(0), S(0) -> S(0)",
        }),
        ("max_bags", "max, padding", {
            "S(0), R, R, R, R -> P(max)", "R, S(0), R, R, R -> P(max)", "R, R, S(0), S(0), S(0) -> S(0)",
            "P(max), R, R, R, R -> P(max)",
        }),
        ("first_of_max", "padding", {
            "S(0), R, R, R, R -> P(min)", "S(1), R, R, R, S(1) -> S(1)", "R, S(0), R, R, R -> P(min)",
            "R, R, S(0), S(0), S(0) -> S(0)",
        }),
        ("count", "padding", {
            "S(0), R, R -> P(sum)", "R, S(0), S(0) -> S(0)",
        }),
        ("weight_gradient", "padding, sample weights", {
            "S(1), R, R, R -> S(1)", "S(0), R, R, R -> P(sum)", "R, S(0), S(0), S(0) -> P(sum)",
            "R, R, R, P(avg) -> P(avg)",
        }),
        ("max_gradient", "max_gradient", {
            "S(1), S(1) -> S(1)", "S(0), S(0) -> P(sum)", "P(sum), R -> P(sum)",
        }),
        ("sample_gradient", "padding", {
            "S(1), S(1), R, R -> P(sum)", "R, S(0), R, R -> P(sum)", "S(0), R, R, R -> P(sum)",
            "R, R, S(0), S(0) -> S(0)",
        }),
        ("sum_bags", "sum, aligned", {
            "R, S(0), S(0), S(0), S(0) -> S(0)",
        }),
        ("max_bags", "max, aligned", {
            "R, S(0), S(0), S(0), S(0) -> S(0)",
        }),
        ("row_powers", "1-norm", {
            "S(1), R -> P(sum)", "S(0), R -> P(sum)",
        }),
        ("row_powers", "inf-norm", {
            "S(1), R -> P(max)", "S(0), R -> P(max)",
        }),
    ],
    ids=["sum", "mean", "max", "first of max", "count", "weight gradient", "max gradient", "sample gradient",
         "aligned sum", "aligned max", "powers", "largest"],
)  # fmt: skip
def test_rules_hold(name: str, origin: str, expected: set[str]) -> None:
    report = check(OPS[name], sample_of(name, origin))
    assert list(report.wrong) == []
    assert expected <= texts(report.confirmed)
    assert any(rule.inputs[0].startswith("(") for rule in report.confirmed)  # products of rules as well


@pytest.mark.parametrize(("name", "origin"), [("sum_bags", "mean, aligned"), ("max_bags", "max, aligned")])
def test_every_product_of_rules_of_bags_with_their_positions_holds(name: str, origin: str) -> None:
    report = check(OPS[name], sample_of(name, origin), products=400)
    assert list(report.wrong) == []
    both = "(S(0), S(0))"
    assert f"(R, R), {both}, {both}, {both}, {both} -> {both}" in texts(report.confirmed)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault)
def test_what_is_wrong_is_accused(mutant: BagMutant) -> None:
    assert mutant.accused in mutant.accusations()


def test_every_op_has_a_mutant() -> None:
    assert {mutant.name for mutant in MUTANTS} == set(OPS)
