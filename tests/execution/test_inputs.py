"""What a call leaves of its inputs: nothing else than what the local call leaves, also of the parts of a Partial."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import DifferenceKind, Observation
from verifier.core.verdict import Phase, Verdict, VerdictKind
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.placements.parsing import parse_placements

MESH = MeshSpec((2,), "simulated")

Program = Callable[[torch.Tensor], torch.Tensor]


def doubles(input: torch.Tensor) -> torch.Tensor:
    """Return ``input`` plus itself, and double the input as well."""
    result = input + input
    input.mul_(2)
    return result


def doubles_no_dtensor(input: torch.Tensor) -> torch.Tensor:
    """Do the same, but for the second half on DTensors: wrong on purpose."""
    result = input + input
    if not isinstance(input, DTensor):
        input.mul_(2)
    return result


def changes_parts(input: torch.Tensor) -> torch.Tensor:
    """Return ``input`` plus itself, and zero the parts of a DTensor: wrong on purpose."""
    result = input + input
    if isinstance(input, DTensor):
        input.zero_()
    return result


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(PoolKey.of(MESH)) as started:
        yield started


def verdict_of(pool: Pool, program: Program, placements: str, values: torch.Tensor) -> tuple[Observation, Verdict]:
    case = OpCase("test.inputs", f"{__name__}.{program.__name__}", (values,))
    trial = Trial(case, MESH, (parse_placements(placements),))
    [observation] = pool.run([trial])
    return observation, judge(observation, make_reference(case))


VALUES = torch.arange(1.0, 6.0)


@pytest.mark.parametrize("placements", ["R", "S(0)", "P(sum)"])
def test_an_input_that_the_local_call_changes_as_well_is_right(pool: Pool, placements: str) -> None:
    assert verdict_of(pool, doubles, placements, VALUES.clone())[1].kind is VerdictKind.PASS


@pytest.mark.parametrize("program", [doubles_no_dtensor, changes_parts])
@pytest.mark.parametrize("placements", ["R", "S(0)", "P(sum)"])
def test_an_input_that_is_left_otherwise_is_a_mutated_input(pool: Pool, program: Program, placements: str) -> None:
    _, verdict = verdict_of(pool, program, placements, VALUES.clone())
    assert verdict.kind is VerdictKind.MUTATED_INPUT
    assert verdict.subject == "input"


@pytest.mark.parametrize("placements", ["R", "S(0)", "P(sum)"])
def test_nan_in_an_input_is_no_change(pool: Pool, placements: str) -> None:
    values = torch.tensor([1.0, float("nan"), 3.0])
    case = OpCase("aten.neg.default", "torch.ops.aten.neg.default", (values,))
    [observation] = pool.run([Trial(case, MESH, (parse_placements(placements),))])
    assert judge(observation, make_reference(case)).kind is VerdictKind.PASS


def test_what_the_verifier_itself_cannot_judge_is_an_error_of_its_own(pool: Pool) -> None:
    observation, _ = verdict_of(pool, doubles, "P(sum)", VALUES.clone())
    reports = tuple(
        report and replace(report, contributions=tuple(replace(c, subject="nobody") for c in report.contributions))
        for report in observation.reports
    )
    assert any(c.phase is Phase.INPUTS for report in reports if report for c in report.contributions)
    verdict = judge(replace(observation, reports=reports), make_reference(observation.trial.case))
    assert verdict.kind is VerdictKind.TOOL_ERROR
    assert "nobody" in verdict.message
    assert "Traceback" in verdict.detail


def test_what_a_call_left_in_the_caches_decides_nothing_where_they_are_emptied_first(pool: Pool) -> None:
    def drawn(number, fresh):
        arguments = {"num_samples": number, "replacement": True}
        case = OpCase("aten.multinomial.default", "torch.multinomial", (torch.eye(4)[1],), arguments)
        [observation] = pool.run([Trial(case, MESH, (parse_placements("R"),))], fresh=fresh)
        return [difference.kind for report in observation.reports for difference in report.differences]

    assert drawn(1, True) == []
    assert set(drawn(3, False)) == {DifferenceKind.SHAPE}  # DTensor (torch 2.13.0) keeps the shape of the first call
    assert drawn(3, True) == []
