"""What a finding's script decides: nothing where ranks do not answer, unless silence is the defect."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.tensor import DTensor

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.verdict import Verdict, VerdictKind
from verifier.findings.script.render import render_script, run_script
from verifier.placements.parsing import parse_placements
from verifier.records.schema import FAILS, GONE

pytestmark = pytest.mark.ranks


ONE_RANK = MeshSpec((1,))
"""Enough for all that a rank decides by what it has itself."""


def dies_as_a_dtensor(input: torch.Tensor) -> torch.Tensor:
    """Return a copy; end the process if ``input`` is a DTensor."""
    import os  # the script has this function's source and not this file's imports

    if isinstance(input, DTensor):
        os._exit(3)
    return input.clone()


@pytest.mark.parametrize(("kind", "status"), [(VerdictKind.DIED, FAILS), (VerdictKind.WRONG_VALUE, "exit status 2")])
def test_ranks_that_die_show_that_defect_alone(kind: VerdictKind, status: str) -> None:
    case = OpCase("test.dies", f"{__name__}.dies_as_a_dtensor", (torch.arange(4.0),))
    trial = Trial(case, MeshSpec((2,)), (parse_placements("R"),))
    source = render_script(trial, Verdict(kind, "as it was")).replace("else 60)", "else 3)")
    assert status in run_script(source)[0]


def claims_another_shape(input: torch.Tensor) -> torch.Tensor:
    """Return what it is given; a DTensor says that it is flat."""
    if not isinstance(input, DTensor):
        return input
    local, mesh, placements = input.to_local(), input.device_mesh, input.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size([4]), stride=(1,))


def test_the_shape_that_a_dtensor_claims_is_compared() -> None:
    case = OpCase("test.claims", f"{__name__}.claims_another_shape", (torch.ones(2, 2),))
    trial = Trial(case, ONE_RANK, (parse_placements("R"),))
    status, output = run_script(
        render_script(trial, Verdict(VerdictKind.WRONG_SHAPE, "shape got [4], expected [2, 2]"))
    )
    assert status == FAILS
    assert "output 0: has shape [4], expected [2, 2]" in output


def is_off(input: torch.Tensor, factor: float) -> torch.Tensor:
    """Return a copy; that of a DTensor is off by ``factor``."""
    return input * factor if isinstance(input, DTensor) else input.clone()


def refuses_a_dtensor(input: torch.Tensor, locally: bool) -> torch.Tensor:
    """Return a copy; raise if ``input`` is a DTensor, or in any case if ``locally``."""
    if locally or isinstance(input, DTensor):
        raise ValueError("on purpose")
    return input.clone()


def leaves_a_dtensor_as_it_is(input: torch.Tensor, always: bool) -> torch.Tensor:
    """Return a copy and add 1 to ``input``, unless it is a DTensor and not ``always``."""
    made = input.clone()
    if always or not isinstance(input, DTensor):
        input.add_(1)
    return made


def makes_it_plain(input: torch.Tensor) -> torch.Tensor:
    """Return what the rank holds."""
    return input.to_local() if isinstance(input, DTensor) else input.clone()


@pytest.mark.parametrize(
    ("program", "args", "kind", "status", "said"),
    [
        # a double that is off in the tenth digit is wrong, a bfloat16 in its last place is not
        (is_off, (torch.tensor([1.0, 2.0], dtype=torch.float64), 1 + 1e-9), VerdictKind.WRONG_VALUE, FAILS, "gathered"),
        (is_off, (torch.tensor([1.0, 2.0], dtype=torch.bfloat16), 1 + 2**-7), VerdictKind.WRONG_VALUE, GONE, "gone"),
        (refuses_a_dtensor, (torch.ones(2), True), VerdictKind.SILENT_ERROR, GONE, "gone"),
        (refuses_a_dtensor, (torch.ones(2), False), VerdictKind.CRASH, FAILS, "raised ValueError: on purpose"),
        (refuses_a_dtensor, (torch.ones(2), False), VerdictKind.WRONG_VALUE, "exit status 2", "that is not the defect"),
        (leaves_a_dtensor_as_it_is, (torch.ones(2), False), VerdictKind.MUTATED_INPUT, FAILS, "input: gathered"),
        (leaves_a_dtensor_as_it_is, (torch.ones(2), True), VerdictKind.MUTATED_INPUT, GONE, "gone"),
        (makes_it_plain, (torch.ones(2),), VerdictKind.CRASH, FAILS, "is a plain tensor, expected a DTensor"),
    ],
)
def test_what_is_not_the_defect_is_not_taken_for_it(
    program: Callable[..., torch.Tensor], args: tuple[object, ...], kind: VerdictKind, status: str, said: str
) -> None:
    case = OpCase("test.decides", f"{__name__}.{program.__name__}", args, exact=False)
    trial = Trial(case, ONE_RANK, (parse_placements("R"),))
    found, output = run_script(render_script(trial, Verdict(kind, "as it was")))
    assert status in found, output
    assert said in output


def test_another_exception_than_that_of_the_finding_is_not_the_defect() -> None:
    case = OpCase("test.decides", f"{__name__}.{refuses_a_dtensor.__name__}", (torch.ones(2), False))
    trial = Trial(case, ONE_RANK, (parse_placements("R"),))
    found, output = run_script(render_script(trial, Verdict(VerdictKind.CRASH, "as it was", raised="KeyError")))
    assert found == "broke with exit status 2"
    assert "raised ValueError: on purpose, and that is not the defect" in output
