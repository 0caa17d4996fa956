"""A mesh with its flattened submeshes: how it is written, and what torch does on it that it does on no other mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Observation
from verifier.core.verdict import Verdict, VerdictKind
from verifier.findings.script.render import render_script, run_script
from verifier.findings.variants import smaller_meshes
from verifier.meshes.pool import PoolSet
from verifier.meshes.remedied import run_remedied
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.records.schema import FAILS
from verifier.records.values import load_trial, trial_record

S, R = Shard(0), Replicate()
SQUARE, FLAT = MeshSpec((2, 2)), MeshSpec((2, 2), flat=True)


def gathered(rows: int, mesh: MeshSpec) -> Trial:
    """Return the gathering of a tensor that both mesh dims cut along its rows."""
    numbers = torch.arange(1.0, rows + 1)
    case = OpCase("dtensor.redistribute", "strategies.redistribution.programs.chain", (numbers, [[R, R]]))
    return Trial(case, mesh, ((S, S),))


def verdict_of(observed: Observation) -> Verdict:
    return judge(observed, make_reference(observed.trial.case))


# ------------------------------------------------------------------------------------------------------------- as text
@pytest.mark.parametrize("text", ["2x2+flat", "simulated:2x3x2+flat", "2x2", "4", "2x2+dp,tp", "simulated:2+tp"])
def test_a_mesh_is_read_as_it_is_written(text: str) -> None:
    mesh = MeshSpec.parse(text)
    assert str(mesh) == text
    assert mesh.flat == text.endswith("+flat")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4+flat", "mesh '4.flat': a mesh of one dim has no submeshes that could be flattened"),
        ("2x2+", "mesh '2x2.': '' after the . is not flat"),
        ("2x2+flat+flat", "'flat.flat' after the . is not flat"),
        ("2x2+tp", "'tp' after the . is not flat, and not a name for each mesh dim"),
        ("2x2+tp,tp", "is not flat, and not a name for each mesh dim"),
        ("2+t p", "is not flat, and not a name for each mesh dim"),
        ("+flat", "is not a shape such as"),
    ],
)
def test_what_is_no_mesh_is_said_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        MeshSpec.parse(text)
    assert "\n" not in str(raised.value)


def test_a_stored_trial_keeps_it() -> None:
    assert trial_record(gathered(5, FLAT)).mesh == "2x2+flat"
    for mesh in (SQUARE, FLAT):
        assert load_trial(trial_record(gathered(5, mesh))).mesh == mesh


def test_simpler_meshes_are_first_those_that_are_not_flattened() -> None:
    tried = [mesh for mesh, _ in smaller_meshes(gathered(5, FLAT))]
    assert tried == [MeshSpec((2,)), MeshSpec((2,)), SQUARE]
    tried = [mesh for mesh, _ in smaller_meshes(gathered(5, replace(FLAT, shape=(2, 2, 2))))]
    assert tried == [*[MeshSpec((2,))] * 3, *[SQUARE] * 3, *[FLAT] * 3, MeshSpec((2, 2, 2))]
    assert not any(mesh.flat for mesh, _ in smaller_meshes(gathered(5, MeshSpec((2, 2, 2)))))


# -------------------------------------------------------------------------------------------------------------- it runs
@pytest.mark.ranks
@pytest.mark.parametrize("backend", ["gloo", "simulated"])
def test_torch_merges_gathers_there_and_loses_uneven_rows(mesh_pools: PoolSet, backend: str) -> None:
    """Of 5 rows the ranks hold 2, 1, 1, 1; a single cut by four would be 2, 2, 1, 0: pytorch #194457."""
    meshes = [MeshSpec.parse(f"{backend}:{mesh}") for mesh in (SQUARE, FLAT, SQUARE)]
    outcomes = []
    for mesh in meshes:
        observed = mesh_pools.run_alone(gathered(5, mesh))
        steps = {
            (step.mesh, step.collective) for report in observed.reports if report for step in report.redistributions
        }
        outcomes.append((verdict_of(observed).kind, steps))
    apart = (VerdictKind.PASS, {("2x2", "all_gather")})
    assert outcomes == [apart, (VerdictKind.WRONG_VALUE, {("2x2+flat", "all_gather")}), apart]
    assert verdict_of(mesh_pools.run_alone(gathered(8, meshes[1]))).kind is VerdictKind.PASS


@pytest.mark.ranks
def test_the_remedy_of_uneven_gathers_mends_it(mesh_pools: PoolSet) -> None:
    trial = gathered(5, FLAT)
    assert verdict_of(run_remedied(mesh_pools, trial, ("uneven-gathers-merged",))).kind is VerdictKind.PASS
    other = run_remedied(mesh_pools, trial, ("products-divided-for-sums",))
    assert verdict_of(other).kind is VerdictKind.WRONG_VALUE


@pytest.mark.ranks
def test_a_script_flattens_the_mesh_with_torch_alone() -> None:
    verdict = Verdict(VerdictKind.WRONG_VALUE, "output [3]: got 0.0, expected 4.0")
    source = render_script(gathered(5, FLAT), verdict)
    assert "mesh 2x2+flat, backend gloo" in source
    status, output = run_script(source)
    assert status == FAILS, output
    plain = render_script(gathered(5, SQUARE), verdict)
    assert "flattened_mesh" not in plain
    status, output = run_script(plain)
    assert status != FAILS
    assert "the defect is gone" in output
