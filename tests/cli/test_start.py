"""What the program loads before it does anything: help and usage errors come without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "hypothesis", "networkx", "numpy", "jinja2"}
"""Each takes a tenth of a second to load, torch more than two."""
PROGRAM = """
import sys
from verifier.__main__ import main

sys.argv = ["verifier", *sys.argv[1:]]
try:
    main()
finally:
    print("loaded", *{name.partition(".")[0] for name in sys.modules}, file=sys.stderr)
"""


def loaded(*typed: str) -> tuple[int, set[str], int]:
    """Return the exit status of a command, the top-level packages and the number of modules that it loaded."""
    program = f"{PROGRAM}\n    print(len(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program, *typed], capture_output=True, text=True, check=False)
    *_, names, number = done.stderr.splitlines()
    return done.returncode, set(names.split()[1:]), int(number)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("typed", "status"),
    [
        (["--help"], 0),
        (["run", "--help"], 0),
        (["layouts", "--help"], 0),
        (["run", "--no-such-option"], 2),
        (["gate", "--format", "xml"], 2),
        (["nonsense"], 2),
    ],
    ids=["help", "help of run", "help of layouts", "no such option", "no such format", "no such command"],
)
def test_help_and_usage_errors_load_nothing_heavy(typed: list[str], status: int) -> None:
    ended, names, number = loaded(*typed)
    assert ended == status
    assert "typer" in names
    assert names & HEAVY == set()
    assert number < 900


@pytest.mark.processes
def test_a_command_that_needs_torch_loads_it() -> None:
    """So that the tests above can fail."""
    _, names, _ = loaded("layouts", "row-wise-even", "--ranks", "2")
    assert "torch" in names
