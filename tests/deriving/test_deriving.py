"""From calls of an op to rules of their arguments, and to code that registers them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from strategies.own_ops.names import own_ops, own_ops_named
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.errors import SamplesError
from verifier.deriving import closing
from verifier.deriving import derive as deriving
from verifier.deriving.closing import Closed
from verifier.deriving.derive import Derived, DeriveRequest, derivation
from verifier.deriving.learning.evidence import CallEvidence, gather
from verifier.deriving.learning.generalise import Derivation, generalise
from verifier.deriving.learning.held_out import (
    Asked,
    Here,
    Untried,
    crossed,
    other_flags,
    refuting,
    without_zero_factors,
)
from verifier.deriving.learning.isolated import Workshop
from verifier.deriving.text import derivation_lines
from verifier.deriving.writing.emitted_tests import text_of_test
from verifier.deriving.writing.mutants import Mutants, tried_mutants
from verifier.deriving.writing.strategy import strategy_text
from verifier.deriving.writing.subject import CannotWriteError, Provenance, Target
from verifier.planning import own_samples
from verifier.planning.own_samples import overload_named, sampled_ops, samples
from verifier.records.values import trial_record
from verifier.rules.options import CheckOptions
from verifier.rules.samples import Sample, Values
from verifier.torch_internals.names import OpOverload

aten = torch.ops.aten
OPTIONS = CheckOptions((MeshSpec((2,)), MeshSpec((3,))), blank=True, cap=1024)
SIZES = ((5, 7, 4), (2, 3, 5), (6, 4, 9))
SECONDS = ("deriving", "checking")
GIVEN = Provenance("2.13.0", "0.1.0", "2 3", "float64", 0, "derive")


class Way:
    """One way of calling an op; the arguments are made from the extents of each size."""

    not_testable = claims_only = ""

    def __init__(self, op: OpOverload, make: Callable[..., tuple[object, ...]], kwargs: dict[str, object]) -> None:
        self.op, self.origin, self._overload = str(op), f"{make.__code__.co_firstlineno}", op
        self._make, self._kwargs = make, kwargs

    def draw(self, size: int, draw: int, values: Values = Values.USUAL) -> OpCase | None:
        if values is not Values.USUAL or size >= len(SIZES):
            return None
        generator = torch.Generator().manual_seed(7 * size + draw)

        def tensor(*shape: int) -> torch.Tensor:
            return torch.randint(-3, 5, shape, generator=generator).double()

        return OpCase(self.op, f"torch.ops.{self.op}", self._make(tensor, *SIZES[size]), self._kwargs)


def way(op: OpOverload, make: Callable[..., tuple[object, ...]], **kwargs: object) -> Way:
    return Way(op, make, kwargs)


def evidence(*ways: Way) -> list[CallEvidence]:
    return list(gather(ways, OPTIONS))


def here(some: Sequence[Sample]) -> list[Here]:
    return [Here(sample, OPTIONS) for sample in some]


def said(made: Derivation) -> set[str]:
    """Return the rules as text: placements of slots, of results, and conditions."""

    def part(one: object) -> str:
        return f"S({one.text})" if hasattr(one, "text") else str(one)

    return {
        f"{', '.join(map(part, rule.inputs))} -> {', '.join(map(part, rule.outputs))}"
        + "".join(f" if {test.text}" for test in rule.tests)
        for rule in made.rules
    }


def test_rules_of_an_op_that_has_no_strategy_are_derived() -> None:
    calls, made = derivation(DeriveRequest("aten.trace", max_samples=2), Workshop(jobs=0))
    assert {call.source for call in calls if not call.rare}
    assert {"P(sum) -> P(sum)", "P(avg) -> P(avg)"} <= said(made)
    assert not any(rule.startswith("S(") for rule in said(made))


@pytest.mark.parametrize("op", ["aten.isnan.default", "aten.isinf.default", "aten.isposinf.default"])
def test_what_only_infinities_and_nan_tell_is_derived_from_them_and_not_for_partial_sums(op: str) -> None:
    calls, made = derivation(DeriveRequest(op, max_samples=2), Workshop(jobs=0))
    assert said(made) == {"S(d) -> S(d)"}
    assert not [inputs for call in calls for inputs in call.holding if any(p.is_partial() for p in inputs)]
    assert 'float("nan")' in text_of_test(overload_named(op), calls, "module")


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


@cache
def reductions() -> list[CallEvidence]:
    op = aten.sum.dim_IntList
    ways = [
        way(op, lambda tensor, a, b, c, dims=dims, keep=keep: (tensor(a, b, c), list(dims), keep))
        for dims in ((0,), (1,), (-1,), (0, 2))
        for keep in (False, True)
    ]
    return evidence(*ways)


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


# ----------------------------------------------------------------------------------------------------------------- code
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


def test_conditions_and_loops_of_several_rules_are_written_once() -> None:
    code = code_for(aten.sum.dim_IntList, reductions())
    assert code.count("if not keepdim:") == code.count("if keepdim:") == 1
    assert code.count("for d in range") == 3


@pytest.mark.usefixtures("rules_taken_back")
@pytest.mark.parametrize("target", [Target.SINGLE_DIM, Target.REGISTER_SHARDING])
def test_the_code_registers_a_strategy_that_claims_the_rules(target: Target) -> None:
    calls = reductions()
    code = strategy_text(aten.sum.dim_IntList, calls, generalise(calls), target, GIVEN)
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
    test = text_of_test(aten.sum.dim_IntList, calls, "derived")
    compile(test, "test_derived.py", "exec")
    assert "verify(torch.ops.aten.sum.dim_IntList, *args" in test


def test_a_test_imports_what_defines_the_op_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    beside = text_of_test(aten.neg.default, [], "derived", ["my_op.py", "my_package.ops"])
    assert "\nimport my_op  # noqa" in beside
    assert "\nimport my_package.ops  # noqa" in beside
    assert "sys.path" not in beside
    elsewhere = text_of_test(aten.neg.default, [], "derived", ["ops/my_op.py"], tmp_path / "rules")
    assert "sys.path.append(str(Path(__file__).parent / '../ops'))" in elsewhere
    compile(elsewhere, "test_derived.py", "exec")


@pytest.mark.usefixtures("rules_taken_back")
def test_arguments_that_have_the_name_of_a_builtin_do_not_hide_it() -> None:
    calls = evidence(way(aten.topk.default, lambda tensor, a, b, c: (tensor(a, b), 2, 1, True, True)))
    code = strategy_text(aten.topk.default, calls, generalise(calls), Target.SINGLE_DIM, GIVEN)
    scope: dict[str, object] = {}
    exec(compile(code, "derived.py", "exec"), scope)
    rules = scope["aten_topk_rules"]
    assert callable(rules)
    assert "S(0), S(0), S(0)" in {", ".join(map(str, row)) for row in rules(torch.empty(4, 6), 2, 1, True, True)}


def test_what_a_way_of_registering_cannot_say_is_refused() -> None:
    calls = evidence(way(aten.cat.default, lambda tensor, a, b, c: ([tensor(a, b), tensor(a, b)], 0)))
    made = generalise(calls)
    code = strategy_text(aten.cat.default, calls, made, Target.SINGLE_DIM, GIVEN)
    assert "*[Shard(d)] * len(tensors)" in code
    assert "needs_pytree=True" in code
    with pytest.raises(CannotWriteError, match="register_sharding cannot place the list tensors"):
        strategy_text(aten.cat.default, calls, made, Target.REGISTER_SHARDING, GIVEN)
    with pytest.raises(CannotWriteError, match="with out= from its base"):
        strategy_text(aten.cat.out, calls, made, Target.SINGLE_DIM, GIVEN)


@pytest.mark.parametrize(
    ("closed", "passed"),
    [
        (Closed(3, 0, (), 0, ""), True),
        (Closed(3, 1, (), 0, ""), False),
        (Closed(3, 0, ("S(0) of a call",), 0, ""), False),
        (Closed(3, 0, (), 1, ""), False),
        (Closed(0, 0, (), 0, ""), False),
    ],
)
def test_code_passes_only_if_no_check_refutes_it_and_one_bears_it_out(closed: Closed, passed: bool) -> None:
    assert closed.passed is passed


# ------------------------------------------------------------------------------------------------- gradients, functions
def test_all_lines_are_told_of_a_check_that_could_not_verify(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = ["Traceback (most recent call last):", *(f'  File "{n}.py"' for n in range(20)), "KeyError: 'x'", "error"]
    made = Derivation((), (), 0)
    answers = [(2, "", "\n".join(lines))]
    monkeypatch.setattr(closing, "_verifier", lambda words: answers.pop(0))
    given = "aten.exp.default", tmp_path / "exp.py", [], "2", ["2"]
    with pytest.raises(ValueError, match="rules of the derived strategy could not verify") as caught:
        closing.close(*given, [], made, 2)
    assert str(caught.value).splitlines()[1:] == lines

    nothing_wrong = {"ops": {"exp": {"confirmed": ["S(0) -> S(0)"], "wrong": [], "missing": []}}}
    answers += [(0, json.dumps(nothing_wrong), ""), (2, "gate on aten.exp.default\n", "\n".join(lines))]
    closed = closing.close(*given, [], made, 2)
    assert closed.said.splitlines()[1:] == lines
    assert not closed.passed


def test_gradients_are_placed_where_each_rank_differentiates_its_part() -> None:
    ways = [way(aten.mm.default, lambda tensor, a, b, c: (tensor(a, b), tensor(b, c)))]
    calls = list(gather(ways, OPTIONS, gradients=True))
    assert calls[0].gradients == ("self", "mat2")
    found = {", ".join(map(str, inputs)): outputs for inputs, outputs in calls[0].holding.items()}
    assert [Partial("sum") in some for some in found["S(0), R"]] == [False, False, True]
    assert found["S(0), R"][:2] == (frozenset({Shard(0)}), frozenset({Shard(0)}))
    assert found["S(1), S(0)"] == (frozenset({Partial("sum")}), frozenset({Shard(1)}), frozenset({Shard(0)}))
    assert Replicate() in found["P(sum), R"][1]
    assert generalise(calls).unexplained == ()


def test_a_rule_whose_local_gradients_are_the_gradient_under_no_placement_does_not_hold() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: object, cotangent: torch.Tensor) -> torch.Tensor:
            return cotangent * cotangent.shape[0]  # of the local rows

    def rows(x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(x)  # type: ignore[no-any-return, no-untyped-call]

    op = _stand_in(rows, lambda: [(torch.ones(4, 3),)])
    ways = [way(op, lambda tensor, a, b, c: (tensor(a, b),))]
    assert set(map(str, (inputs for (inputs,) in evidence(*ways)[0].holding))) >= {"S(0)", "S(1)"}
    (call,) = gather(ways, OPTIONS, gradients=True)
    assert {str(inputs) for (inputs,) in call.holding} >= {"S(1)", "R"}
    assert not any(inputs == Shard(0) for (inputs,) in call.holding)


@pytest.fixture(autouse=True)
def no_samples_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what a test declares be gone after it."""
    monkeypatch.setattr(own_samples, "_makers", {})
    monkeypatch.setattr(own_samples, "_functions", {})


