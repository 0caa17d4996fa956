"""What is in the baseline is there: known in other ops as well, and shown by a script of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from forked_commands import run_module
from torch_versions import needs_torch

from strategies.opinfo.family import FAMILY
from verifier.campaign.plan import Plan
from verifier.campaign.recorded import campaign_on_ranks
from verifier.core.case import MeshSpec
from verifier.events import Event, FindingReported, TrialFinished
from verifier.gate.baseline import load_baseline
from verifier.processes.scripts import run_to_end
from verifier.records.schema import RunHeader

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 300.0
"""Seconds that a busy machine may take for a process."""
BASELINE = load_baseline(ROOT / "reports" / "baseline.toml")
OUT = "874e495fe12b"
"""The finding that no rule fits what an out= call writes to: found in hardshrink.out, and of any op."""
COMPLEX_PRODUCT = "bc9e9b89bd1f"
"""A redistribution: the reduce-scatter of complex parts by product multiplies real and imaginary parts apart."""


@needs_torch("<2.14", "a later one refuses plainly where no rule fits, and runs have no finding of that")
def test_a_finding_of_any_op_is_known_where_the_op_of_its_entry_is_not_selected() -> None:
    entry = BASELINE.get(OUT)
    assert entry is not None
    op, mesh = "aten.relu.out", MeshSpec((2,))
    assert entry.op != op
    header = RunHeader("run", "", 0, "dev", [FAMILY.name], [str(mesh)], ["float64"], "cpu", 3, None, [], {}, "")
    plan = Plan(
        header, {FAMILY.name: FAMILY}, {FAMILY.name: (op,)}, (mesh,), (torch.float64,), seed=0, max_examples=3,
        combinations=16, time_limit=None, baseline=BASELINE,
    )  # fmt: skip
    events: list[Event] = []
    campaign = campaign_on_ranks(plan, events.append)
    campaign.run()
    assert any(event.verdict.kind.bad for event in events if isinstance(event, TrialFinished))
    [finding] = [event.finding for event in events if isinstance(event, FindingReported)]
    assert (finding.fingerprint, finding.known) == (OUT, True)
    assert [known.status for known in campaign.known if known.fingerprint == OUT] == ["known"]


def test_the_script_of_a_redistribution_shows_the_defect(tmp_path: Path) -> None:
    """Written by the command and run by processes of its own, in a folder where there is nothing else."""
    entry = BASELINE.get(COMPLEX_PRODUCT)
    assert entry is not None
    assert (entry.op, entry.mesh) == ("dtensor.redistribute", "2")
    script = run_module("verifier", "replay", COMPLEX_PRODUCT, "--script", folder=ROOT).stdout
    assert f"{entry.verdict} in {entry.op}: {entry.summary}" in script
    (tmp_path / "x.py").write_text(script, encoding="utf-8")
    status, said = run_to_end(tmp_path / "x.py", LIMIT)
    assert status == 1, said
    assert "FAILS on rank 0: output 0: rank 0 holds [(6-0j)], expected [(6-3j)]" in said
    assert said.rstrip().endswith("the defect is there")
