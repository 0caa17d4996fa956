"""What is known of one op and shows in another is reported as known, and never left out."""

from __future__ import annotations

from pathlib import Path

import torch

from strategies.opinfo.family import FAMILY
from verifier.baseline import load_baseline
from verifier.campaign import Campaign
from verifier.cases import MeshSpec
from verifier.events import Event, FindingReported, TrialFinished
from verifier.plan import Plan
from verifier.records import RunHeader

BASELINE = load_baseline(Path(__file__).parents[2] / "reports" / "baseline.toml")
OUT = "874e495fe12b"
"""The finding that no rule fits what an out= call writes to: found in hardshrink.out, and of any op."""


def test_a_finding_of_any_op_is_known_where_the_op_of_its_entry_is_not_selected():
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
    campaign = Campaign(plan, events.append)
    campaign.run()
    assert any(event.verdict.kind.bad for event in events if isinstance(event, TrialFinished))
    [finding] = [event.finding for event in events if isinstance(event, FindingReported)]
    assert (finding.fingerprint, finding.known) == (OUT, True)
    assert [known.status for known in campaign.known if known.fingerprint == OUT] == ["known"]
