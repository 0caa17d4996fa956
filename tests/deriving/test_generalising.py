"""From calls of an op to rules of their arguments."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from derived_calls import OPTIONS, aten, evidence, reductions, said, way
from torch.distributed.tensor import Partial, Replicate, Shard

from verifier.deriving.derive import DeriveRequest, derivation
from verifier.deriving.learning.changes import other_flags, without_zero_factors
from verifier.deriving.learning.evidence import CallEvidence
from verifier.deriving.learning.generalise import generalise
from verifier.deriving.learning.held_out import Asked, Here, Untried
from verifier.deriving.learning.isolated import Workshop
from verifier.deriving.learning.language import Dim, Scope
from verifier.deriving.writing.emitted_tests import text_of_test
from verifier.planning.own_samples import overload_named


def test_rules_of_an_op_that_has_no_strategy_are_derived() -> None:
    calls, made = derivation(DeriveRequest("aten.trace", max_samples=2), Workshop(jobs=0))
    assert {call.source for call in calls if not call.rare}
    assert {"P(sum) -> P(sum)", "P(avg) -> P(avg)"} <= said(made)
    assert not any(rule.startswith("S(") for rule in said(made))


def test_a_call_that_returns_an_empty_list_takes_no_rule_from_the_others() -> None:
    calls, made = derivation(DeriveRequest("aten.unbind.int", max_samples=4), Workshop(jobs=0))
    assert [call.rules for call in calls if not call.results] == [{}]
    assert "S(d) -> S(d - sum(dim < d for dim in dim_dims)) if d not in dim_dims" in said(made)
    assert not made.unexplained


def test_calls_of_which_the_second_tensor_has_more_dims_are_made_where_samples_have_none() -> None:
    """Else a rule for the last dims of the first tensor is written that names no dim where the second one has more."""
    op = "aten.special_shifted_chebyshev_polynomial_u.default"
    calls, made = derivation(DeriveRequest(op), Workshop(jobs=0))
    swapped = [call for call in calls if call.origin.endswith(", x and n swapped")]
    assert {call.ndims for call in swapped} == {(0, 1), (1, 2), (0, 2), (2, 3)}
    assert all(call.rare and call.holding for call in swapped)
    cuts = [(rule, rule.pivot) for rule in made.rules if rule.pivot is not None]
    assert cuts
    for call, (rule, pivot) in itertools.product(swapped, cuts):
        for scope in (Scope(call, pivot, d) for d in range(call.ndims[pivot])):
            if all(test.value(scope) for test in rule.tests):
                dims = [part.value(scope) for part in (*rule.inputs, *rule.outputs) if isinstance(part, Dim)]
                assert all(dim is not None and dim >= 0 for dim in dims)


@pytest.mark.parametrize("op", ["aten.isnan.default", "aten.isinf.default", "aten.isposinf.default"])
def test_what_only_infinities_and_nan_tell_is_derived_from_them_and_not_for_partial_sums(op: str) -> None:
    calls, made = derivation(DeriveRequest(op, max_samples=2), Workshop(jobs=0))
    assert said(made) == {"S(d) -> S(d)"}
    assert not [inputs for call in calls for inputs in call.holding if any(p.is_partial() for p in inputs)]
    assert 'float("nan")' in text_of_test({overload_named(op): calls}, "module")


def test_what_a_kernel_refuses_of_empty_ranks_is_derived_from_larger_extents() -> None:
    """Two or four channels leave one of three ranks without any, which the kernel does not take."""
    op = "aten.max_pool2d_with_indices.default"
    calls, made = derivation(DeriveRequest(op, max_samples=1), Workshop(jobs=0))
    assert (Shard(1),) in {inputs for call in calls for inputs in made.blocks.get(id(call), {})}
    assert [rule.cut.text for rule in made.rules if rule.cut is not None] == ["1"]


def test_draws_that_say_nothing_are_made_up_for() -> None:
    """The signs of three determinants are often the same."""
    calls, _ = derivation(DeriveRequest("aten._linalg_slogdet.default"), Workshop(jobs=0))
    (batch,) = [call for call in calls if call.shapes == ((3, 5, 5),) and not call.rare]
    assert batch.rules[Shard(0),] == (frozenset({Shard(0)}),) * 4


def test_dims_of_a_reduction_move_down_unless_they_are_kept() -> None:
    made = generalise(reductions())
    assert made.unexplained == ()
    assert said(made) == {
        "S(d) -> P(sum) if d in dim_dims",
        "P(sum) -> P(sum)",
        "P(avg) -> P(avg)",
        "S(d) -> S(d) if d not in dim_dims if keepdim",
        "S(d) -> S(d - sum(dim < d for dim in dim_dims)) if d not in dim_dims if not keepdim",
    }


def test_dims_in_front_of_those_whose_extents_are_given_are_counted_by_the_length_of_the_list() -> None:
    op = aten.native_layer_norm.default
    ways = (
        way(op, lambda tensor, a, b, c: (tensor(a, b), [b], None, None, 0.5)),
        way(op, lambda tensor, a, b, c: (tensor(a, b, c), [b, c], None, None, 0.5)),
        way(op, lambda tensor, a, b, c: (tensor(a, b, c), [c], None, None, 0.5)),
    )
    shards = [rule for rule in said(generalise(evidence(*ways))) if "S(d)" in rule]
    assert shards == ["S(d) -> S(d), S(d), S(d) if d < input_ndim - len(normalized_shape)"]


def test_a_contracted_dim_becomes_a_sum() -> None:
    made = generalise(evidence(way(aten.mm.default, lambda tensor, a, b, c: (tensor(a, b), tensor(b, c)))))
    assert made.unexplained == ()
    rules = {rule.partition(" if ")[0] for rule in said(made)}
    assert {"S(d), R -> S(d)", "R, S(d) -> S(d)", "R, P(sum) -> P(sum)", "P(sum), R -> P(sum)"} <= rules
    assert any(rule.endswith("-> P(sum)") and rule.startswith("S(d), S(") for rule in rules)
    assert not any(rule.startswith("P(sum), P(sum)") for rule in rules)


def test_dims_of_a_permutation_and_of_an_insertion_are_found() -> None:
    permuted = [
        way(aten.permute.default, lambda tensor, a, b, c, dims=dims: (tensor(a, b, c), list(dims)))
        for dims in ((1, 2, 0), (2, 0, 1), (0, -1, 1))
    ]
    assert "S(d) -> S([dim % self_ndim for dim in dims].index(d))" in said(generalise(evidence(*permuted)))
    inserted = [
        way(aten.unsqueeze.default, lambda tensor, a, b, c, dim=dim: (tensor(a, b), dim)) for dim in (0, 1, 2, -1)
    ]
    assert "S(d) -> S(d + (d >= dim % (self_ndim + 1)))" in said(generalise(evidence(*inserted)))


def test_a_rule_that_one_of_many_calls_shows_is_named_and_left_out() -> None:
    calls = reductions()
    odd, *others = calls
    accident = next(inputs for inputs, outputs in odd.rules.items() if not outputs)
    held = next(iter(odd.holding.values()))
    changed = CallEvidence(
        odd.origin,
        odd.slots,
        odd.shapes,
        odd.results,
        odd.values,
        {**odd.rules, accident: held},
        odd.case,
        odd.dtypes,
        odd.lengths,
    )
    made = generalise([changed, *others])
    assert [(call is changed, inputs) for call, inputs in made.unexplained] == [(True, accident)]


def test_calls_of_rare_classes_refute_rules_and_need_no_explanation() -> None:
    calls = reductions()
    refuting = CallEvidence(
        "rare", calls[0].slots, calls[0].shapes, calls[0].results, calls[0].values,
        dict.fromkeys(calls[0].rules, ()), calls[0].case, calls[0].dtypes, calls[0].lengths, rare=True,
    )  # fmt: skip
    assert "P(sum) -> P(sum)" in said(generalise(calls))
    assert "P(sum) -> P(sum)" not in said(generalise([*calls, refuting]))


def test_flags_are_changed_in_calls_of_which_no_other_has_the_other_value() -> None:
    kept, lost = (way(aten.amax.default, lambda tensor, a, b, c, k=k: (tensor(a, b), [1], k)) for k in (True, False))
    single = way(aten.amax.default, lambda tensor, a, b, c: (tensor(a, b, c), [1], False))
    calls = evidence(kept, lost, single)
    changes = other_flags(calls, {call.origin for call in calls})
    assert [(one.origin, one.name, one.value, one.rare) for one in changes] == [(single.origin, "keepdim", True, False)]


def test_what_is_multiplied_by_zero_needs_no_explanation() -> None:
    by = [
        way(aten.add.Tensor, lambda tensor, a, b, c: (tensor(a, b), tensor(a, b)), alpha=alpha) for alpha in (0, 2, 3)
    ]
    calls = without_zero_factors(evidence(*by))
    assert [call.rare for call in calls] == [True, False, False]
    assert [call.rare for call in without_zero_factors(calls[:1])] == [True]
    assert not any(call.rare for call in without_zero_factors(evidence(by[0])))
    padded = [way(aten.constant_pad_nd.default, lambda tensor, a, b, c, v=v: (tensor(a, b), [1, 1], v)) for v in (0, 2)]
    assert not any(call.rare for call in without_zero_factors(evidence(*padded)))  # it is no factor


def test_calls_that_have_no_dim_to_shard_are_not_asked_for_shards() -> None:
    calls = evidence(
        way(aten.bitwise_not.default, lambda tensor, a, b, c: (tensor(a, b).long(),)),
        way(aten.bitwise_not.default, lambda tensor, a, b, c: (tensor().long(),)),
    )
    assert "S(d) -> S(d)" in said(generalise(calls))


def test_changes_of_the_dims_of_one_call_show_a_rule_of_shards() -> None:
    calls = evidence(
        *(way(aten.cummax.default, lambda tensor, a, b, c, dim=dim: (tensor(a, b, c), dim)) for dim in (0, 1, 2))
    )
    of_one = [replace(call, origin=f"one, sample, {number}") for number, call in enumerate(calls)]
    scalar = evidence(way(aten.cummax.default, lambda tensor, a, b, c: (tensor(), 0)))
    made = generalise([*of_one, *scalar])
    assert "S(d) -> S(d), S(d) if d not in dim_dims" in said(made)


def test_placements_of_which_nothing_is_known_are_asked_for() -> None:
    sample = way(aten.neg.default, lambda tensor, a, b, c: (tensor(a, b),))
    untried = Untried(Here(sample, OPTIONS), frozenset({(Partial(),)}))
    known, unknown = (
        Asked(0, 0, OPTIONS.meshes[0], (inputs,), (Shard(0),), False) for inputs in (Partial(), Replicate())
    )
    assert untried.refuted([known, unknown]) == [unknown]
    assert len(untried.calls()) == 6
