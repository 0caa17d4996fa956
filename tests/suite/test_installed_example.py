"""The example project, installed from wheels in an environment of its own, and gated as its owner changes it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "scaled_rows"
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
LIMIT = 600.0
pytestmark = [pytest.mark.nightly, pytest.mark.ranks, pytest.mark.cli]

Gate = Callable[..., tuple[int, str]]
RIGHT = "d != dim % x.ndim"


def built(source: Path, folder: Path, *names: str) -> Path:
    """Return the wheel of a copy of these files of a project, because a build writes beside its sources."""
    for name in names:
        given = source / name
        if given.is_dir():
            shutil.copytree(given, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(given, folder / name)
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=folder, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has our wheel, and besides what torch is installed with."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    source = tmp_path_factory.mktemp("source")
    wheel = built(ROOT, source, "pyproject.toml", "README.md", "LICENSE", "verifier", "strategies")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    (site / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return folder / "env" / "bin" / "python"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = Path(shutil.copytree(EXAMPLE, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__")))
    for arguments in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "first")):
        identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *arguments], cwd=project, check=True)
    return project


@pytest.fixture
def gate(python: Path, project: Path, record_property: Callable[[str, object], None]) -> Gate:
    """Runs the gate in the project, and records how many seconds each gate takes from start to exit."""

    def run(name: str, *arguments: str) -> tuple[int, str]:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        started = time.monotonic()
        made = subprocess.run(
            [str(python), "-m", "verifier", "gate", *arguments],
            cwd=project, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False,
        )  # fmt: skip
        seconds = time.monotonic() - started
        record_property(name, f"{seconds:.1f} s")
        print(f"{name}: exit status {made.returncode} after {seconds:.1f} s")
        assert "Traceback" not in made.stderr, made.stderr
        return made.returncode, made.stdout + made.stderr

    return run


def edit(project: Path, old: str, new: str) -> None:
    rules = project / "scaled_rows" / "rules.py"
    text = rules.read_text()
    assert old in text
    rules.write_text(text.replace(old, new))


def test_the_verifier_is_that_of_the_wheel(python: Path, project: Path) -> None:
    where = "import verifier; print(verifier.__file__)"
    made = subprocess.run([str(python), "-c", where], cwd=project, capture_output=True, text=True, check=True)
    assert Path(made.stdout.strip()).is_relative_to(python.parents[1])


def test_gates_of_an_owner_who_changes_strategies(gate: Gate, project: Path) -> None:
    status, said = gate("right")
    assert status == 0, said

    (project / "README.md").write_text("another text")
    status, said = gate("changed file", "--changed-since", "HEAD")
    assert status == 0, said
    assert "no strategy of --import scaled_rows.rules differs from HEAD" in said

    edit(project, "others = ", "# which dims\n    others = ")
    status, said = gate("changed comment", "--changed-since", "HEAD")
    assert status == 0, said
    assert "no strategy of" in said

    edit(project, "others", "kept")
    status, said = gate("harmless refactoring", "--changed-since", "HEAD")
    assert status == 0, said
    assert "1 op whose strategies do not differ from HEAD: scaled_rows.scale.default" in said

    edit(project, f" if {RIGHT}", "")
    status, said = gate("wrong rule", "--changed-since", "HEAD")
    assert status == 1, said
    assert "in aten.cumsum.default" in said
    status, said = gate("wrong rule again", "--changed-since", "HEAD")
    assert status == 1, said
    assert "aten.cumsum.default" in said

    edit(project, "@register_sharding", "# @register_sharding")
    status, said = gate("lost rules")
    assert status == 2, said
    assert "registers no sharding rule" in said


def test_a_record_of_something_else_neither_helps_nor_hinders(gate: Gate, python: Path, project: Path) -> None:
    subprocess.run(
        [str(python), "-m", "verifier", "run", "embedding", "--mesh", "2", "--max-examples", "1"],
        cwd=project, capture_output=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    edit(project, f" if {RIGHT}", "")
    status, said = gate("unrelated record")
    assert status == 1, said
    judged = [line for line in said.splitlines() if line.startswith("  judged")]
    assert judged
    assert not any("embedding" in line for line in judged)
