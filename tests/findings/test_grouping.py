"""Which failures are one finding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Difference, DifferenceKind, Fate, Observation, ProcessReport, Raised
from verifier.core.ops import is_view
from verifier.core.verdict import Phase, Verdict, VerdictKind
from verifier.findings.failures import Failure
from verifier.findings.grouping import Collector, group_key
from verifier.findings.record import message
from verifier.oracle.comparison import Spot
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.programs import keep_mesh_dims, targets, tell_apart_by
from verifier.torch_internals.placements import Combination

MESH = MeshSpec((2,))
R, S, P = Replicate(), Shard(0), Partial()
VALUE = DifferenceKind.VALUE


def case(name: str, *args: torch.Tensor, **kwargs: object) -> OpCase:
    return OpCase(f"aten.{name}", f"torch.ops.aten.{name}", args, kwargs)


def crash(of: OpCase, combination: Combination, function: str = "f", file: str = "f.py") -> Failure:
    trial = Trial(of, MESH, combination)
    error = Raised(Phase.FORWARD, "RuntimeError", "no", f"{function} ({file})", file=file)
    reports = tuple(ProcessReport((rank,), Phase.FORWARD, error) for rank in range(2))
    return Failure(trial, Observation(trial, Fate.COMPLETED, reports), Verdict(VerdictKind.CRASH, "no", Phase.FORWARD))


def wrong(of: OpCase, combination: Combination) -> Failure:
    trial = Trial(of, MESH, combination)
    reports = tuple(ProcessReport((rank,), Phase.DONE) for rank in range(2))
    verdict = Verdict(VerdictKind.WRONG_VALUE, "1, expected 2", Phase.FORWARD, "output")
    return Failure(trial, Observation(trial, Fate.COMPLETED, reports), verdict)


CHOICE = "_select_min_redistribute_cost", "_sharding_prop.py"
"""What DTensor runs for every op."""
ONE = torch.ones(2)
RELU, NEG, IN_PLACE = case("relu.default", ONE), case("neg.default", ONE), case("relu_.default", ONE)
OUT = case("relu.out", ONE, out=torch.empty(2))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_call_may_list_more_or_fewer_placements_than_the_mesh_has_dims(count: int) -> None:
    """Such a call is a finding like any other: neither its group nor its trial on a smaller mesh ends the tool."""
    given = OpCase("dtensor.redistribute", RELU.call, (torch.ones(4), [[S] * count]))
    failure = replace(crash(RELU, ((R, R),)), trial=Trial(given, MeshSpec((2, 2)), ((R, R),)))
    on_one_dim = replace(failure, trial=Trial(given, MESH, ((R,),)))
    assert [group_key(one).rpartition(": ")[0] for one in (failure, on_one_dim)]
    assert targets(keep_mesh_dims(given, (1,))) == (((S,),) if count > 1 else ())


def test_what_any_op_meets_is_one_finding_and_names_the_ops() -> None:
    collector = Collector()
    for of, at in ((RELU, ((S,),)), (NEG, ((P,),))):
        collector.add(crash(of, at, *CHOICE))
    (group,) = collector.groups.values()
    assert group.occurrences == 2
    assert [text.split(" on ")[0] for text in group.seen] == ["aten.relu.default", "aten.neg.default"]


@pytest.mark.parametrize(
    ("kinds", "groups"),
    [
        ([DifferenceKind.PLAIN_ZEROS], 1),
        ([DifferenceKind.STRUCTURE], 2),  # a gradient that is plain and not 0 is a defect of the op
        ([DifferenceKind.PLAIN_ZEROS, DifferenceKind.VALUE], 2),
    ],
)
def test_plain_gradients_of_zeros_are_one_finding_of_any_op(kinds: list[DifferenceKind], groups: int) -> None:
    def failed(of: OpCase) -> Failure:
        made = [Difference(kind, Phase.BACKWARD, "self.grad", 0, "this", "that") for kind in kinds]
        reports = tuple(ProcessReport((rank,), Phase.DONE, differences=tuple(made)) for rank in range(2))
        verdict = Verdict(VerdictKind.WRONG_GRADIENT, "this, expected that", Phase.BACKWARD, "self.grad")
        trial = Trial(of, MESH, ((S,),))
        return Failure(trial, Observation(trial, Fate.COMPLETED, reports), verdict)

    assert len({group_key(failed(of)) for of in (RELU, NEG)}) == groups


def test_a_program_is_no_view() -> None:
    assert not is_view(OpCase("aten.t", "torch.ops.aten.t"))  # of which the overload is not known yet
    assert not is_view(OpCase("dtensor.sequence", "strategies.redistribution.programs.sequence"))


def test_what_the_rules_of_views_raise_is_the_own_defect_of_views_alone() -> None:
    where = "_rewrite_plain_shard", "_view_ops.py"
    keys = [
        group_key(crash(of, ((S,),), *where)) for of in (RELU, NEG, case("expand.default", ONE), case("t.default", ONE))
    ]
    assert keys[0] == keys[1]
    assert len({*keys}) == 3


@pytest.mark.parametrize("other", [IN_PLACE, OUT], ids=["in-place", "out="])
def test_what_ops_that_write_meet_is_another(other: OpCase) -> None:
    functional = crash(RELU, ((S,),), *CHOICE)
    assert group_key(crash(other, ((S,), (P,))[: 1 + (other is OUT)], *CHOICE)) != group_key(functional)


@pytest.mark.parametrize("where", [("common_reduction_strategy", "_math_ops.py"), ("__call__", "_ops.py")])
def test_what_a_strategy_or_a_kernel_raises_is_the_ops_own(where: tuple[str, str]) -> None:
    assert group_key(crash(RELU, ((S,),), *where)) != group_key(crash(NEG, ((S,),), *where))
    assert group_key(crash(RELU, ((S,),), *where)) != group_key(crash(RELU, ((P,),), *where))


def test_placements_tell_no_defects_apart_where_dtensor_asks_no_rule() -> None:
    convolution = case("convolution.default", torch.ones(1, 1, 3), torch.ones(1, 1, 1))
    assert group_key(wrong(convolution, ((S,), (R,)))) == group_key(wrong(convolution, ((R,), (S,))))
    assert group_key(wrong(RELU, ((S,),))) != group_key(wrong(RELU, ((P,),)))


def test_how_other_mesh_dims_cut_makes_no_difference_to_a_reduction() -> None:
    def moved(source: Combination, *target: Placement) -> Failure:
        chain = "strategies.redistribution.programs.chain"
        one = wrong(OpCase("dtensor.redistribute", chain, (torch.ones(4, 4), [list(target)])), source)
        return replace(one, trial=replace(one.trial, mesh=MeshSpec((2, 2))))

    product = Partial("product")
    key = group_key(moved(((product, R),), S, R))
    assert group_key(moved(((product, S),), S, S)) == key
    assert group_key(moved(((product, Shard(1)),), S, Shard(1))) == key
    assert group_key(moved(((P, S),), S, S)) != key
    assert group_key(moved(((product, R),), R, R)) != key
    assert group_key(moved(((S, S),), R, S)) != group_key(moved(((S, R),), R, S))  # without one it may


def test_what_shows_on_a_flattened_mesh_alone_looks_like_nothing_that_shows_on_others() -> None:
    for one in (wrong(RELU, ((S, R),)), crash(RELU, ((S, R),), *CHOICE)):
        square, flat = (
            replace(one, trial=replace(one.trial, mesh=MeshSpec.parse(mesh))) for mesh in ("2x2", "2x2+flat")
        )
        assert "2-d mesh" in group_key(square)
        assert group_key(flat) == group_key(square).replace("2-d mesh", "2-d flattened mesh")


def test_facts_that_a_program_declares_tell_its_failures_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verifier.programs._facts", {})
    call, tensor = "torch.nn.functional.softmax", torch.ones(2)
    one, other = (OpCase("program", call, (tensor,), {"dim": dim}) for dim in (0, -1))
    assert group_key(crash(one, ((R,),))) == group_key(crash(other, ((R,),)))
    tell_apart_by(call, lambda case: ["dim<0"] if case.kwargs["dim"] == -1 else [])
    assert group_key(crash(one, ((R,),))) != group_key(crash(other, ((R,),)))


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (crash(RELU, ((S,),)), "aten.relu.default | CRASH | forward | RuntimeError in f (f.py) | "
         "aten.relu.default: S(0) | 1-d mesh | no flags"),
        (crash(IN_PLACE, ((S,),), *CHOICE), "any in-place op | CRASH | forward | "
         "RuntimeError in _select_min_redistribute_cost (_sharding_prop.py) | 1-d mesh"),
        (wrong(OUT, ((S,), (R,))), "aten.relu.out | WRONG_VALUE | forward | output | float | aten.relu.out: S(0),R | "
         "1-d mesh | no flags"),
        (replace(wrong(RELU, ((S,),)), by_hash_seed=True),
         "aten.relu.default | ranks choose by their hash seeds | 1-d mesh"),
    ],
    ids=["crash", "any op", "wrong value", "hash seed"],
)  # fmt: skip
def test_the_text_of_a_key_stays_as_baselines_hold_it(failure: Failure, text: str) -> None:
    assert group_key(failure) == text


def test_a_wrong_value_is_one_defect_wherever_it_is_noticed_first() -> None:
    reports = tuple(
        ProcessReport((r,), Phase.DONE, differences=(Spot(Phase.GATHER, "output").difference(VALUE, 1, 2, r),))
        for r in range(2)
    )
    before = wrong(RELU, ((S,),))
    observation = Observation(before.trial, Fate.COMPLETED, reports)
    verdict = judge(observation, make_reference(RELU))
    assert verdict.message == "gathered output on rank 0: got 1, expected 2"
    assert group_key(replace(before, observation=observation, verdict=verdict)) == group_key(before)


def test_what_others_saw_of_a_death_tells_nothing_apart() -> None:
    trial = Trial(case("add.Tensor", torch.ones(2), torch.ones(2)), MESH, ((R,), (R,)))
    seen = []
    for phase, error in ((Phase.SETUP, None), (Phase.FORWARD, Raised(Phase.FORWARD, "RuntimeError", "no", "f (f.py)"))):
        observation = Observation(trial, Fate.DIED, (None, ProcessReport((1,), phase, error)))
        seen.append(group_key(Failure(trial, observation, Verdict(VerdictKind.DIED, "rank 0 ended", phase))))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("kind", [VerdictKind.DIED, VerdictKind.HANG, VerdictKind.CRASH])
def test_the_phase_is_told_once(kind: VerdictKind) -> None:
    """Where ranks died or hang, the first line says in which phase each was; none may have reported one."""
    failure = crash(RELU, ((S,),))
    failure = replace(failure, verdict=Verdict(kind, "rank 0 ended with signal SIGKILL in forward", Phase.SETUP))
    assert ("during setup" in message(failure, "")) == (kind is VerdictKind.CRASH)


def test_gradients_of_several_results_are_a_column_each() -> None:
    trial = Trial(RELU, MeshSpec((2, 2)), ((S, R),), (((R, S), (P, R)),))
    verdict = Verdict(VerdictKind.WRONG_GRADIENT, "1, expected 2", Phase.BACKWARD, "x.grad", 0)
    failure = Failure(trial, Observation(trial, Fate.COMPLETED, ()), verdict)
    assert "aten.relu.default: R,S(0),R x S(0),R,P(sum)" in group_key(failure)
