"""From derived rules to code that registers them, and the changes of its lines that calls notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from derived_calls import aten, evidence, reductions, said, way
from torch.distributed.tensor import Partial, Shard
from torch_versions import torch_is

from verifier.deriving.closing import Closed
from verifier.deriving.learning.evidence import CallEvidence
from verifier.deriving.learning.generalise import Cut, generalise
from verifier.deriving.learning.learned import Learned
from verifier.deriving.writing.emitted_tests import text_of_test
from verifier.deriving.writing.mutants import Mutants, tried_mutants
from verifier.deriving.writing.strategy import strategy_text
from verifier.deriving.writing.subject import CannotWriteError, Provenance, Target
from verifier.torch_internals.names import OpOverload
from verifier.torch_internals.registries import keys_of_rules, registries_of_rules

GIVEN = Provenance("2.13.0", "0.1.0", "2 3", "float64", 0, "derive")


def code_for(op: OpOverload, calls: list[CallEvidence]) -> str:
    made = generalise(calls)
    code = strategy_text([Learned(op, calls, made)], Target.SINGLE_DIM, GIVEN)
    assert tried_mutants(code, calls, made).disagrees == ()
    return code


def test_two_dims_that_arguments_name_are_left_out_of_a_result() -> None:
    op = aten.diagonal.default
    ways = (
        way(op, lambda tensor, a, b, c: (tensor(a, b, c), 0, 0, 1)),
        way(op, lambda tensor, a, b, c: (tensor(a, b, c), 0, 1, 2)),
        way(op, lambda tensor, a, b, c: (tensor(a, b, c, 2), 0, -1, 1)),
        way(op, lambda tensor, a, b, c: (tensor(a, b), 0, 0, 1)),
    )
    assert "S(d) -> S(d - (dim1_dims[0] < d) - (dim2_dims[0] < d)) if d not in dim1_dims if d not in dim2_dims" in said(
        generalise(evidence(*ways))
    )


def test_as_many_results_as_a_list_has_are_placed_alike() -> None:
    op = aten.split_with_sizes.default
    code = code_for(op, evidence(way(op, lambda tensor, a, b, c: (tensor(a, b + 2), [b, 2], 1))))
    assert "rules.append([*[Shard(d)] * len(split_sizes), Shard(d)])" in code


@pytest.mark.usefixtures("rules_taken_back")
def test_a_list_has_as_many_results_as_the_op_says() -> None:
    op = aten.split.Tensor
    code = code_for(
        op,
        evidence(
            way(op, lambda tensor, a, b, c: (tensor(a, b + 2), 3, 1)),
            way(op, lambda tensor, a, b, c: (tensor(a, 2, c + 2), 2, -1)),
            way(op, lambda tensor, a, b, c: (tensor(a + 3, 3), 2, 0)),
        ),
    )
    assert "rules.append([*[Shard(d)] * count_of_results, Shard(d)])" in code
    scope: dict[str, object] = {}
    exec(compile(code, "derived.py", "exec"), scope)
    rules = scope["aten_split_Tensor_rules"]
    assert callable(rules)
    assert [Shard(0)] * 4 in rules(torch.empty(4, 6), 2, 1)
    assert [Shard(0)] * 3 in rules(torch.empty(4, 6), 3, 1)


def test_conditions_and_loops_of_several_rules_are_written_once() -> None:
    code = code_for(aten.sum.dim_IntList, reductions())
    assert code.count("if not keepdim:") == code.count("if keepdim:") == 1
    assert code.count("for d in range") == 3


@pytest.mark.usefixtures("rules_taken_back")
@pytest.mark.parametrize("target", [Target.SINGLE_DIM, Target.REGISTER_SHARDING])
def test_the_code_registers_a_strategy_that_claims_the_rules(target: Target) -> None:
    calls = reductions()
    code = strategy_text([Learned(aten.sum.dim_IntList, calls, generalise(calls))], target, GIVEN)
    assert len([line for line in code.splitlines() if line.startswith("#")]) <= 10
    scope: dict[str, object] = {}
    exec(compile(code, "derived.py", "exec"), scope)
    rules = scope["aten_sum_dim_IntList_rules"]
    assert callable(rules)
    made = rules(torch.empty(2, 3, 4), [1])
    flat = [[*row[0], *row[1][:1]] if isinstance(row, tuple) else row for row in made]
    assert {", ".join(map(str, row)) for row in flat} == {
        "S(0), S(0)", "P(sum), S(1)", "S(1), S(2)", "P(sum), P(sum)", "P(avg), P(avg)",
    }  # fmt: skip
    test = text_of_test({aten.sum.dim_IntList: calls}, "derived")
    compile(test, "test_derived.py", "exec")
    assert "verify(torch.ops.aten.sum.dim_IntList, *args" in test


@pytest.mark.usefixtures("rules_taken_back")
@pytest.mark.parametrize("op", [aten._foreach_mul.List, aten._foreach_mul_.List])
def test_of_lists_of_a_foreach_op_dtensor_asks_for_one_tensor_at_a_time(op: OpOverload) -> None:
    calls = evidence(way(op, lambda tensor, a, b, c: ([tensor(a, b), tensor(c, b)], [tensor(a, b), tensor(c, b)])))
    scope: dict[str, Any] = {}
    exec(compile(code_for(op, calls), "derived.py", "exec"), scope)
    one = torch.empty(4, 3)
    rows = scope[f"{str(op).replace('.', '_')}_strategy"](op, (one, one), {})  # the product has one result
    assert [Shard(1), Shard(1), Shard(1)] in rows
    assert all(len(row) == 3 and row[0] == row[1] for row in rows if not op._schema.returns)
    assert keys_of_rules()[1][op].needs_pytree


def test_a_test_imports_what_defines_the_op_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    beside = text_of_test({aten.neg.default: []}, "derived", ["my_op.py", "my_package.ops"])
    assert "\nimport my_op  # noqa" in beside
    assert "\nimport my_package.ops  # noqa" in beside
    assert "sys.path" not in beside
    elsewhere = text_of_test({aten.neg.default: []}, "derived", ["ops/my_op.py"], tmp_path / "rules")
    assert "sys.path.append(str(Path(__file__).parent / '../ops'))" in elsewhere
    compile(elsewhere, "test_derived.py", "exec")


@pytest.mark.usefixtures("rules_taken_back")
def test_arguments_that_have_the_name_of_a_builtin_do_not_hide_it() -> None:
    calls = evidence(way(aten.topk.default, lambda tensor, a, b, c: (tensor(a, b), 2, 1, True, True)))
    code = strategy_text([Learned(aten.topk.default, calls, generalise(calls))], Target.SINGLE_DIM, GIVEN)
    scope: dict[str, object] = {}
    exec(compile(code, "derived.py", "exec"), scope)
    rules = scope["aten_topk_rules"]
    assert callable(rules)
    assert "S(0), S(0), S(0)" in {", ".join(map(str, row)) for row in rules(torch.empty(4, 6), 2, 1, True, True)}


def test_what_a_way_of_registering_cannot_say_is_refused() -> None:
    calls = evidence(way(aten.cat.default, lambda tensor, a, b, c: ([tensor(a, b), tensor(a, b)], 0)))
    made = generalise(calls)
    code = strategy_text([Learned(aten.cat.default, calls, made)], Target.SINGLE_DIM, GIVEN)
    assert "*[Shard(d)] * len(tensors)" in code
    assert "needs_pytree=True" in code
    with pytest.raises(CannotWriteError, match="register_sharding cannot place the list tensors"):
        strategy_text([Learned(aten.cat.default, calls, made)], Target.REGISTER_SHARDING, GIVEN)
    with pytest.raises(CannotWriteError, match="with out= from its base"):
        strategy_text([Learned(aten.cat.out, calls, made)], Target.SINGLE_DIM, GIVEN)


def test_calls_tell_each_changed_line_of_a_derived_function() -> None:
    calls = reductions()
    made = generalise(calls)
    code = strategy_text([Learned(aten.sum.dim_IntList, calls, made)], Target.SINGLE_DIM, GIVEN)
    assert tried_mutants(code, calls, made).survivors == ()
    few = [call for call in calls if call.values["keepdim"]]
    survivors = tried_mutants(code, few, made).survivors
    assert any("without the condition keepdim" in one for one in survivors)


def test_code_that_does_not_say_what_was_derived_disagrees_with_the_calls() -> None:
    calls = reductions()
    made = generalise(calls)
    code = strategy_text([Learned(aten.sum.dim_IntList, calls, made)], Target.SINGLE_DIM, GIVEN)
    mutants = tried_mutants(code.replace("if d not in dim_dims", "if True"), calls, made)
    assert any("which does not hold" in one for one in mutants.disagrees)
    assert not Closed(1, 0, (), 0, "", mutants).passed
    assert not Closed(1, 0, (), 0, "", Mutants(9, ("line 9: without a condition",))).passed
    assert Closed(1, 0, (), 0, "", Mutants(9, ())).passed


def test_a_list_without_dims_names_none_where_that_explains_more() -> None:
    ways = [
        way(aten.flip.default, lambda tensor, a, b, c, dims=dims: (tensor(a, b, c), list(dims)))
        for dims in ((0,), (1, -1), ())
    ]
    calls = evidence(*ways)
    made = generalise(calls)
    assert made.unexplained == ()
    assert "S(d) -> S(d) if d not in dims_given" in said(made)
    assert "dims_given = {dim % max(self_ndim, 1) for dim in dims or ()}" in code_for(aten.flip.default, calls)


def test_dims_are_told_apart_by_the_numbers_that_go_with_them() -> None:
    ways = [
        way(aten.roll.default, lambda tensor, a, b, c, given=given: (tensor(a, b, c), *map(list, given)))
        for given in (((1,), (0,)), ((0, 2), (0, 1)), ((1, 0), (2, -2)), ((2,), ()))
    ]
    calls = evidence(*ways)
    made = generalise(calls)
    assert made.unexplained == ()
    assert "S(d) -> S(d) if d not in dims_with_shifts" in said(made)
    assert "zip(dims, shifts)" in code_for(aten.roll.default, calls)


def test_pairs_of_numbers_name_dims_from_the_last() -> None:
    ways = [
        way(aten.constant_pad_nd.default, lambda tensor, a, b, c, pad=pad: (tensor(a, b, c), list(pad), 3.0))
        for pad in ((1, 2), (0, 0, 1, 0), (0, 1, 0, 0, 2, 2))
    ]
    calls = evidence(*ways)
    assert "S(d) -> S(d) if d not in pad_dims" in said(generalise(calls))
    assert "pad_dims = {self_ndim - 1 - n // 2 for n, one in enumerate(pad) if one}" in code_for(
        aten.constant_pad_nd.default, calls
    )


def test_extents_of_two_tensors_are_compared() -> None:
    def indexed(tensor: Callable[..., torch.Tensor], a: int, b: int, c: int, fewer: int = 0) -> tuple[object, ...]:
        return tensor(a, b), 0, tensor(4, b - fewer).long() % a

    def in_fewer(tensor: Callable[..., torch.Tensor], a: int, b: int, c: int) -> tuple[object, ...]:
        return indexed(tensor, a, b, c, 1)

    def in_more_dims(tensor: Callable[..., torch.Tensor], a: int, b: int, c: int) -> tuple[object, ...]:
        return tensor(a, b, c), 0, tensor(4, b, c).long() % a

    calls = evidence(*(way(aten.gather.default, one) for one in (indexed, in_fewer, in_more_dims)))
    rules = said(generalise(calls))
    assert any(rule.startswith("S(d), S(d) -> S(d) if") and "index.shape[d] == self.shape[d]" in rule for rule in rules)


def test_a_dim_of_the_result_is_the_one_that_an_argument_names() -> None:
    ways = [
        way(
            aten.index_select.default,
            lambda tensor, a, b, c, dim=dim: (tensor(a, b, c), dim, tensor(4).long() % 2),
        )
        for dim in (0, 1, 2)
    ]
    assert "R, S(d) -> S(dim_dims[0])" in said(generalise(evidence(*ways)))


def test_a_condition_on_a_list_is_one_on_its_first_tensor() -> None:
    def bools(tensor: Callable[..., torch.Tensor], a: int, b: int, c: int) -> tuple[object, ...]:
        return ([tensor(a, b) > 0, tensor(a, b) > 0],)

    calls = evidence(
        way(aten.cat.default, lambda tensor, a, b, c: ([tensor(a, b), tensor(a, b)],)),
        way(aten.cat.default, lambda tensor, a, b, c: ([tensor(a, b, c), tensor(a, b, c)],)),
    )
    of_bools = [replace(call, rules={(Partial(),): ()}, rare=True) for call in evidence(way(aten.cat.default, bools))]
    code = code_for(aten.cat.default, [*calls, *of_bools])
    assert "if tensors[0].dtype.is_floating_point:" in code
    assert tried_mutants(code, [*calls, *of_bools], generalise([*calls, *of_bools])).disagrees == ()


def test_a_change_to_another_rule_that_holds_as_well_is_none() -> None:
    calls = evidence(
        way(aten.neg.default, lambda tensor, a, b, c: (tensor(a, b),)),
        way(aten.neg.default, lambda tensor, a, b, c: (tensor(a, b, c),)),
    )
    kinds = frozenset({Partial("max"), Partial("min")})
    either = [replace(call, rules={**call.rules, (Partial("max"),): (kinds,)}) for call in calls]
    rows = ('[Partial("max"), Partial("max")]', '[Partial("min"), Partial("max")]')
    made = generalise(either)
    code = code_for(aten.neg.default, either)
    assert any(row in code for row in rows)
    assert tried_mutants(code, either, made).survivors == ()
    only = [replace(call, rules={**call.rules, (Partial("max"),): (frozenset({Partial("min")}),)}) for call in calls]
    assert tried_mutants(code_for(aten.neg.default, only), only, generalise(only)).survivors == ()


@pytest.mark.skipif(torch_is(">=2.14"), reason="a strategy for one mesh dim has a filter there")
@pytest.mark.usefixtures("rules_taken_back")
def test_products_that_are_kept_are_asked_for_in_the_place_of_torchs_own_strategy() -> None:
    op = aten.sin.default
    assert op in registries_of_rules()[-1]
    calls = evidence(way(op, lambda tensor, a, b, c: (tensor(a, b),)))
    made = generalise(calls)
    (sharded, *others) = sorted(made.rules, key=lambda rule: rule.pivot is None)
    cut = Cut(0, "4", lambda call: 4, held=1, failed=1)
    cut_in_blocks = replace(made, rules=(replace(sharded, cut=cut), *others))
    code = strategy_text([Learned(op, calls, cut_in_blocks)], Target.SINGLE_DIM, GIVEN)
    exec(compile(code, "derived.py", "exec"), {})
    assert op not in registries_of_rules()[-1]
    asked = registries_of_rules()[2][op]
    assert asked.__name__ == "aten_sin_strategy"
