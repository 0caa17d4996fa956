"""An op whose gradient runs ops without a strategy: these get one in the same module."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from verifier.core.case import MeshSpec, OpCase
from verifier.deriving import derive as deriving
from verifier.deriving.closing import Closed
from verifier.deriving.derive import Derived, DeriveRequest, derivation
from verifier.deriving.learning.gradients import gradient_rules, ops_without_strategy
from verifier.deriving.learning.isolated import Workshop
from verifier.deriving.learning.learned import Learned, parts_text
from verifier.deriving.text import derivation_json, derivation_lines
from verifier.execution.imports import run_imports
from verifier.planning import own_samples
from verifier.planning.own_samples import overload_named
from verifier.rules.check import check_sample
from verifier.rules.options import CheckOptions
from verifier.rules.results import SampleReport
from verifier.rules.samples import SampleOptions, Values, installed_sources
from verifier.rules.samples import Target as OpTarget

REPLICATED: Placement = Replicate()
HERE = Workshop(jobs=0)
"""Ops that a test defines are not known in a worker."""
NORM = """
import torch, verifier

library = torch.library.Library("{space}", "DEF")
library.define("norm(Tensor x, float eps=1e-6) -> (Tensor, Tensor)")
library.define("norm_backward(Tensor grad, Tensor x, Tensor scale) -> Tensor")

@torch.library.impl(library, "norm", "CompositeExplicitAutograd")
def norm(x, eps=1e-6):
    scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * scale, scale

@torch.library.impl(library, "norm_backward", "CompositeExplicitAutograd")
def norm_backward(grad, x, scale):
    {tells}
    return grad * scale - x * (grad * x).mean(-1, keepdim=True) * scale**3

def setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output[1])
    ctx.mark_non_differentiable(output[1])

def backward(ctx, grad, _):
    return torch.ops.{space}.norm_backward(grad, *ctx.saved_tensors), None

torch.library.register_autograd("{space}::norm", backward, setup_context=setup)
verifier.samples("{space}::norm")(lambda: [(torch.randn(4, 6),), (torch.randn(2, 3, 6), 0.1)])
"""


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch, rules_taken_back: None) -> None:
    """Let what a test declares and registers be gone after it."""
    monkeypatch.setattr(own_samples, "_makers", {})


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Derive in this process, and take what is derived for right."""
    monkeypatch.setattr(deriving, "derivation", lambda request: derivation(request, HERE))
    monkeypatch.setattr(deriving, "_checked", lambda *_: Closed(1, 0, (), 0, ""))


def derived(folder: Path, space: str, tells: str = "") -> Derived:
    file = folder / f"{space}.py"
    file.write_text(NORM.format(space=space, tells=tells))
    run_imports([str(file)])
    return deriving.derive(DeriveRequest(f"{space}::norm", max_samples=4, imports=[str(file)]), f"{space}_strategy")


def reports_of(op: str, code: str) -> list[SampleReport]:
    """Return what level 1 says of an op under the strategies in ``code``."""
    exec(compile(code, "derived.py", "exec"), {})
    options = CheckOptions((MeshSpec.parse("2"), MeshSpec.parse("3")), claims_only=True, samples_called_again=0)
    samples = installed_sources()["own"].samples(OpTarget(op, "own", op), SampleOptions(max_samples=4))
    return [check_sample(sample, options) for sample in samples]


@pytest.mark.usefixtures("passing")
def test_what_runs_in_the_gradient_gets_a_strategy_in_the_same_module(tmp_path: Path) -> None:
    made = derived(tmp_path, "with_backward")
    backward = "with_backward.norm_backward.default"
    assert [str(one.op) for one in made.learned] == ["with_backward.norm.default", backward]
    mutants = made.closed.mutants
    assert mutants is not None
    assert (mutants.tried > 8, mutants.survivors, mutants.disagrees) == (True, (), ())
    assert f"{backward}, which runs in the gradient of with_backward.norm.default" in re.sub(r"\n# ", " ", made.code)
    assert made.test.count(".requires_grad_()") == 2
    assert f"verify(torch.ops.{backward}, *args" in made.test
    assert any(f"{backward}, which runs in its gradient: " in line for line in derivation_lines(made, None))
    assert backward in derivation_json(made)
    reports = reports_of(backward, made.code)
    assert not [wrong for report in reports for wrong in report.wrong]
    sharded = ("S(0)", "S(0)", "S(0)")
    assert any(rule.inputs == sharded for report in reports for rule in report.confirmed)
    assert "in the gradient of with_backward.norm.default" in reports[0].origin