def test_functions_with_samples_are_no_ops_that_other_commands_take() -> None:
    samples(several)(lambda: [(torch.ones(2),)])
    assert sampled_ops() == ()
    assert not [op for op in own_ops() if "several" in op]
    assert own_ops_named("*several*") == ()


def _stand_in(function: Callable[..., object], examples: Callable[[], object]) -> OpOverload:
    function.__qualname__, function.__module__ = function.__name__, __name__
    samples(function)(examples)
    return overload_named(f"{__name__}.{function.__name__}")


def weighted(rows: torch.Tensor, others: list[torch.Tensor], bias: torch.Tensor | None = None, *, scale: float = 1.0):  # type: ignore[no-untyped-def]
    total = scale * rows + sum(others)
    return total if bias is None else total + bias


def test_a_function_becomes_one_of_dtensors_that_runs_on_local_tensors() -> None:
    samples(weighted)(
        lambda: [
            (torch.ones(4, 3), [torch.ones(4, 3)] * 2),
            (torch.ones(4, 3), [torch.ones(4, 3)] * 2, torch.ones(3), {"scale": 0.5}),
        ]
    )
    op = overload_named(f"{__name__}.weighted")
    schema = "(Tensor rows, Tensor[] others, Tensor? bias=None, *, float scale=1.) -> Tensor"
    assert str(op._schema).endswith(schema)
    ways = [
        way(op, lambda tensor, a, b, c: (tensor(a, b), [tensor(a, b), tensor(a, b)]), scale=0.5),
        way(op, lambda tensor, a, b, c: (tensor(a, b), [tensor(a, b), tensor(a, b)], tensor(b))),
    ]
    calls = list(gather(ways, replace(OPTIONS, meshes=OPTIONS.meshes[:1]), gradients=True))
    made = generalise(calls)
    code = strategy_text(op, calls, made, Target.LOCAL_MAP, GIVEN)
    scope: dict[str, Any] = {}
    exec(compile(code, "derived.py", "exec"), scope)
    name = f"{__name__}.weighted".replace(".", "_")
    x = torch.ones(4, 3)
    rules = scope[f"{name}_rules"](x, [x, x], torch.ones(3))
    assert ([Shard(1)], [Shard(1), Shard(1), Shard(1), Shard(0)], [Shard(1), Shard(1), Shard(1), Shard(0)]) in rules
    by_rows = next(gradients for _, inputs, gradients in rules if inputs == [Shard(0), Shard(0), Shard(0), Replicate()])
    assert by_rows == [Shard(0), Shard(0), Shard(0), Partial("sum")]
    assert torch.equal(scope[f"{name}_sharded"](x, [x, x], scale=2.0), weighted(x, [x, x], scale=2.0))
    test = text_of_test(op, calls, "derived", target=Target.LOCAL_MAP)
    compile(test, "test_derived.py", "exec")
    assert "combinations=placements" in test
    with pytest.raises(ValueError, match=r"no function .*weighed has samples; did you mean '.*weighted'"):
        overload_named(f"{__name__}.weighed")
    with pytest.raises(CannotWriteError, match="is a function and no op"):
        strategy_text(op, calls, made, Target.SINGLE_DIM, GIVEN)


