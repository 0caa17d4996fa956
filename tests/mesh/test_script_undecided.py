"""A script whose ranks do not answer has decided nothing, unless silence is the defect."""

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