@pytest.mark.usefixtures("passing")
def test_a_wrong_rule_of_what_runs_in_the_gradient_is_refuted(tmp_path: Path) -> None:
    code = derived(tmp_path, "wrong_backward").code
    at_any_dim = code.replace("if d < grad_ndim - 1:", "if True:")
    assert at_any_dim != code
    wrong = [
        wrong for report in reports_of("wrong_backward.norm_backward.default", at_any_dim) for wrong in report.wrong
    ]
    assert {one.rule.inputs for one in wrong} >= {("S(1)",) * 3, ("S(2)",) * 3}
    assert all(one.rule.inputs != ("S(0)",) * 3 for one in wrong)


@pytest.mark.usefixtures("passing")
def test_what_cannot_be_derived_of_a_gradient_is_told_and_its_test_asks_for_none(tmp_path: Path) -> None:
    made = derived(tmp_path, "random_backward", tells="scale = scale * torch.rand_like(scale)")
    ((name, why),) = made.not_derived.items()
    assert (name, len(made.learned)) == ("random_backward.norm_backward.default", 1)
    assert "random" in why
    assert ".requires_grad_()" not in made.test
    assert any(f"{name} runs in its gradient and has no strategy: " in line for line in derivation_lines(made, None))


def test_the_op_alone_gets_its_strategy_if_that_of_its_gradient_does_not_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def checked(code: str, *_: object) -> Closed:
        return Closed(1, 0, (), int("norm_backward" in code), "it did not pass")

    monkeypatch.setattr(deriving, "derivation", lambda request: derivation(request, HERE))
    monkeypatch.setattr(deriving, "_checked", checked)
    made = derived(tmp_path, "failing_backward")
    assert made.closed.passed
    assert "norm_backward" not in made.code
    assert [*made.not_derived] == ["failing_backward.norm_backward.default"]
    assert ".requires_grad_()" not in made.test


@pytest.mark.parametrize(
    ("op", "args", "missing"),
    [
        ("avg_pool2d.default", (torch.ones(1, 2, 4, 4), [2, 2]), ("aten.avg_pool2d_backward.default",)),
        ("mul.Tensor", (torch.ones(3), torch.ones(3)), ()),
        ("isfinite.default", (torch.ones(3),), ()),
    ],
)
def test_ops_that_a_gradient_runs_are_told_if_they_have_no_strategy(
    op: str, args: tuple[Any, ...], missing: tuple[str, ...]
) -> None:
    case = OpCase(f"aten.{op}", f"torch.ops.aten.{op}", args)
    assert ops_without_strategy([case]) == missing


COUNTED = """
import torch, verifier

library = torch.library.Library("{space}", "DEF")
library.define("scaled(Tensor x, Tensor factors) -> Tensor")
torch.library.impl(library, "scaled", "CompositeExplicitAutograd")(lambda x, factors: x * factors)

def setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)

def backward(ctx, grad):
    x, factors = ctx.saved_tensors
    return grad * factors{times}, (grad * x).sum(0)

torch.library.register_autograd("{space}::scaled", backward, setup_context=setup)
verifier.samples("{space}::scaled")(lambda: [(torch.randn(4, 6), torch.randn(6))])
"""


def gradients_of(folder: Path, space: str, times: str = "", cotangent: Placement = REPLICATED) -> dict[str, list[str]]:
    """Return the placements of the gradients of ``scaled``, by those of its tensors."""
    file = folder / f"{space}.py"
    file.write_text(COUNTED.format(space=space, times=times))
    run_imports([str(file)])
    op = overload_named(f"{space}::scaled")
    learned = Learned(op, *derivation(DeriveRequest(str(op), max_samples=4), HERE))
    assert {"S(d), R"} <= {", ".join(parts_text(rule.inputs)) for rule in learned.made.rules}
    found = learned.gradients(cotangent)
    assert all(tuple(one.gradients) == ("x", "factors") for one in found)
    return {", ".join(parts_text(one.rule.inputs)): parts_text(tuple(one.gradients.values())) for one in found}


