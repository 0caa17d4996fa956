"""Which rules DTensor claims of a call, which of them a trial ran, and that trials are steered to the others."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from verifier.core.arguments import tensor_arguments
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Executed, Fate, Observation, ProcessReport
from verifier.core.verdict import Phase, Verdict, VerdictKind
from verifier.oracle.reference import make_reference
from verifier.placements.combinations import CombinationSpace
from verifier.planning.steering import Steering
from verifier.planning.trials import plan_case
from verifier.rules.claims import claimed_rules
from verifier.runs.coverage import RuleCoverage, columns_run
from verifier.torch_internals.placements import Combination, strided_shard

R = Replicate()
MM = OpCase("aten.mm.default", "torch.ops.aten.mm.default", (torch.ones(4, 3), torch.ones(3, 5)))
SQUARE = MeshSpec((2, 2))


def observed(combination: Combination, *executed: Executed, mesh: MeshSpec = SQUARE) -> Observation:
    reports = tuple(ProcessReport((rank,), Phase.DONE, executed=executed) for rank in range(mesh.world_size))
    return Observation(Trial(MM, mesh, combination), Fate.COMPLETED, reports)


def test_the_rules_of_a_product_of_matrices() -> None:
    rules = claimed_rules(MM, 2)
    assert {"R, R", "S(0), R", "R, S(1)", "S(1), S(0)", "P(sum), R", "R, P(sum)"} <= set(rules)
    assert "S(0), S(0)" not in rules
    assert rules["S(1), S(0)"] == (Shard(1), Shard(0))


def test_a_masked_rule_is_asked_for_with_replicated_indices() -> None:
    lookup = OpCase(
        "aten.embedding.default", "torch.ops.aten.embedding.default", (torch.ones(4, 2), torch.tensor([1, 3]))
    )
    assert claimed_rules(lookup, 2)["S(0), MaskP(sum)"] == (Shard(0), R)


@pytest.mark.parametrize(
    "case",
    [
        OpCase("aten.embedding.default", "torch.nn.functional.embedding", (torch.tensor([1]), torch.ones(4, 2))),
        OpCase("aten.mm.default", "torch.ops.aten.mm.default", (torch.ones(4, 3), torch.ones(4, 3))),
        OpCase("aten.equal.default", "torch.ops.aten.equal.default", (torch.ones(4), torch.ones(4))),
    ],
    ids=["no operator", "it raises", "code of its own"],
)
def test_nothing_is_said_of_other_calls(case: OpCase) -> None:
    assert claimed_rules(case, 2) == {}


def test_what_ran_is_where_dtensor_redistributed_to() -> None:
    given: Combination = ((Shard(0), R), (Shard(1), R))
    assert list(columns_run(observed(given))) == ["S(0), S(1)", "R, R"]
    there = Executed(Phase.FORWARD, None, "aten.mm.default", ("(S(0), P(sum))", "(R, MaskP(sum))"))
    elsewhere = Executed(Phase.FORWARD, None, "aten.add.Tensor", ("(S(1), R)", "(R, R)"))
    backward = Executed(Phase.BACKWARD, 0, "aten.mm.default", ("(S(1), R)", "(R, R)"))
    assert list(columns_run(observed(given, there, elsewhere, backward))) == ["S(0), R", "P(sum), MaskP(sum)"]


def test_a_trial_that_was_refused_ran_nothing() -> None:
    coverage = RuleCoverage()
    coverage.claim("aten.mm.default", ["R, R", "S(0), R"])
    one = observed(((R,), (R,)), mesh=MeshSpec((2,)))
    for kind in (VerdictKind.UNSUPPORTED, VerdictKind.TOOL_ERROR):
        coverage.run(one, Verdict(kind, phase=Phase.FORWARD))
    assert coverage.records()["aten.mm.default"].exercised == []
    coverage.run(one, Verdict(VerdictKind.UNSUPPORTED, phase=Phase.BACKWARD))  # its forward call ran
    other = observed(((Shard(0),), (Shard(0),)), mesh=MeshSpec((2,)))
    coverage.run(other, Verdict(VerdictKind.WRONG_VALUE))
    record = coverage.records()["aten.mm.default"]
    assert (record.claimed, record.exercised) == (["R, R", "S(0), R"], ["R, R"])


def planned(steering: Steering, cases: int, mesh: MeshSpec) -> set[str]:
    """Return the rules among the combinations that are chosen for the same case, drawn again and again."""
    chosen = [combination for _ in range(cases) for combination in steering.wanted(MM, mesh)]
    return {", ".join(map(str, column)) for combination in chosen for column in zip(*combination, strict=True)}


@pytest.mark.parametrize("mesh", [MeshSpec((2,)), SQUARE], ids=str)
def test_every_claimed_rule_has_its_turn(mesh: MeshSpec) -> None:
    rules = set(claimed_rules(MM, 2))
    assert planned(Steering(2), 1, mesh) < rules
    assert planned(Steering(2), len(rules), mesh) == rules


def test_the_same_rule_is_taken_on_both_mesh_dims_and_others_are() -> None:
    chosen = Steering(8).wanted(MM, SQUARE)
    same = [all(first == second for first, second in combination) for combination in chosen]
    assert True in same
    assert False in same


def test_rules_are_news_once() -> None:
    steering = Steering(2)
    assert set(steering.news(MM, SQUARE)) == set(claimed_rules(MM, 2))
    assert steering.news(MM, SQUARE) == ()


def test_what_is_wanted_is_tried_where_not_everything_fits() -> None:
    reference = make_reference(MM)
    wanted: list[Combination] = [((Shard(1), Partial()), (Shard(0), R)), ((R, R), (R, R)), ((R, R), (R, Shard(0)))]
    for cap in (6, 60, 200):  # the last has room for a cover of all pairs
        plan = plan_case(MM, reference, SQUARE, cap, 0, wanted)
        assert set(wanted) <= {trial.combination for trial in plan.trials}
        assert len({trial.combination for trial in plan.trials}) == len(plan.trials) == cap
        assert plan.total > cap
    everything = plan_case(MM, reference, MeshSpec((2,)), None, 0, [((Shard(1),), (Shard(0),))])
    assert len(everything.trials) == everything.total


def test_what_is_wanted_need_not_be_what_is_drawn() -> None:
    strided: Combination = ((strided_shard(0, 2), R), (R, R))
    plan = plan_case(MM, make_reference(MM), SQUARE, 6, 0, [strided])
    assert len(plan.trials) == 6
    assert strided in [trial.combination for trial in plan.trials]


def pairs_in(combinations: Iterable[Combination]) -> set[tuple[object, ...]]:
    """Return which two placements occur together, and where."""
    rows = [[placement for placements in combination for placement in placements] for combination in combinations]
    return {(i, row[i], j, row[j]) for row in rows for i, j in itertools.combinations(range(len(row)), 2)}


@pytest.mark.parametrize("steered", [False, True])
def test_what_is_wanted_leaves_no_pair_of_placements_uncovered(steered: bool) -> None:
    tensors = tensor_arguments(MM.args, MM.kwargs)
    every = pairs_in(CombinationSpace(tensors, 2))
    wanted = Steering(64).wanted(MM, SQUARE) if steered else []
    cap = 150
    plan = plan_case(MM, make_reference(MM), SQUARE, cap, 0, wanted)
    assert len(plan.trials) == cap < plan.total
    assert pairs_in(trial.combination for trial in plan.trials) == every
    assert pairs_in(itertools.islice(CombinationSpace(tensors, 2), cap)) != every  # it is no accident
