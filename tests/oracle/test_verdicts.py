"""What was seen before an exception decides first; what ranks have not all reported says nothing."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Contribution, Difference, DifferenceKind, Fate, Observation, ProcessReport, Raised
from verifier.core.verdict import Phase, VerdictKind
from verifier.oracle.reference import Reference, make_reference
from verifier.oracle.verdicts import judge

VALUE = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)


def observed(
    *reports: ProcessReport | None, fate: Fate = Fate.COMPLETED, detail: str = "", result: torch.Tensor = VALUE
) -> tuple[Observation, Reference]:
    case = OpCase("aten.clone.default", "torch.ops.aten.clone.default", (result.clone(),))
    trial = Trial(case, MeshSpec((len(reports),)), ((Replicate(),),), (((Replicate(),),), ((Shard(0),),)))
    return Observation(trial, fate, reports, detail), make_reference(case)


def wrong(phase: Phase = Phase.FORWARD, backward: int | None = None, rank: int = 0) -> Difference:
    subject = "self.grad" if backward is not None else "self" if phase is Phase.INPUTS else "output"
    kind = DifferenceKind.MUTATED if phase is Phase.INPUTS else DifferenceKind.VALUE
    return Difference(kind, phase, subject, rank, "7.0", "1.0", (0,), backward)


def refusal(phase: Phase, backward: int | None = None) -> Raised:
    return Raised(
        phase, "NotImplementedError", "no rule for this", "f (a.py)", "Traceback of it", True, False, backward
    )


def crash(phase: Phase, backward: int | None = None) -> Raised:
    return Raised(phase, "IndexError", "out of range", "f (a.py)", "Traceback of it", backward=backward)


def parts(rank: int, *values: float, phase: Phase = Phase.FORWARD, placements: str = "P(sum)") -> Contribution:
    return Contribution(phase, "output", rank, placements, torch.tensor(values, dtype=torch.float64))


@pytest.mark.parametrize("raises", [refusal, crash])
def test_a_wrong_result_is_not_hidden_by_what_its_backward_pass_raises(raises) -> None:
    error = raises(Phase.BACKWARD, 0)
    reports = [ProcessReport((rank,), Phase.BACKWARD, error, differences=(wrong(rank=rank),)) for rank in (0, 1)]
    verdict = judge(*observed(*reports))
    assert (verdict.kind, verdict.phase, verdict.subject, verdict.backward) == (
        VerdictKind.WRONG_VALUE, Phase.FORWARD, "output", None,
    )  # fmt: skip
    first, second = verdict.message.splitlines()
    assert first == "output [0] on rank 0: got 7.0, expected 1.0"
    assert second.startswith("then, in the phase backward: ")
    assert f"{error.type}: {error.message}" in second
    assert verdict.detail == "Traceback of it"


@pytest.mark.parametrize(
    ("values", "kind"), [((1.0, 2.0, 3.0), VerdictKind.UNSUPPORTED), ((1.0, 2.0, 4.0), VerdictKind.WRONG_VALUE)]
)
def test_parts_are_reduced_and_compared_though_the_backward_pass_is_refused(values, kind) -> None:
    error = refusal(Phase.BACKWARD, 0)
    both = [parts(0, *values), parts(1, 0.0, 0.0, 0.0)]
    reports = [ProcessReport((r,), Phase.BACKWARD, error, contributions=(both[r],)) for r in (0, 1)]
    verdict = judge(*observed(*reports))
    assert verdict.kind is kind
    assert ("got 4.0" in verdict.message) is (kind is VerdictKind.WRONG_VALUE)


def test_parts_of_some_ranks_say_nothing() -> None:
    alone = ProcessReport((0,), Phase.FORWARD, contributions=(parts(0, 9.0, 9.0, 9.0),))
    verdict = judge(*observed(alone, ProcessReport((1,), Phase.FORWARD, crash(Phase.FORWARD)), fate=Fate.STUCK))
    assert (verdict.kind, verdict.phase) == (VerdictKind.CRASH, Phase.FORWARD)
    unlike = [parts(0, 9.0, 9.0, 9.0), parts(1, 9.0, 9.0, 9.0, placements="P(max)")]
    error = crash(Phase.BACKWARD, 0)
    verdict = judge(
        *observed(*(ProcessReport((r,), Phase.BACKWARD, error, contributions=(unlike[r],)) for r in (0, 1)))
    )
    assert verdict.kind is VerdictKind.CRASH


def test_what_another_rank_saw_in_the_phase_of_the_exception_does_not_decide() -> None:
    raising = ProcessReport((0,), Phase.FORWARD, crash(Phase.FORWARD))
    other = ProcessReport((1,), Phase.FORWARD, differences=(wrong(rank=1),))
    assert judge(*observed(raising, other)).kind is VerdictKind.CRASH


def test_what_a_rank_saw_before_it_raised_in_the_same_phase_decides() -> None:
    report = ProcessReport((0,), Phase.GATHER, crash(Phase.GATHER), differences=(wrong(Phase.GATHER),))
    assert judge(*observed(report, report)).kind is VerdictKind.WRONG_VALUE


@pytest.mark.parametrize(
    ("seen", "raised", "kind"),
    [
        ((Phase.BACKWARD, 0), (Phase.BACKWARD, 1), VerdictKind.WRONG_GRADIENT),
        ((Phase.GATHER_GRADIENT, 0), (Phase.BACKWARD, 1), VerdictKind.WRONG_GRADIENT),
        ((Phase.BACKWARD, 1), (Phase.GATHER_GRADIENT, 0), VerdictKind.CRASH),
        ((Phase.BACKWARD, 0), (Phase.GATHER, None), VerdictKind.CRASH),
        ((Phase.INPUTS, None), (Phase.BACKWARD, 0), VerdictKind.MUTATED_INPUT),
    ],
)
def test_backward_passes_come_one_after_the_other(seen, raised, kind) -> None:
    raising = ProcessReport((0,), raised[0], crash(*raised))
    other = ProcessReport((1,), seen[0], differences=(wrong(*seen, rank=1),))
    assert judge(*observed(raising, other)).kind is kind


def test_a_wrong_result_comes_before_ranks_that_disagree_on_its_gradient() -> None:
    placed = [(("output", "R"), ("self.grad 0", text)) for text in ("R", "S(0)")]
    reports = [ProcessReport((r,), Phase.BACKWARD, placements=placed[r], differences=(wrong(rank=r),)) for r in (0, 1)]
    verdict = judge(*observed(*reports))
    assert (verdict.kind, verdict.phase) == (VerdictKind.WRONG_VALUE, Phase.FORWARD)
    assert verdict.message.splitlines()[1] == "then self.grad placements differ: rank 0: R; rank 1: S(0)".replace(
        "grad", "grad 0"
    )


def test_ranks_that_disagree_on_a_result_are_told_of_before_its_values() -> None:
    reports = [
        ProcessReport((r,), Phase.FORWARD, placements=(("output", text),), differences=(wrong(rank=r),))
        for r, text in enumerate(("R", "S(0)"))
    ]
    assert judge(*observed(*reports)).kind is VerdictKind.RANKS_DISAGREE


@pytest.mark.parametrize("fate", [Fate.HANG, Fate.DIED])
def test_a_hang_and_a_death_stay_what_they_are_and_tell_of_the_wrong_result(fate: Fate) -> None:
    verdict = judge(
        *observed(ProcessReport((0,), Phase.DONE, differences=(wrong(),)), None, fate=fate, detail="rank 1")
    )
    assert verdict.kind == VerdictKind[fate.name]
    assert verdict.message.splitlines() == ["rank 1", "before that: output [0] on rank 0: got 7.0, expected 1.0"]


def test_a_wrong_result_of_a_trial_that_took_too_long_is_not_inconclusive() -> None:
    seen = ProcessReport((0,), Phase.BACKWARD, differences=(wrong(),))
    assert judge(*observed(seen, None, fate=Fate.SLOW)).kind is VerdictKind.WRONG_VALUE
    assert judge(*observed(ProcessReport((0,), Phase.DONE), None, fate=Fate.SLOW)).kind is VerdictKind.INCONCLUSIVE


def test_an_error_of_the_verifier_stays_one() -> None:
    ours = Raised(Phase.BACKWARD, "KeyError", "a bug", ours=True)
    assert (
        judge(*observed(ProcessReport((0,), Phase.BACKWARD, ours, differences=(wrong(),)))).kind
        is VerdictKind.TOOL_ERROR
    )


# ------------------------------------------------------------------------------------------------------------- of bools
FLAGS = torch.tensor([False, True, True])


def flags(rank: int, placements: str, *values: bool) -> Contribution:
    return Contribution(Phase.FORWARD, "output", rank, placements, torch.tensor(values))


@pytest.mark.parametrize(
    ("placements", "other", "kind"),
    [
        ("P(sum)", (False, False, True), VerdictKind.PASS),
        ("P(sum)", (True, False, True), VerdictKind.WRONG_VALUE),
        ("P(max)", (False, False, True), VerdictKind.PASS),
        ("P(product)", (True, True, True), VerdictKind.PASS),
        ("P(min)", (False, False, True), VerdictKind.WRONG_VALUE),
        ("P(avg)", (False, True, True), VerdictKind.WRONG_VALUE),
    ],
)
def test_parts_that_are_bools_are_judged(placements: str, other: tuple[bool, ...], kind: VerdictKind) -> None:
    both = [flags(0, placements, False, True, True), flags(1, placements, *other)]
    reports = [ProcessReport((r,), Phase.DONE, contributions=(both[r],)) for r in (0, 1)]
    assert judge(*observed(*reports, result=FLAGS)).kind is kind


def test_parts_that_no_collective_reduces_are_told_of_as_the_collective_does() -> None:
    """The exception is there to see in a program of torch alone."""
    error = Raised(Phase.GATHER, "RuntimeError", "result type Float can't be cast to the desired output type Bool")
    both = [flags(rank, "P(avg)", False, True, True) for rank in (0, 1)]
    reports = [ProcessReport((r,), Phase.GATHER, error, contributions=(both[r],)) for r in (0, 1)]
    verdict = judge(*observed(*reports, result=FLAGS))
    assert (verdict.kind, verdict.phase) == (VerdictKind.CRASH, Phase.GATHER)
