"""Programs around any op: what is drawn runs, can be stored, and is taken apart again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from opinfo_cases import context, drawn, tensors
from torch.distributed.tensor import Partial, Replicate, Shard

from strategies.opinfo import programs
from strategies.opinfo.composing import COMPOSITIONS, composed
from strategies.opinfo.family import FAMILY
from strategies.opinfo.random_ops import DETERMINED, PROMISES, RANDOM, random_case
from verifier.core.arguments import combination_rows
from verifier.core.call_text import describe_call
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Executed, Fate, Observation, ProcessReport, Raised
from verifier.core.verdict import Phase, Verdict, VerdictKind
from verifier.execution.packing import pack, unpack
from verifier.findings.failures import Failure
from verifier.findings.grouping import case_flags, group_key
from verifier.findings.minimising import Minimiser
from verifier.oracle.reference import make_reference
from verifier.planning.steering import Steering
from verifier.programs import is_composed, simpler_calls
from verifier.records.values import case_record, load_case
from verifier.runs.coverage import columns_run
from verifier.torch_internals.placements import Placements

MESH = MeshSpec((2,))
R, S0, P = Replicate(), Shard(0), Partial()
NUMBERS = torch.tensor([[3.0, -1.0, 2.0], [5.0, -4.0, 7.0]], dtype=torch.float64)
MUL = OpCase("aten.mul.Tensor", "torch.ops.aten.mul.Tensor", (NUMBERS, NUMBERS + 1), family="opinfo")
SUM = OpCase("aten.sum.dim_IntList", "torch.ops.aten.sum.dim_IntList", (NUMBERS, [0], True), family="opinfo")
SELECT = OpCase("aten.select.int", "torch.ops.aten.select.int", (NUMBERS, 0, 1), family="opinfo")
SQUARED = OpCase("aten.pow_.Scalar", "torch.ops.aten.pow_.Scalar", (NUMBERS, 2), family="opinfo")
COMPOSITE = OpCase("aten.square.default", "torch.ops.aten.square.default", (NUMBERS,), family="opinfo")
CAT = OpCase("aten.cat.default", "torch.ops.aten.cat.default", ([NUMBERS, NUMBERS], 1), family="opinfo")


def program(case: OpCase, kind: str, seed: int = 0) -> OpCase:
    made = composed(case, kind, MESH, seed)
    assert made is not None
    return made


def outputs(case: OpCase) -> list[torch.Tensor]:
    reference = make_reference(case)
    assert reference.raised is None
    return reference.outputs


def test_every_kind_comes_up_runs_and_can_be_stored() -> None:
    cases = drawn(context("mm", "aten.mul.Tensor", "cat", "select", "transpose", "cov", "aten.relu_.*"), 500)
    cases += drawn(context("aten.mul.Tensor"), 100)  # of few ops one tensor can stand in two places
    kinds: Counter[str] = Counter()
    for case in cases:
        own = case.tags & set(COMPOSITIONS)
        kinds.update(own)
        assert is_composed(case) == bool(own)
        if own:
            reference = make_reference(case)
            assert reference.raised is None
            assert case.op == case.args[0]
            again = make_reference(load_case(case_record(case)))
            for one, other in zip(reference.outputs, again.outputs, strict=True):
                assert torch.equal(one.detach(), other.detach())
    assert set(kinds) == set(COMPOSITIONS)
    assert len(cases) / 6 < kinds.total() < len(cases) / 2


def test_plain_calls_are_drawn_as_they_were() -> None:
    plain = [case for case in drawn(context("mul"), 160) if not is_composed(case)]
    assert {case.op for case in plain} >= {"aten.mul.Tensor", "aten.mul.Scalar", "aten.mul_.Tensor", "aten.mul.out"}


def test_the_same_choice_makes_the_same_program() -> None:
    for kind, case in (("result used twice", MUL), ("pending argument", MUL), ("second call", SUM)):
        assert str(program(case, kind, 3).args) == str(program(case, kind, 3).args)
        assert len({str(program(case, kind, seed).args) for seed in range(20)}) > 1


def test_one_tensor_in_two_places_is_one_tensor_wherever_it_goes() -> None:
    case = program(MUL, "one tensor twice")
    assert case.args == ("aten.mul.Tensor", "self", "other")
    assert torch.equal(outputs(case)[0], NUMBERS * NUMBERS)
    for again in (case, load_case(case_record(case)), unpack(pack(case))):
        assert len(tensors(again)) == 1
    wanting = replace(case, kwargs={"self": NUMBERS.clone().requires_grad_()})
    reference = make_reference(wanting)
    (gradient,) = torch.autograd.grad(reference.outputs[0].sum(), reference.inputs)
    assert torch.equal(gradient, 2 * NUMBERS)


def test_a_list_comes_with_its_tensors_twice() -> None:
    case = program(CAT, "one tensor twice")
    assert len(tensors(case)) == 1
    assert torch.equal(outputs(case)[0], torch.cat([NUMBERS, NUMBERS], 1))


def test_each_consumer_gets_the_result() -> None:
    names: Counter[str] = Counter()
    for seed in range(40):
        case = program(MUL, "result used twice", seed)
        consumers: Any = case.args[1]
        names.update(consumer[0] for consumer in consumers)
        made = outputs(case)
        assert len(made) == 1 + len(consumers)
        assert torch.equal(made[0], NUMBERS * (NUMBERS + 1))
    assert len(names) >= 7


def test_a_consumer_is_not_near_to_where_rounding_decides() -> None:
    centred = OpCase("aten.sub.Tensor", "torch.ops.aten.sub.Tensor", (NUMBERS, NUMBERS.mean()), family="opinfo")
    tied = OpCase("aten.mul.Tensor", "torch.ops.aten.mul.Tensor", (NUMBERS * 0, NUMBERS), family="opinfo")
    for seed in range(30):
        consumers: Any = program(centred, "result used twice", seed).args[1]
        made = outputs(program(centred, "result used twice", seed))
        assert all(float(tensor.abs().max()) > 0.1 for tensor in made), consumers
        assert composed(tied, "result used twice", MESH, seed) is None  # all of it is 0


def test_a_producer_makes_what_the_plain_call_is_given() -> None:
    seen = set()
    for seed in range(40):
        case = program(MUL, "pending argument", seed)
        producer: Any = case.args[2]
        seen.add(producer[0])
        value, result = outputs(case)
        assert torch.equal(value, NUMBERS if case.args[1] == "self" else NUMBERS + 1)
        assert torch.equal(result, NUMBERS * (NUMBERS + 1))
    assert len(seen) == 5


def test_nothing_is_produced_that_would_be_rounded() -> None:
    thirds = OpCase("aten.floor.default", "torch.ops.aten.floor.default", (NUMBERS / 3,), family="opinfo")
    assert composed(thirds, "pending argument", MESH, 0) is None


def test_a_second_call_differs_in_no_tensor() -> None:
    for seed in range(10):
        case = program(SUM, "second call", seed)
        one, other = outputs(case)
        assert len(tensors(case)) == 1
        assert one.shape != other.shape or one.dtype != other.dtype or not torch.equal(one, other)


def test_what_does_not_fit_raises_and_is_caught() -> None:
    for seed in range(10):
        case = program(MUL, "after an exception", seed)
        _, name, between = case.args
        wrong = [case.kwargs["unfit"] if key == name else case.kwargs[key] for key in ("self", "other")]
        with pytest.raises(RuntimeError):
            torch.mul(*wrong)
        assert len(outputs(case)) == (2 if between else 1)
    relu = OpCase("aten.relu.default", "torch.ops.aten.relu.default", (NUMBERS,), family="opinfo")
    assert composed(relu, "after an exception", MESH, 0) is None  # torch takes it whatever it is given


def test_what_writes_to_a_copy_has_gradients_and_leaves_its_argument() -> None:
    case = program(SQUARED, "write to a copy")
    wanting = replace(case, kwargs={**case.kwargs, "self": NUMBERS.clone().requires_grad_()})
    reference = make_reference(wanting)
    (made,), (leaf,) = reference.outputs, reference.inputs
    assert torch.equal(made, NUMBERS**2)
    assert torch.equal(leaf, NUMBERS)
    (slope,) = torch.autograd.grad(made.sum(), leaf)
    assert torch.equal(slope, 2 * NUMBERS)
    plain, unwritten = simpler_calls(Trial(wanting, MESH, ((S0,),), (((R,),),)), {})
    assert (plain.case.op, unwritten.case.op) == ("aten.pow_.Scalar", "aten.pow.Tensor_Scalar")
    assert (plain.combination, unwritten.combination) == (((S0,),), ((S0,),))
    assert not any(tensor.requires_grad for tensor in tensors(plain.case))
    assert all(tensor.requires_grad for tensor in tensors(unwritten.case))
    assert composed(MUL, "write to a copy", MESH, 0) is None


def test_lists_that_are_written_to_are_copied() -> None:
    scaled = OpCase("aten._foreach_mul_.Scalar", "torch.ops.aten._foreach_mul_.Scalar", ([NUMBERS, NUMBERS], 3))
    case = program(scaled, "write to a copy")
    assert all(torch.equal(made, 3 * NUMBERS) for made in outputs(case))
    assert len(outputs(case)) == 2
    (plain, unwritten) = simpler_calls(Trial(case, MESH, ((S0,), (R,)), ()), {})
    assert [each.case.op for each in (plain, unwritten)] == ["aten._foreach_mul_.Scalar", "aten._foreach_mul.Scalar"]
    assert plain.outputs == unwritten.outputs == (0, 1)


def test_a_write_to_a_view_shows_in_the_base() -> None:
    base, view = outputs(program(SELECT, "write to a view"))
    assert torch.equal(base, torch.stack([NUMBERS[0], 3 * NUMBERS[1]]))
    assert torch.equal(view, 3 * NUMBERS[1])
    assert composed(MUL, "write to a view", MESH, 0) is None


def test_nothing_is_written_to_windows_that_overlap() -> None:
    def unfolded(step: int) -> OpCase:
        return OpCase("aten.unfold.default", "torch.ops.aten.unfold.default", (NUMBERS, 1, 2, step), family="opinfo")

    assert composed(unfolded(1), "write to a view", MESH, 0) is None
    assert composed(unfolded(2), "write to a view", MESH, 0) is not None


def test_a_write_that_is_lost_has_a_likely_cause() -> None:
    failure = failing(program(SELECT, "write to a view"), ((S0,),))
    assert "lost" in FAMILY.likely_cause(failure.trial, failure.verdict)
    plain = failing(SELECT, ((S0,),))
    assert FAMILY.likely_cause(plain.trial, plain.verdict) == ""


@pytest.mark.parametrize("op", PROMISES)
def test_random_numbers_keep_their_promise_locally(op: str) -> None:
    for variant in range(3):
        case = random_case(op, torch.float64, variant)
        assert case.tags == {RANDOM}
        made = make_reference(load_case(case_record(case)))
        assert made.raised is None
        assert all(torch.equal(output, tensors(case)[0]) for output in made.outputs)


@pytest.mark.parametrize("op", DETERMINED)
def test_a_random_op_without_a_choice_has_one_result(op: str) -> None:
    for variant in range(8):
        case = random_case(op, torch.float64, variant)
        assert RANDOM in case.tags
        one, other = outputs(load_case(case_record(case))), outputs(case)
        assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("changes", "broken"),
    [({0: 0.5}, 1), ({1: 0.5}, 1), ({2: 0.7}, 2), ({3: 0.5}, 3)],
    ids=["low", "high", "mean", "deviation"],
)
def test_a_broken_promise_shows(changes: dict[int, float], broken: int) -> None:
    case = random_case("aten.rand_like.default", torch.float64, 0)
    promise: Any = case.args[2]
    wrong = [changes.get(place, value) for place, value in enumerate(promise)]
    made = make_reference(replace(case, args=(*case.args[:2], wrong, case.args[3]))).outputs
    assert torch.equal(made[broken], 2 * tensors(case)[0])
    assert torch.equal(made[0], tensors(case)[0])


def test_dropout_that_scales_wrongly_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case("aten.native_dropout.default", torch.float64, 0)
    dropout = torch.ops.aten.native_dropout.default

    class Unscaled:
        default = staticmethod(lambda x, p, train: (dropout(x, p, train)[0] * (1 - p), dropout(x, p, train)[1]))

    monkeypatch.setattr(torch.ops.aten, "native_dropout", Unscaled)
    assert torch.equal(programs.sampled(*case.args, **case.kwargs)[1], 2 * tensors(case)[0])  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------- taken apart
def failing(case: OpCase, combination: tuple[Placements, ...], placed: tuple[str, ...] = ()) -> Failure:
    trial = Trial(case, MESH, combination)
    texts = tuple((f"output {number}", text) for number, text in enumerate(placed))
    reports = tuple(ProcessReport((rank,), Phase.DONE, placements=texts) for rank in range(2))
    verdict = Verdict(VerdictKind.WRONG_VALUE, "", Phase.FORWARD, "output 1")
    return Failure(trial, Observation(trial, Fate.COMPLETED, reports), verdict)


def test_the_calls_of_a_program_are_tried_as_it_makes_them() -> None:
    made = program(MUL, "result used twice", 1)
    consumers: Any = made.args[1]
    given = tuple((S0,) for _ in tensors(made))
    first, *rest = simpler_calls(Trial(made, MESH, given), {0: (P,), 1: (P,)})
    assert (first.case.op, first.case.call) == (MUL.op, MUL.call)
    assert first.combination == ((S0,), (S0,))
    assert [one.case.op for one in rest] == [consumer[0] for consumer in consumers]
    assert rest[0].combination[0] == (P,)
    assert torch.equal(tensors(rest[0].case)[0], NUMBERS * (NUMBERS + 1))


AROUND = {"inference mode": COMPOSITE, "write to a view": SELECT, "write to a copy": SQUARED, "second call": SUM}


@pytest.mark.parametrize("kind", COMPOSITIONS)
def test_the_plain_call_comes_first(kind: str) -> None:
    case = AROUND.get(kind, MUL)
    made = program(case, kind)
    plain = simpler_calls(Trial(made, MESH, tuple((S0,) for _ in tensors(made))), {})[0]
    assert plain.case.op == case.op
    expected, got = outputs(case), outputs(plain.case)
    if kind != "one tensor twice":
        assert all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))
    assert len(plain.combination) == len(tensors(plain.case))


def test_the_call_after_an_exception_may_be_the_one_that_fails_by_itself() -> None:
    found = set()
    for seed in range(10):
        made = program(MUL, "after an exception", seed)
        simpler = simpler_calls(Trial(made, MESH, tuple((S0,) for _ in tensors(made))), {})
        found.add((made.args[2], tuple(one.outputs for one in simpler)))
    assert found == {(True, ((0,), (1,))), (False, ((0,),))}


def test_what_a_producer_leaves_is_what_the_plain_call_is_given() -> None:
    for seed in range(20):
        made = program(MUL, "pending argument", seed)
        if made.args[2] == ["aten.sum.dim_IntList", [0]]:
            trial = Trial(made, MESH, tuple((S0,) for _ in tensors(made)))
            plain, alone = simpler_calls(trial, {})
            assert sorted(map(str, plain.combination)) == sorted([str((P,)), str((S0,))])
            assert alone.case.op == "aten.sum.dim_IntList"
            return
    pytest.fail("no sum was drawn")


def minimise(failure: Failure, guilty: str) -> tuple[Failure, list[str]]:
    """Minimise where every call of what begins with ``guilty`` fails as ``failure`` does, and nothing else."""
    tried: list[str] = []

    def run(trial: Trial) -> Observation:
        tried.append(trial.case.call)
        error = Raised(Phase.FORWARD, "RuntimeError", "", "f (g.py)") if trial.case.call.startswith(guilty) else None
        reports = tuple(ProcessReport((rank,), Phase.FORWARD, raised=error) for rank in range(2))
        return Observation(trial, Fate.COMPLETED, reports)

    made = Minimiser(run, None, 0, float("inf"))
    verdict = Verdict(VerdictKind.CRASH, "", Phase.FORWARD, "output")
    first = replace(failure, observation=run(failure.trial), verdict=verdict)
    return made.minimise(first, lambda _: False)[0], tried


def test_what_fails_without_the_program_is_no_finding_of_the_program() -> None:
    made = program(MUL, "one tensor twice")
    failure = failing(made, ((S0,),))
    alone, _ = minimise(failure, "")
    assert (alone.trial.case.op, alone.trial.case.call) == (MUL.op, MUL.call)
    whole, tried = minimise(failure, "strategies.")
    assert whole.trial.case.call == made.call
    assert MUL.call in tried


def test_a_call_that_raises_on_what_the_program_gave_it_is_found_alone() -> None:
    made = program(MUL, "result used twice", 1)
    consumers: Any = made.args[1]
    (name, *_) = consumers[0]

    def run(trial: Trial) -> Observation:
        fails = trial.case.call == made.call or (trial.case.op == name and trial.combination[0] == (S0,))
        error = Raised(Phase.FORWARD, "RuntimeError", "", "f (g.py)") if fails else None
        placed = (("output", "S(0)"),) if trial.case.op == MUL.op and not fails else ()
        reports = tuple(ProcessReport((rank,), Phase.FORWARD, raised=error, placements=placed) for rank in range(2))
        return Observation(trial, Fate.COMPLETED, reports)

    trial = Trial(made, MESH, tuple((S0,) for _ in tensors(made)))
    failure = Failure(trial, run(trial), Verdict(VerdictKind.CRASH, "", Phase.FORWARD, "output"))
    alone, _ = Minimiser(run, None, 0, float("inf")).minimise(failure, lambda _: False)
    assert (alone.trial.case.op, alone.trial.combination[0]) == (name, (S0,))


def test_a_program_is_a_group_of_its_own() -> None:
    made = [program(MUL, kind) for kind in ("one tensor twice", "pending argument", "after an exception")]
    keys = {group_key(failing(case, tuple((S0,) for _ in tensors(case)))) for case in (*made, MUL)}
    assert len(keys) == 4


def test_flags_are_those_of_the_plain_call() -> None:
    assert case_flags(program(SUM, "second call")) == case_flags(SUM) == {"keepdim"}


def test_the_message_says_what_the_program_does() -> None:
    made = program(MUL, "pending argument")
    text = describe_call(made, combination_rows(made, tuple((S0,) for _ in tensors(made))))
    assert str(made.args[2]) in text


def test_what_an_op_ran_on_in_a_program_is_known_only_where_dtensor_redistributed() -> None:
    made = program(MUL, "one tensor twice")
    seen = failing(made, ((S0,),)).observation
    assert list(columns_run(seen)) == []
    there = Executed(Phase.FORWARD, None, MUL.op, ("S(0)", "S(0)"))
    report = ProcessReport((0,), Phase.DONE, executed=(there,))
    assert list(columns_run(replace(seen, reports=(report, report)))) == ["S(0), S(0)"]
    assert Steering(4).wanted(made, MESH) == []
