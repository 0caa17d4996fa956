"""Properties of torch's planners: what holds of torch today, and a planner made wrong on purpose for each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from verifier.redistribution.layouts import Space
from verifier.redistribution.properties import PROPERTIES, Outcome, Violation, check_properties
from verifier.redistribution.torch_side import TorchSide
from verifier.torch_internals.redistributing.planners import PlannedStep, Planner, Refused


@pytest.fixture(scope="module")
def plain() -> dict[str, Outcome]:
    space = Space((2, 4), (8, 8))
    return {one.name: one for one in check_properties(space, TorchSide(space, torch.float32, flattened=True))}


def test_every_property_is_checked(plain: dict[str, Outcome]) -> None:
    assert plain.keys() == PROPERTIES.keys()
    assert {name: one.checked > 0 for name, one in plain.items()} == dict.fromkeys(PROPERTIES, True)


def test_what_does_not_hold_of_torch(plain: dict[str, Outcome]) -> None:
    """benchmarks/planner_defects.py shows these with torch alone."""
    assert {name for name, one in plain.items() if one.violations} == {"predicted", "triangle", "merging"}
    layouts = {tuple(map(str, violation.layouts[:2])) for violation in plain["predicted"].violations}
    assert ("(S(0), S(0))", "(R, R)") in layouts, "merged, but predicted as two gathers"


def test_a_strided_gather_is_free_and_makes_plans_depend_on_history() -> None:
    space = Space((2, 4), (8, 8), strided=("_S(0, 2)",))
    names = ("history", "hash seed", "free")
    found = {one.name: one for one in check_properties(space, TorchSide(space), names)}
    assert [name for name in names if found[name].violations] == ["history", "free"]
    free = {tuple(map(str, violation.layouts)) for violation in found["free"].violations}
    assert ("(R, _S(0, 2))", "(R, R)") in free
    assert any("_S(0, 2)" in one.what and "_S" not in f"{one.layouts}" for one in found["history"].violations)


# -------------------------------------------------------------------------------------------- wrong on purpose
Method = Callable[..., Any]


def predicts_double(given: Method) -> Method:
    return lambda *asked: 2 * given(*asked)


def charges_more_for_two_gathers_at_once(given: Method) -> Method:
    at_once = ((Shard(0), Shard(1)), (Replicate(), Replicate()))
    return lambda self, source, target: given(self, source, target) + ((source[0], target[0]) == at_once)


def plans_a_detour(given: Method) -> Method:
    """The graph planner gathers a shard and takes it again before everything else."""

    def plan(self: Any, source: Any, target: Any, planner: str = "default") -> Any:
        steps = given(self, source, target, planner)
        if planner == "graph" and source[0] == (Replicate(), Shard(0)):
            there, back = (Shard(0), Replicate()), (Replicate(), Shard(0))
            return (PlannedStep((1,), *there, "all_gather"), PlannedStep((1,), *back, None), *steps)
        return steps

    return plan


def gathers_the_outer_shard_alone(given: Method) -> Method:
    def plan(self: Any, source: Any, target: Any, planner: str = "default") -> Any:
        if source[0] == (Shard(0), Shard(0)) and target[0] == (Replicate(), Shard(0)):
            return (PlannedStep((0,), Shard(0), Replicate(), "all_gather"),)
        return given(self, source, target, planner)

    return plan


def refuses_an_all_to_all(given: Method) -> Method:
    def plan(self: Any, source: Any, target: Any, planner: str = "default") -> Any:
        if source[0] == (Shard(0), Replicate()) and target[0] == (Shard(1), Replicate()):
            raise Refused("no")
        return given(self, source, target, planner)

    return plan


def remembers(given: Method) -> Method:
    """After any history, the graph planner takes its steps twice."""

    def graph_planner(self: Any, history: Any, backwards: bool = False) -> Any:
        plan = given(self, history, backwards)
        return (lambda source, target: 2 * plan(source, target)) if history else plan

    return graph_planner


def heeds_the_order_of_its_sets(given: Method) -> Method:
    def graph_planner(self: Any, history: Any, backwards: bool = False) -> Any:
        plan = given(self, history, backwards)
        return (lambda source, target: plan(source, target)[::-1]) if backwards else plan

    return graph_planner


def merges_dearly(given: Method) -> Method:
    def step_cost(self: Any, kind: str, mesh_dims: tuple[int, ...], *rest: Any) -> Any:
        return given(self, kind, mesh_dims, *rest) + (kind == "all_gather" and len(mesh_dims) > 1)

    return step_cost


def gathers_for_free(given: Method) -> Method:
    return lambda *asked: dict.fromkeys(given(*asked), 0.0)


@pytest.mark.parametrize(
    ("name", "method", "mutant"),
    [
        ("predicted", "predicted", predicts_double),
        ("triangle", "predicted", charges_more_for_two_gathers_at_once),
        ("cheapest", "plan", plans_a_detour),
        ("possible", "plan", gathers_the_outer_shard_alone),
        ("planned", "plan", refuses_an_all_to_all),
        ("history", "graph_planner", remembers),
        ("hash seed", "graph_planner", heeds_the_order_of_its_sets),
        ("merging", "step_cost", merges_dearly),
        ("free", "moves", gathers_for_free),
    ],
)
def test_a_wrong_planner_is_caught(
    name: str,
    method: str,
    mutant: Callable[[Method], Method],
    plain: dict[str, Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = violations(name)
    monkeypatch.setattr(Planner, method, mutant(getattr(Planner, method)))
    assert len(violations(name)) > len(before)


def violations(name: str) -> list[Violation]:
    space = Space((2, 2), (8, 8))
    (outcome,) = check_properties(space, TorchSide(space, torch.float32, True), [name])
    return outcome.violations
