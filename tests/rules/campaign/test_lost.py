"""Which rules of torch's an import has lost, whoever looks for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from verifier.gate.baseline import Baseline
from verifier.gate.rule_changes import Change
from verifier.rules.campaign import lost
from verifier.rules.campaign.lost import lost_rules
from verifier.rules.campaign.recorded import record_rules
from verifier.rules.campaign.request import RulesRequest, make_rules_plan
from verifier.rules.campaign.table import TableBuilder
from verifier.runs.store import RunStore
from verifier.torch_internals.registries import replaced_strategy

pytestmark = pytest.mark.processes

OP = "aten.trunc.default"
FEWER = """
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

@register_sharding(torch.ops.aten.trunc.default)
def trunc(x):
    same = [Replicate(), Partial("max"), *map(Shard, range(1, x.ndim))]
    return [([one], [one]) for one in same]
"""


def test_lost_rules_are_the_same_for_any_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rules.py").write_text(FEWER)
    request = RulesRequest(
        (OP,), world_sizes="2", sizes=1, max_samples=3, jobs=1, claims_only=True,
        imports=(str(tmp_path / "my_rules.py"),),
    )  # fmt: skip
    with replaced_strategy(torch.ops.aten.trunc.default):  # takes back what the file registers in this process
        plan = make_rules_plan(request, Baseline())
        table = TableBuilder(plan)
        record_rules(plan, RunStore(tmp_path), table=table)
        found = lost_rules(plan, table.made())
        assert lost_rules(replace(plan, jobs=3), table.made()) == found
        monkeypatch.setattr(lost, "number_of_parts", lambda targets: 1)
        assert lost_rules(plan, table.made()) == found
    assert [(change.op, change.rule, change.kind) for change in found] == [
        (OP, "P(min) -> P(min)", Change.LOST),
        (OP, "S(0) -> S(0)", Change.LOST),
    ]
    assert all(len(change.calls) > 1 for change in found)