class Squashed(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, factors: torch.Tensor, scale: float = 1.0) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows, factors)
        ctx.scale = scale
        return rows * factors * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, factors = ctx.saved_tensors
        return grad * factors * ctx.scale, (grad * rows * ctx.scale).sum(0), None


class Apart(torch.autograd.Function):
    """A function whose forward has no context."""

    @staticmethod
    def forward(rows: torch.Tensor) -> torch.Tensor:
        return rows * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[object, ...], output: object) -> None:
        del ctx, inputs, output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


@pytest.mark.parametrize("given", [Squashed, Squashed.apply])
def test_a_function_of_autograd_has_rules_of_its_own_backward(given: Callable[..., object]) -> None:
    samples(given)(lambda: [(torch.ones(4, 3), torch.ones(3)), (torch.ones(4, 3), torch.ones(3), 0.5)])
    op = overload_named(f"{__name__}.Squashed.apply")
    assert str(op._schema).endswith("(Tensor rows, Tensor factors, float scale=1.) -> Tensor")
    ways = [way(op, lambda tensor, a, b, c: (tensor(a, b), tensor(b), 0.5))]
    calls = list(gather(ways, replace(OPTIONS, meshes=OPTIONS.meshes[:1]), gradients=True))
    code = strategy_text(op, calls, generalise(calls), Target.LOCAL_MAP, GIVEN)
    assert f"import {__name__}\n" in code
    assert "rules.append(([Shard(d)], [Shard(d), Replicate()], [Shard(d), Partial()]))" in code
    assert f"return {__name__}.Squashed.apply(next(rest), next(rest), scale)" in code


