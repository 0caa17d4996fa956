"""The script of a program that uses more than torch: it imports the program, and does not take that for the defect."""

from __future__ import annotations

import pytest
import torch

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.verdict import Verdict, VerdictKind
from verifier.findings.script.render import render_script, run_script
from verifier.findings.script.source import needs_its_module
from verifier.placements.parsing import parse_placements

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    ("call", "needed"),
    [
        ("strategies.torchrec.programs.train", True),
        ("strategies.redistribution.programs.chain", False),
        ("strategies.opinfo.programs.called_twice", False),
        ("strategies.sharded_tensor.programs.embedding_bag", False),
        ("torch.nn.functional.embedding", False),
    ],
)
def test_which_programs_need_their_module(call: str, needed: bool) -> None:
    assert needs_its_module(call) == needed


def test_a_script_that_cannot_import_its_program_has_decided_nothing() -> None:
    case = OpCase("layout", "layout_programs.checked", (torch.ones(2, 2),))
    trial = Trial(case, MeshSpec((2,)), (parse_placements("R"),))
    source = render_script(trial, Verdict(VerdictKind.CRASH, "every rank raised LayoutError"))
    assert "Needs torch and layout_programs.checked." in source
    status, output = run_script(source)  # in a folder of its own, where there is no module of tests
    assert status == "broke with exit status 2"
    assert "undecided: No module named 'layout_programs'" in output
