"""``python -m verifier run`` with a pattern of ops that have no family of their own, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_commands import run_module

from verifier.records.files import read_record

pytestmark = pytest.mark.ranks

LIMIT = 300
"""Seconds that a busy machine may take for the run."""


def test_a_pattern_of_functions_is_run_on_ranks(tmp_path: Path) -> None:
    command = ["run", "nn.functional.rel?", "--mesh", "2", "--max-examples", "1"]
    command += ["--seed", "0", "--time-limit", str(LIMIT), "--out", "runs"]
    ended = run_module("verifier", *command, folder=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (path,) = (tmp_path / "runs" / "runs").glob("*/run.json")
    run = read_record(path)
    assert run.complete
    assert run.header.families == ["opinfo"]
    assert run.counts["PASS"] == run.trials > 3
    assert set(run.counts_by_op) == {"aten.relu.default"}
    assert run.counts_by_mesh.keys() == {"2"}
    assert f"{run.trials} run, {run.trials} passed, 0 failed" in ended.stdout
