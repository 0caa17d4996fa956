"""Torch's planners and cost model in terms of our layouts and steps."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch_versions import torch_is

from verifier.redistribution.layouts import Layout, Space, parse_layout
from verifier.redistribution.steps import steps_between
from verifier.redistribution.torch_side import NoSuchStep, Refused, TorchSide
from verifier.torch_internals.groups import leave_world
from verifier.torch_internals.redistributing import planners
from verifier.torch_internals.redistributing.planners import PlannedStep, Planner
from verifier.torch_internals.simulation import start_simulated_world

SPACE = Space((2, 4), (8, 8))


def side(flattened: bool = False) -> TorchSide:
    return TorchSide(SPACE, torch.float32, flattened)


def of(text: str) -> Layout:
    return parse_layout(text, 2, 2)


def kinds(torch_side: TorchSide, source: str, target: str) -> list[tuple[str, tuple[int, ...]]]:
    return [(step.kind, step.mesh_dims) for step in torch_side.plan(of(source), of(target)).steps]


def test_the_plan_of_nested_shards() -> None:
    """DTensor gathers both mesh dims, because the outer one cannot be gathered alone."""
    assert kinds(side(), "S(0)S(0)", "RS(0)") == [("all_gather", (1,)), ("all_gather", (0,)), ("slice", ())]


def test_flattened_submeshes_merge_collectives() -> None:
    assert kinds(side(), "S(0)S(0)", "RR") == [("all_gather", (1,)), ("all_gather", (0,))]
    assert kinds(side(flattened=True), "S(0)S(0)", "RR") == [("all_gather", (0, 1))]
    assert kinds(side(flattened=True), "PP", "S(0)S(0)") == [("reduce_scatter", (0, 1))]


def test_submeshes_made_without_process_groups_merge_as_torchs_own() -> None:
    start_simulated_world(8)
    try:
        names = ("dim0", "dim1", "dim2")
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
        for count in (2, 3):
            for chosen in itertools.combinations(names, count):
                mesh[chosen]._flatten("_".join(chosen))
        ours = Planner((2, 2, 2), (8, 8), torch.float32, flattened=True)
        found = {name: flat._layout for name, flat in mesh._flatten_mapping.items()}
        assert {name: flat._layout for name, flat in ours.mesh._flatten_mapping.items()} == found
        assert len(found) == 4
    finally:
        leave_world()


def test_other_than_default_shard_orders_are_planned_and_end_where_they_should() -> None:
    path = side().plan(of("S(0)[1]S(0)[0]"), of("S(0)S(0)"))
    assert path.target == of("S(0)S(0)")
    assert len(path.steps) > 1


@pytest.mark.parametrize("planner", ["greedy", "graph"])
@pytest.mark.parametrize(("mesh", "shape"), [((2, 4), (8, 8)), ((2, 3), (7, 5))])
def test_every_plan_of_torch_is_made_of_steps_that_can_be(
    planner: planners.PlannerName, mesh: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """So a new planner of torch with a wrong path is found without running it. The greedy one plans S -> P.

    Torch 2.13 raises an exception when it executes that step.
    """
    space = Space(mesh, shape)
    torch_side = TorchSide(space)
    refused = []
    for source, target in itertools.permutations(space.layouts, 2):
        try:
            assert torch_side.plan(source, target, planner).target == target
        except Refused:
            refused.append((source, target))
    assert len(refused) == (60 if planner == "greedy" and torch_is("<2.14") else 0)


def test_a_planned_step_that_cannot_be_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that is wrong on purpose: it gathers the outer of two shards alone."""
    wrong = PlannedStep((0,), torch.distributed.tensor.Shard(0), torch.distributed.tensor.Replicate(), "all_gather")
    monkeypatch.setattr(Planner, "plan", lambda *_: (wrong,))
    with pytest.raises(NoSuchStep, match=r"all_gather over mesh dim 0 from \(S\(0\), S\(0\)\) to \(R, S\(0\)\)"):
        side().plan(of("S(0)S(0)"), of("RS(0)"))


def test_a_plan_that_ends_elsewhere_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "plan", lambda *_: ())
    with pytest.raises(NoSuchStep, match="ends at"):
        side().plan(of("S(0)R"), of("RR"))


def test_who_has_a_step() -> None:
    torch_side = side()

    def who(source: str, target: str) -> dict[str, tuple[str, ...]]:
        return {step.kind: torch_side.available(step) for step in steps_between(SPACE, of(source), of(target))}

    assert who("S(0)R", "RR") == {"all_gather": ("greedy", "graph")}
    assert who("S(0)[1]S(0)[0]", "RS(0)") == {"all_gather": ("graph",)}
    assert who("S(0)S(0)", "RR") == {"all_gather": ("merged",)}
    assert who("S(0)S(0)", "S(0)[1]S(0)[0]") == {"all_to_all": (), "permute": ()}
    assert who("S(0)S(1)", "S(1)S(0)") == {"all_to_all": ()}
    pads = () if torch_is("<2.14") else ("greedy", "graph")
    assert who("S(0)R", "PR") == {"pad": pads}, "torch 2.13 does not execute what its greedy planner plans"


def test_costs_are_those_that_torch_predicts() -> None:
    """The sum over the steps, where torch's formulas take even shards for granted."""
    torch_side = side()
    compared = 0
    for source, target in itertools.permutations(SPACE.layouts, 2):
        if source.default_order and target.default_order and not target.partial_dims:
            path = torch_side.plan(source, target)
            assert path.seconds(torch_side.seconds) == pytest.approx(torch_side.predicted(source, target), rel=1e-9)
            compared += 1
    assert compared == 16 * 9 - 9


def test_torchs_planning_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking leaves nothing behind in torch's caches."""
    torch_side = side()
    module = planners.redistribute_module
    before = (module.get_redistribute_planner, dict(module._planner_cache), set(module._warned_flatten_issues))
    torch_side.plan(of("S(0)S(0)"), of("RR"))
    assert (module.get_redistribute_planner, module._planner_cache, module._warned_flatten_issues) == before