def test_gradients_are_placed_where_each_rank_differentiates_its_part(tmp_path: Path) -> None:
    found = gradients_of(tmp_path, "gradients_placed")
    assert found["S(d), R"] == ["S(d)", "P(sum)"]
    assert found["P(sum), R"] == ["R", "P(sum)"]
    assert found["R, P(sum)"] == ["P(sum)", "R"]


def test_a_local_gradient_that_counts_local_rows_is_the_gradient_under_no_placement(tmp_path: Path) -> None:
    found = gradients_of(tmp_path, "rows_counted", times=" * grad.shape[0]")
    assert "S(d), R" not in found
    assert found["R, P(sum)"] == ["P(sum)", "R"]


def test_parts_of_a_cotangent_times_parts_of_a_tensor_are_no_parts_of_a_gradient(tmp_path: Path) -> None:
    assert gradients_of(tmp_path, "pending_cotangents", cotangent=Partial()) == {}
    calls, made = derivation(DeriveRequest("aten.neg.default", max_samples=4), HERE)
    found = Learned(torch.ops.aten.neg.default, calls, made).gradients(Partial())
    assert ["P(sum)", "P(sum)"] in [parts_text((*one.rule.inputs, *one.gradients.values())) for one in found]


@dataclass
class SameRows:
    """A sample that has one case for all draws."""

    case: OpCase
    op = "aten.embedding.default"
    origin, not_testable, claims_only = "rows", "", ""

    def draw(self, size: int, draw: int, values: Values = Values.USUAL) -> OpCase:
        return self.case


def test_a_sparse_gradient_is_placed_as_a_dense_one() -> None:
    rows = (torch.randn(6, 4, dtype=torch.float64), torch.tensor([1, 5, 5, 0]))
    split = frozenset({Shard(1)})
    found = []
    for sparse in (False, True):
        case = OpCase(SameRows.op, "torch.ops.aten.embedding.default", rows, {"sparse": sparse})
        rules = {(Shard(1), REPLICATED): (split,), (REPLICATED, Shard(0)): (frozenset({Shard(0)}),)}
        names = ["weight", "indices"]
        places, made = gradient_rules(SameRows(case), CheckOptions((MeshSpec((2,)),)), names, names, rules)
        assert places == (0,)
        assert made[Shard(1), REPLICATED] == (split, split)
        assert made[REPLICATED, Shard(0)][1] == {Partial()}
        found.append(made)
    assert found[0] == found[1]


@pytest.mark.usefixtures("passing")
def test_the_output_says_how_gradients_are_placed(tmp_path: Path) -> None:
    made = derived(tmp_path, "told_backward")
    assert "  gradients under S(d) -> S(d), S(d) if d < x_ndim - 1: x S(d)" in derivation_lines(made, None)
    record = json.loads(derivation_json(made))
    assert {"cotangents": ["S(d)", "S(d)"], "gradients": {"x": "S(d)"}}.items() <= record["gradients"][0].items()
    assert record["in_gradient"][0]["gradients"] == []  # it has no gradient formula


def test_a_strategy_that_is_made_from_a_decomposition_is_none_that_was_derived() -> None:
    case = OpCase("aten.pixel_shuffle.default", "torch.ops.aten.pixel_shuffle.default", (torch.ones(1, 4, 2, 2), 2))
    assert ops_without_strategy([case]) == ()
    assert ops_without_strategy([case], or_decomposed=True) == ("aten.pixel_unshuffle.default",)


def test_an_op_that_runs_in_no_gradient_has_no_calls_of_one(tmp_path: Path) -> None:
    file = tmp_path / "other.py"
    text = NORM.format(space="no_gradient", tells="")
    file.write_text(text.replace("torch.library.register_autograd", "# "))
    run_imports([str(file)])
    samples = installed_sources()["own"].samples(
        OpTarget("no_gradient.norm_backward.default", "own", "no_gradient.norm_backward.default"), SampleOptions()
    )
    origins = [sample.origin for sample in samples]
    assert origins
    assert not [origin for origin in origins if "in the gradient of" in origin]
