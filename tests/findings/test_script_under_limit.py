"""The script of a finding that is out of memory under a limit has that limit, and shows the defect only with it."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.verdict import VerdictKind
from verifier.findings.failures import Failure
from verifier.findings.grouping import Group
from verifier.findings.record import finding_record
from verifier.findings.script.render import render_script, run_script
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.records.commands import replay_command
from verifier.records.schema import FAILS, GONE

pytestmark = pytest.mark.ranks

LIMIT = 110 << 20
ROWS = 2500


def run_patiently(source: str) -> tuple[str, str]:
    """Run a script, again if the machine was too busy for its time limits."""
    for _ in range(3):
        status, output = run_script(source)
        if status in (FAILS, GONE) and "hang or died" not in output:
            break
    return status, output


def test_a_script_under_a_limit_of_memory() -> None:
    """The whole result takes 48 MiB and fits beside the reference; what gathering it takes on top does not."""
    column = torch.arange(1, ROWS + 1, dtype=torch.float64).view(ROWS, 1)
    case = OpCase("aten.mul.Tensor", "torch.ops.aten.mul.Tensor", (column, column.view(1, ROWS)))
    trial = Trial(case, MeshSpec((2,)), ((Shard(0),), (Replicate(),)))
    with Pool(PoolKey.of(trial.mesh), memory_limit=LIMIT) as pool:
        (observation,) = pool.run([trial])
    verdict = judge(observation, make_reference(case))
    assert verdict.kind is VerdictKind.CRASH
    assert "out of memory under the limit of 110 MiB a rank" in verdict.message

    failure = Failure(trial, observation, verdict)
    finding = finding_record(Group("key", failure), failure, "", True, None, "", "", False, memory_limit=LIMIT)
    assert replay_command(finding).endswith(f"replay {finding.fingerprint} --rank-memory 110MiB")
    assert f"MEMORY_LIMIT = {LIMIT}" in finding.script
    status, output = run_patiently(finding.script)
    assert status == FAILS
    assert "allocate memory" in output

    unlimited = render_script(trial, verdict)
    assert "resource" not in unlimited
    assert run_patiently(unlimited)[0] == GONE
