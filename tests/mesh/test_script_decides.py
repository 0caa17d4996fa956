"""What a finding's script decides: nothing where ranks do not answer, unless silence is the defect."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from verifier.cases import MeshSpec, OpCase, Trial, Verdict, VerdictKind, parse_placements
from verifier.script import FAILS, render_script, run_script


def dies_as_a_dtensor(input: torch.Tensor) -> torch.Tensor:
    """Return a copy; end the process if ``input`` is a DTensor."""
    import os  # the script has this function's source and not this file's imports

    if isinstance(input, DTensor):
        os._exit(3)
    return input.clone()


@pytest.mark.parametrize(("kind", "status"), [(VerdictKind.DIED, FAILS), (VerdictKind.WRONG_VALUE, "exit status 2")])
def test_ranks_that_die_show_that_defect_alone(kind, status):
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


def test_the_shape_that_a_dtensor_claims_is_compared():
    case = OpCase("test.claims", f"{__name__}.claims_another_shape", (torch.ones(2, 2),))
    trial = Trial(case, MeshSpec((2,)), (parse_placements("R"),))
    status, output = run_script(
        render_script(trial, Verdict(VerdictKind.WRONG_SHAPE, "shape got [4], expected [2, 2]"))
    )
    assert status == FAILS
    assert "output 0: has shape [4], expected [2, 2]" in output
