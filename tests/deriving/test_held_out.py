"""Calls that are held out, to refute what was derived."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from derived_calls import OPTIONS, aten, evidence, here, reductions, said, way

from verifier.deriving.learning.changes import crossed
from verifier.deriving.learning.generalise import generalise
from verifier.deriving.learning.held_out import refuting


def test_a_condition_that_goes_with_the_right_one_by_chance_is_refuted_by_crossed_arguments() -> None:
    ways = [
        way(aten.slice.Tensor, lambda tensor, a, b, c: (tensor(a, b), 1, None, None)),
        way(aten.slice.Tensor, lambda tensor, a, b, c: (tensor(a, b, c), 2, None, None)),
        way(aten.slice.Tensor, lambda tensor, a, b, c: (tensor(a, b), 1, 1, -1)),
        way(aten.slice.Tensor, lambda tensor, a, b, c: (tensor(a, b, c), 2, 1, -1)),
    ]
    calls = evidence(*ways)
    (by_chance,) = [rule for rule in said(generalise(calls)) if "start is None" in rule]
    assert "end is None" not in by_chance
    more = crossed(calls, ways)
    for _ in range(3):  # of two conditions that go together the other one is next
        found = list(refuting(generalise(calls).rules, here(more), OPTIONS))
        assert all(call.rare for call in found)
        calls = [*calls, *found]
    assert not found
    assert any(rule.endswith("if start is None if end is None") for rule in said(generalise(calls)))


def test_a_factor_of_another_call_that_rounds_refutes_no_linear_rule() -> None:
    def call(tensor: Callable[..., torch.Tensor], a: int, b: int, c: int) -> tuple[object, ...]:
        return tensor(a, c), tensor(a, b), tensor(b, c)

    ways = [way(aten.addmm.default, call, alpha=1), way(aten.addmm.default, call, alpha=0.3)]
    calls = evidence(*ways[:1], way(aten.addmm.default, call, alpha=1, beta=1))
    rules = generalise(calls).rules
    assert "P(sum), P(sum), R -> P(sum)" in {rule.partition(" if ")[0] for rule in said(generalise(calls))}
    more = crossed([*calls, replace(calls[0], origin=ways[1].origin, values={"beta": 1, "alpha": 0.3})], ways)
    assert any("alpha=0.3" in sample.origin for sample in more)
    assert list(refuting(rules, here(more), OPTIONS)) == []


def test_what_a_tensor_of_a_list_cannot_be_refutes_no_rule() -> None:
    op = aten.stack.default
    made = generalise(evidence(way(op, lambda tensor, a, b, c: ([tensor(a, b), tensor(a, b)], 1))))
    assert "P(avg) -> P(avg)" in said(made)
    mixed = way(op, lambda tensor, a, b, c: ([tensor(a, b), tensor(a, b).long()], 1))
    assert not list(refuting(made.rules, here([mixed]), OPTIONS))


def test_rules_that_hold_are_refuted_by_no_further_call() -> None:
    rules = generalise(reductions()).rules
    more = [
        way(aten.sum.dim_IntList, lambda tensor, a, b, c: (tensor(a, b, c), [0, 1], True)),
        way(aten.sum.dim_IntList, lambda tensor, a, b, c: (tensor(a, b), [-2])),
    ]
    assert list(refuting(rules, here(more), OPTIONS)) == []
