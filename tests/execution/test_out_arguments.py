"""Calls that write to ``out``: each trial runs the rule for its own placements, and such rules are read."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.findings.failures import first_report
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.placements.parsing import parse_placements
from verifier.rules.claims import claimed_rules
from verifier.torch_internals.registries import replaced_strategy

pytestmark = pytest.mark.ranks

EXP = torch.ops.aten.exp.out
CASE = OpCase("aten.exp.out", "torch.ops.aten.exp.out", (torch.arange(4.0),), {"out": torch.zeros(4)}, exact=False)


def test_a_trial_does_not_run_the_rule_that_another_one_left_in_a_cache() -> None:
    mesh, numbers = MeshSpec((2,), "simulated"), torch.arange(6.0).view(3, 2)
    out = {"values": torch.zeros(3), "indices": torch.zeros(3, dtype=torch.int64)}
    case = OpCase("aten.kthvalue.values", "torch.ops.aten.kthvalue.values", (numbers, 1), out)
    before, trial = (
        Trial(case, mesh, tuple(map(parse_placements, texts)), seed=seed)
        for seed, texts in enumerate((("R", "R", "R"), ("R", "S(0)", "S(0)")))
    )
    with Pool(PoolKey.of(mesh)) as pool:
        _, after = pool.run([before, trial])
        (alone,) = pool.run([trial], fresh=True)
    verdicts = [judge(observation, make_reference(case)) for observation in (after, alone)]
    assert verdicts[0].message == verdicts[1].message
    assert first_report(after).placements == first_report(alone).placements  # type: ignore[union-attr]


def test_rules_that_ask_for_a_placement_of_out_are_read() -> None:
    with replaced_strategy(EXP):

        @register_sharding(EXP)
        def wrong(input: object, *, out: object) -> list[tuple[list[object], list[object]]]:
            return [([p], [p, p]) for p in (Replicate(), Partial(), Shard(0))]

        assert set(claimed_rules(CASE, 2)) == {"R, R", "P(sum), P(sum)", "S(0), S(0)"}