def test_a_function_of_autograd_may_set_its_context_up_apart() -> None:
    samples(Apart.apply)(lambda: [(torch.ones(4, 3),)])
    assert str(overload_named(f"{__name__}.Apart.apply")._schema).endswith("(Tensor rows) -> Tensor")


@pytest.mark.parametrize(
    ("function", "examples", "said"),
    [
        (lambda x: x, [(torch.ones(2),)], "give the name of an op, or a function of a module"),
        (len, [(torch.ones(2),)], "returns something else than a tensor"),
    ],
)
def test_functions_that_cannot_stand_for_an_op_are_refused(
    function: Callable[..., object], examples: list[object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):  # noqa: PT012 - either line may refuse it
        samples(function)(lambda: examples)
        overload_named(f"{function.__module__}.{function.__qualname__}")


def several(*tensors: torch.Tensor) -> torch.Tensor:
    return tensors[0]


def test_a_function_with_any_number_of_arguments_is_refused() -> None:
    samples(several)(lambda: [(torch.ones(2),)])
    with pytest.raises(SamplesError, match="has no fixed number of arguments"):
        overload_named(f"{__name__}.several")


# ------------------------------------------------------------------------------------------------------ held-out calls
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


# ------------------------------------------------------------------------------------------------- changes of the code
def test_calls_tell_each_changed_line_of_a_derived_function() -> None:
    calls = reductions()
    made = generalise(calls)
    code = strategy_text(aten.sum.dim_IntList, calls, made, Target.SINGLE_DIM, GIVEN)
    assert tried_mutants(code, calls, made).survivors == ()
    few = [call for call in calls if call.values["keepdim"]]
    survivors = tried_mutants(code, few, made).survivors
    assert any("without the condition keepdim" in one for one in survivors)


def test_code_that_does_not_say_what_was_derived_disagrees_with_the_calls() -> None:
    calls = reductions()
    made = generalise(calls)
    code = strategy_text(aten.sum.dim_IntList, calls, made, Target.SINGLE_DIM, GIVEN)
    mutants = tried_mutants(code.replace("if d not in dim_dims", "if True"), calls, made)
    assert any("which does not hold" in one for one in mutants.disagrees)
    assert not Closed(1, 0, (), 0, "", mutants).passed
    assert not Closed(1, 0, (), 0, "", Mutants(9, ("line 9: without a condition",))).passed
    assert Closed(1, 0, (), 0, "", Mutants(9, ())).passed


# ---------------------------------------------------------------------------------------------------- dims of arguments
def code_for(op: OpOverload, calls: list[CallEvidence]) -> str:
    made = generalise(calls)
    code = strategy_text(op, calls, made, Target.SINGLE_DIM, GIVEN)
    assert tried_mutants(code, calls, made).disagrees == ()
    return code


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


def test_an_op_without_a_strategy_in_the_gradient_is_to_be_derived_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    raised = "NotImplementedError: Operator mine.scale_backward.default does not have a sharding strategy registered."
    record = '{"ops": {"mine.scale.default": {"confirmed": ["one"], "wrong": [], "missing": []}}}'
    said = {"rules": (0, record, ""), "gate": (1, "", f"new CRASH: every rank raised {raised}" + "\nmore" * 20)}
    monkeypatch.setattr(closing, "_verifier", lambda words: said[words[0]])
    closed = closing.close("mine.scale.default", tmp_path / "s.py", (), "2", ("2",), [], Derivation((), (), 0), 1)
    assert closed.without_strategy == ("mine.scale_backward.default",)
    made = Derived("mine.scale.default", (), Derivation((), (), 0), "", "", closed, seconds=dict.fromkeys(SECONDS, 0.0))
    lines = derivation_lines(made, None)
    assert any("mine.scale_backward.default" in line and "derive it first" in line for line in lines)


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


FAILED = (
    "  NEW 25b6 CRASH\n    in m.f.default(x=f64[5, 1] {placement}) on mesh ({ranks},), backend gloo, during forward\n"
)


@pytest.mark.parametrize(
    ("placement", "ranks", "uneven"), [("S(0)", 4, True), ("S(0)", 5, False), ("R", 4, False), ("S(1)", 2, True)]
)
def test_uneven_shards_alone_are_told_from_other_failures(
    placement: str, ranks: int, uneven: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = '{"ops": {"m.f.default": {"confirmed": ["one"], "wrong": [], "missing": []}}}'
    said = {"rules": (0, record, ""), "gate": (1, FAILED.format(placement=placement, ranks=ranks), "")}
    monkeypatch.setattr(closing, "_verifier", lambda words: said[words[0]])
    closed = closing.close("m.f.default", tmp_path / "s.py", (), "2", ("2",), [], Derivation((), (), 0), 1)
    assert closed.only_uneven == uneven
    found = {"mesh": str(ranks), "input_placements": [placement], "output_placements": [placement], "shapes": [[5, 1]]}
    wrong = {"f": {"confirmed": [], "wrong": [found | {"origin": "f", "message": "no rows"}], "missing": []}}
    said["rules"] = (1, json.dumps({"ops": wrong, "findings": []}), "")
    closed = closing.close("m.f.default", tmp_path / "s.py", (), "2", ("2",), [], Derivation((), (), 0), 1)
    assert closed.only_uneven == uneven
    assert "no rows" in closed.said


def test_code_that_uneven_shards_alone_refute_is_checked_again_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[str, DeriveRequest]] = []

    def check(code: str, op: object, calls: object, made: object, request: DeriveRequest, module: str) -> Closed:
        checked.append((code, request))
        uneven = "allow_uneven_sharding=True" in code
        return Closed(1, 0, (), int(uneven), "", only_uneven=only_uneven)

    calls = evidence(way(aten.neg.default, lambda tensor, a, b, c: (tensor(a, b),)))
    monkeypatch.setattr(deriving, "_checked", check)
    monkeypatch.setattr(deriving, "derivation", lambda request: (calls, generalise(calls)))
    only_uneven = True
    made = deriving.derive(DeriveRequest("aten.neg.default"), "new")
    assert "allow_uneven_sharding=False" in made.code
    assert [(request.world_sizes, [*request.meshes]) for _, request in checked] == [
        ("2,3", ["2", "3", "2x2"]), ("2,3,4", ["2", "3", "2x2", "4"])
    ]  # fmt: skip
    only_uneven = False
    made = deriving.derive(DeriveRequest("aten.neg.default"), "new")
    assert not made.closed.passed
    assert len(checked) == 3


def _refuted(dims: int) -> dict[str, object]:
    """Return what `rules` prints of a maximum that is claimed to pass through abs of a tensor."""
    case = OpCase("aten.abs.default", "torch.ops.aten.abs.default", (torch.ones((2,) * dims, dtype=torch.float64),), {})
    trial = Trial(case, MeshSpec((2,)), ((Partial("max"),),))
    finding = {"op": case.op, "trial": msgspec.to_builtins(trial_record(trial))}
    found = {"mesh": "2", "input_placements": ["P(max)"], "output_placements": ["P(max)"], "shapes": [[2] * dims]}
    wrong = [found | {"origin": "abs", "message": "it is not"}]
    return {"ops": {case.op: {"confirmed": [], "wrong": wrong, "missing": []}}, "findings": [finding]}


def test_what_rules_refutes_is_derived_again_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []

    def verifier(words: Sequence[str]) -> tuple[int, str, str]:
        is_wrong = 'Partial("max")' in Path(words[-words[::-1].index("--import")]).read_text()
        asked.append((words[0], is_wrong))
        right = {"ops": {"aten.abs.default": {"confirmed": ["one"], "wrong": [], "missing": []}}}
        return (0, json.dumps(_refuted(2) if is_wrong else right), "") if words[0] == "rules" else (0, "", "")

    calls = evidence(way(aten.abs.default, lambda tensor, a, b, c: (tensor(a, b),)))
    calls = [replace(call, rules=call.rules | {(Partial("max"),): (frozenset({Partial("max")}),)}) for call in calls]
    monkeypatch.setattr(closing, "_verifier", verifier)
    monkeypatch.setattr(deriving, "derivation", lambda request: (calls, generalise(calls)))
    made = deriving.derive(DeriveRequest("aten.abs.default"), "new")
    assert asked == [("rules", True), ("rules", False), ("gate", False)]
    assert made.closed.passed
    assert "S(d) -> S(d)" in said(made.made)


def test_what_rules_refutes_of_other_calls_does_not_go_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[object] = []

    def verifier(words: Sequence[str]) -> tuple[int, str, str]:
        checks.append(words)
        return 1, json.dumps(_refuted(3)), ""

    calls = evidence(way(aten.abs.default, lambda tensor, a, b, c: (tensor(a, b),)))
    monkeypatch.setattr(closing, "_verifier", verifier)
    monkeypatch.setattr(deriving, "derivation", lambda request: (calls, generalise(calls)))
    made = deriving.derive(DeriveRequest("aten.abs.default"), "new")
    assert len(checks) == 4
    assert not made.closed.passed


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
