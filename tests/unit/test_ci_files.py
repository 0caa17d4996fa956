"""The files with which other projects run the gate: their commands are run as their readers run them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import textwrap
from pathlib import Path

import pytest
from typer.main import get_command

from verifier.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.processes


def options_of(command: str) -> set[str]:
    found = get_command(app).commands[command].params  # type: ignore[attr-defined]
    return {option for one in found for option in one.opts}


@pytest.mark.parametrize(("imports", "given"), [("a.py\nmy rules.py\n", ["a.py", "my rules.py"]), ("b.c", ["b.c"])])
def test_the_action_gives_each_import_to_the_gate(tmp_path: Path, imports: str, given: list[str]) -> None:
    text = (ROOT / "action.yml").read_text()
    script = textwrap.dedent(text.partition("      run: |\n")[2])
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nexit 1\n')
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "IMPORTS": imports, "ARGUMENTS": "--out x"}
    made = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert made.returncode == 1, made.stderr
    imported = [word for name in given for word in ("--import", name)]
    assert made.stdout.splitlines() == ["-m", "verifier", "gate", *imported, "--format", "github", "--out", "x"]
    assert {"--import", "--format", "--out"} <= options_of("gate")


def test_the_hook_and_the_workflow_run_the_gate_with_options_that_it_has() -> None:
    (entry,) = re.findall(r"^  entry: (.*)$", (ROOT / ".pre-commit-hooks.yaml").read_text(), re.MULTILINE)
    assert entry == "python -m verifier gate"
    guide = (ROOT / "docs/guides/ci.md").read_text()
    lines = [
        line.partition("run: ")[2] or line.strip()
        for line in guide.splitlines()
        if "python -m verifier" in line and "`" not in line
    ]
    assert lines
    for line in lines:
        words = shlex.split(line)
        assert words[:4] == ["python", "-m", "verifier", "gate"]
        assert {word for word in words if word.startswith("--")} <= options_of("gate")
