"""What derive writes where rules can have a filter, from torch 2.14 on, is run: the file, and the test beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from verifier.torch_internals.registries import takes_filters

pytestmark = [
    pytest.mark.processes,
    pytest.mark.cli,
    pytest.mark.skipif(not takes_filters(), reason="strategies for one mesh dim have filters from torch 2.14 on"),
]

HERE = ".".join(torch.__version__.split(".")[:2])
OPS = """
import torch, verifier

@torch.library.custom_op("under215::less_largest", mutates_args=())
def less_largest(x: torch.Tensor) -> torch.Tensor:
    blocks = x.reshape(x.shape[0], x.shape[1] // 32, 32)  # each with a scale of its own; -1 would refuse 0 rows
    return (blocks - blocks.amax(-1, keepdim=True)).reshape(x.shape)

less_largest.register_fake(lambda x: torch.empty_like(x))
verifier.samples("under215::less_largest")(lambda: [(torch.randn(6, 128),), (torch.randn(6, 96),)])

@torch.library.custom_op("under215::scale_rows", mutates_args=())
def scale_rows(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return rows * factors[:, None]

scale_rows.register_fake(lambda rows, factors: torch.empty_like(rows))
verifier.samples("under215::scale_rows")(lambda: [(torch.randn(8, 4), torch.randn(8))])
"""


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, check=False)


def derived(folder: Path, name: str) -> str:
    """Return the code that is written for an op, after the test beside it has passed."""
    (folder / "my_ops.py").write_text(OPS)
    words = ("verifier", "derive", f"under215::{name}", "--import", "my_ops.py", "--torch", HERE)
    done = command(folder, *words, "--out", f"{name}.py", "--max-samples", "2", "--mesh", "2", "--mesh", "2x2")
    assert done.returncode == 0, done.stderr
    tested = command(folder, "pytest", "-q", "-p", "no:cacheprovider", f"test_{name}.py")
    assert tested.returncode == 0, tested.stdout
    assert " passed" in tested.stdout
    assert "failed" not in tested.stdout
    return (folder / f"{name}.py").read_text()


def test_rules_of_one_mesh_dim_run(tmp_path: Path) -> None:
    code = derived(tmp_path, "scale_rows")
    assert "@register_single_dim_strategy(" in code
    assert "full_mesh_strategy_filter" not in code


def test_rules_in_blocks_run_with_their_filter_and_a_smaller_block_is_refuted(tmp_path: Path) -> None:
    code = derived(tmp_path, "less_largest")
    assert "full_mesh_strategy_filter=under215_less_largest_filter," in code
    halved = code.replace(", 32))", ", 16))")
    assert halved != code
    (tmp_path / "less_largest.py").write_text(halved)
    imports = ("--import", "my_ops.py", "--import", "less_largest.py")
    refuted = command(tmp_path, "verifier", "rules", "under215::less_largest", *imports, "--world-size", "2,3")
    assert refuted.returncode == 1, refuted.stdout + refuted.stderr
