"""The example project, gated as its workflow does it: as it is, and with a rule that was lost."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from forked_commands import run_module
from torch_versions import torch_is

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "scaled_rows"
pytestmark = [pytest.mark.ranks, pytest.mark.cli, pytest.mark.long]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path / "project"))


def workflow_of(project: Path) -> list[list[str]]:
    lines = (project / ".github/workflows/strategies.yml").read_text().splitlines()
    return [line.partition("run: ")[2].split() for line in lines if "run: " in line]


@pytest.mark.parametrize("meshes", ["2", pytest.param("2 2x2", marks=pytest.mark.nightly)])
def test_the_workflow_of_the_example_passes(project: Path, meshes: str) -> None:
    install, gate, tests = workflow_of(project)
    assert install == ["python", "-m", "pip", "install", "."]
    assert gate[:3] == ["python", "-m", "verifier"]
    made = run_module(*gate[2:], folder=project, environment={**os.environ, "DTENSOR_VERIFIER_GATE_MESH": meshes})
    assert made.returncode == 0, made.stdout + made.stderr
    said = made.stdout.splitlines()
    if torch_is(">=2.14"):  # torch's cumsum passes P(sum) and P(avg) through there, which the example does not
        assert all("title=lost rule of aten.cumsum.default::" in line for line in said[:2]), made.stdout
        said = said[2:]
    assert said[0].startswith("::notice title=dtensor-verifier::")
    tested = run_module(*tests, "-p", "no:cacheprovider", folder=project)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_rules_that_were_lost_are_no_success(project: Path) -> None:
    rules = project / "scaled_rows" / "rules.py"
    rules.write_text(rules.read_text().replace("@register_sharding", "# @register_sharding"))
    made = run_module("verifier", "gate", folder=project)
    assert made.returncode == 2
    (line,) = made.stderr.splitlines()
    assert line.startswith("error: --import scaled_rows.rules registers no sharding rule")
