"""The exit status of a script, run as a file: 1 where the defect is seen, and never where something else is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.verdict import Phase, Verdict, VerdictKind
from verifier.execution.imports import run_imports
from verifier.findings.script.render import render_script, run_script
from verifier.placements.parsing import parse_placements
from verifier.records.schema import FAILS

pytestmark = pytest.mark.ranks

DOUBLED = """
import torch
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.experimental import register_sharding

LIBRARY = torch.library.Library("scripted", "DEF")
LIBRARY.define("negated(Tensor x) -> Tensor")
LIBRARY.impl("negated", torch.neg, "CompositeExplicitAutograd")
register_sharding(torch.ops.scripted.negated.default)(lambda x: [([Partial()], [Replicate()])])
"""


def test_a_script_runs_the_imports_that_its_finding_needs(tmp_path: Path, rules_taken_back: None) -> None:
    rules = tmp_path / "my rules.py"
    rules.write_text(DOUBLED)
    run_imports([str(rules)])
    case = OpCase("scripted.negated.default", "torch.ops.scripted.negated.default", (torch.arange(1.0, 4.0),))
    trial = Trial(case, MeshSpec((2,)), (parse_placements("R"),))
    verdict = Verdict(VerdictKind.WRONG_VALUE, "output [0]: got -2.0, expected -1.0", Phase.GATHER)
    source = render_script(trial, verdict, imports=[str(rules)])
    assert f"Needs torch and {rules}." in source
    status, output = run_script(source)
    assert status == FAILS, output
    assert "gathered [-2.0, -4.0, -6.0], expected [-1.0, -2.0, -3.0]" in output

    status, output = run_script(render_script(trial, verdict))  # without them nobody registers the op
    assert status == "broke with exit status 2"
    assert "the local call raised AttributeError: " in output
    assert "'scripted'" in output or "negated" in output

    rules.unlink()
    status, output = run_script(source)
    assert status == "broke with exit status 2"
    assert f"UNDECIDED: {rules} cannot be imported: FileNotFoundError" in output


def test_placements_that_no_tensor_of_so_few_dims_has_are_the_defect() -> None:
    tensor = torch.tensor([-2.0, 2.0, 1.0], dtype=torch.float64)
    case = OpCase("aten.var.correction", "torch.ops.aten.var.correction", (tensor, []), {"correction": 0})
    trial = Trial(case, MeshSpec((2,)), (parse_placements("S(0)"),))
    verdict = Verdict(VerdictKind.WRONG_PLACEMENT, "output on rank 0: placement got S(0)", Phase.FORWARD, "output")
    status, output = run_script(render_script(trial, verdict))
    assert status == FAILS, output
    assert "placed as (Shard(dim=0),), expected placements of a tensor with 0 dims" in output


def test_ranks_that_do_not_start_are_no_hang() -> None:
    case = OpCase("aten.neg.default", "torch.ops.aten.neg.default", (torch.ones(2),))
    trial = Trial(case, MeshSpec((2,)), (parse_placements("R"),))
    source = render_script(trial, Verdict(VerdictKind.HANG, "ranks 0 in all_gather"))
    status, output = run_script(source.replace('BACKEND = "gloo"', 'BACKEND = "no such"').replace("80.0", "20.0"))
    assert status == "broke with exit status 2", output
    assert "FAILS" not in output
    assert "UNDECIDED: rank" in output
