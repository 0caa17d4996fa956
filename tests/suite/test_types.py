"""Types are right. They are checked beside other tests, because a check before them leaves the other cores idle."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[2]


def said_of_types(*what: str) -> str:
    """Return what is wrong about types, as text; empty if nothing is."""
    words = [sys.executable, "-m", "mypy", "--strict", *what]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_types_are_right() -> None:
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    if version("torch").partition("+")[0] != pinned[1]:
        pytest.skip(f"checked with torch {pinned[1]} alone, whose types other versions change")
    said = said_of_types("verifier", "strategies")
    assert not said, said


def test_wrong_types_are_found(tmp_path: Path) -> None:
    file = tmp_path / "wrong_types.py"
    file.write_text("number: int = 'one'\n\n\ndef untyped():\n    pass\n", encoding="utf-8")
    said = said_of_types(str(file))
    assert "wrong_types.py:1: error: Incompatible types in assignment" in said
    assert "wrong_types.py:4: error: Function is missing a return type annotation" in said
