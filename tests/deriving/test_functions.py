"""Rules of functions of tensors, and the placements of their gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from derived_calls import OPTIONS, aten, evidence, way
from torch.distributed.tensor import Partial, Replicate, Shard

from strategies.own_ops.names import own_ops, own_ops_named
from verifier.core.errors import SamplesError
from verifier.deriving.learning.evidence import gather
from verifier.deriving.learning.generalise import generalise
from verifier.deriving.learning.learned import Learned, parts_text
from verifier.deriving.writing.emitted_tests import text_of_test
from verifier.deriving.writing.strategy import strategy_text
from verifier.deriving.writing.subject import CannotWriteError, Provenance, Target
from verifier.planning import own_samples
from verifier.planning.own_samples import overload_named, sampled_ops, samples
from verifier.torch_internals.names import OpOverload

GIVEN = Provenance("2.13.0", "0.1.0", "2 3", "float64", 0, "derive")


@pytest.fixture(autouse=True)
def no_samples_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what a test declares be gone after it."""
    monkeypatch.setattr(own_samples, "_makers", {})
    monkeypatch.setattr(own_samples, "_functions", {})


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
    code = strategy_text([Learned(op, calls, made)], Target.LOCAL_MAP, GIVEN)
    scope: dict[str, Any] = {}
    exec(compile(code, "derived.py", "exec"), scope)
    name = f"{__name__}.weighted".replace(".", "_")
    x = torch.ones(4, 3)
    rules = scope[f"{name}_rules"](x, [x, x], torch.ones(3))
    assert ([Shard(1)], [Shard(1), Shard(1), Shard(1), Shard(0)], [Shard(1), Shard(1), Shard(1), Shard(0)]) in rules
    by_rows = next(gradients for _, inputs, gradients in rules if inputs == [Shard(0), Shard(0), Shard(0), Replicate()])
    assert by_rows == [Shard(0), Shard(0), Shard(0), Partial("sum")]
    assert torch.equal(scope[f"{name}_sharded"](x, [x, x], scale=2.0), weighted(x, [x, x], scale=2.0))
    told = Learned(op, calls, made).gradients(Replicate())
    assert {len(one.outputs) for one in told} == {len(one.cotangents) for one in told} == {1}  # without the gradients
    assert {"others": "S(d)", "rows": "S(d)"} in [
        dict(zip(one.gradients, parts_text(tuple(one.gradients.values())), strict=True)) for one in told
    ]
    assert Learned(op, calls, made).gradients(Partial()) == []  # not asked of functions
    test = text_of_test({op: calls}, "derived", target=Target.LOCAL_MAP)
    compile(test, "test_derived.py", "exec")
    assert "combinations=placements" in test
    with pytest.raises(ValueError, match=r"no function .*weighed has samples; did you mean '.*weighted'"):
        overload_named(f"{__name__}.weighed")
    with pytest.raises(CannotWriteError, match="is a function and no op"):
        strategy_text([Learned(op, calls, made)], Target.SINGLE_DIM, GIVEN)


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
    code = strategy_text([Learned(op, calls, generalise(calls))], Target.LOCAL_MAP, GIVEN)
    assert f"import {__name__}\n" in code
    assert "rules.append(([Shard(d)], [Shard(d), Replicate()], [Shard(d), Partial()]))" in code
    assert f"return {__name__}.Squashed.apply(next(rest), next(rest), scale)" in code


def test_a_function_of_autograd_may_set_its_context_up_apart() -> None:
    samples(Apart.apply)(lambda: [(torch.ones(4, 3),)])
    op = overload_named(f"{__name__}.Apart.apply")
    assert str(op._schema).endswith("(Tensor rows) -> Tensor")
    assert overload_named(f"{__name__}.Apart") is op
    with pytest.raises(ValueError, match=r"no function .*Appart has samples; did you mean '.*\.Apart'"):
        overload_named(f"{__name__}.Appart")


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
