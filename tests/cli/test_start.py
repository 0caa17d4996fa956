"""What the program loads: help, usage errors, and what only reads records come without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from run_factory import make_header, make_rules_run, make_run

from verifier.core.versions import versions
from verifier.records.schema import INTERRUPTED, RunRecord, UntestedRecord
from verifier.runs.revision import revision
from verifier.runs.store import RunStore

HEAVY = {"torch", "hypothesis", "networkx", "numpy", "jinja2"}
"""Each takes a tenth of a second to load, torch more than two."""
PROGRAM = """
import atexit
import sys
from verifier.__main__ import main

def tell():
    print("loaded", *{name.partition(".")[0] for name in sys.modules}, file=sys.stderr)
    print(len(sys.modules), file=sys.stderr)

sys.argv = ["verifier", *sys.argv[1:]]
atexit.register(tell)
main()
"""


def loaded(*typed: str) -> tuple[int, set[str], int]:
    """Return the exit status of a command, the top-level packages and the number of modules that it loaded."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *typed], capture_output=True, text=True, check=False)
    *_, names, number = done.stderr.splitlines()
    return done.returncode, set(names.split()[1:]), int(number)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("typed", "status"),
    [
        (["--help"], 0),
        (["run", "--help"], 0),
        (["layouts", "--help"], 0),
        (["graph", "--help"], 0),
        (["graph", "--source", "R"], 2),
        (["run", "--no-such-option"], 2),
        (["run", "embedding", "--mesh", "2y"], 2),
        (["rules", "add", "--mesh", "2y2"], 2),
        (["gate", "--format", "xml"], 2),
        (["gate", "--import", "no_such_file.py"], 2),
        (["run", "--import", "no_such_file.py"], 2),
        (["rules", "add", "--import", "no_such_file.py"], 2),
        (["derive", "aten.neg.default", "--import", "no_such_file.py"], 2),
        (["nonsense"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_help_and_usage_errors_load_nothing_heavy(typed: list[str], status: int) -> None:
    ended, names, number = loaded(*typed)
    assert ended == status
    assert "typer" in names
    assert names & HEAVY == set()
    assert number < 900


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run on meshes and a rule check that count, and two runs on mesh 3 that were cut short."""
    folder = tmp_path_factory.mktemp("recorded")
    other: dict[str, object] = {"meshes": ["3"], "imports": ["mine"], "request": {"patterns": ["embedding"]}}
    killed = make_header(id="2025-01-30T12-30-05-a1b2", **other)
    cut_short = make_run(
        header=make_header(id="2025-01-29T12-30-05-a1b2", **other),
        matrices=[replace(one, mesh="3") for one in make_run().matrices],
        untested=[UntestedRecord("the rest of the run", INTERRUPTED, 1)],
        complete=False,
    )
    RunStore(folder).open_run(killed).close()
    for run in map(as_of_now, (cut_short, make_run(), make_rules_run())):
        with RunStore(folder).open_run(run.header) as opened:
            opened.finish(run)
    return folder


def as_of_now(run: RunRecord) -> RunRecord:
    """Return the run as if it had been made with the present sources and torch."""
    return replace(run, header=replace(run.header, digests=revision(), versions=versions()))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("typed", "status", "heavy"),
    [
        (["gate"], 1, set()),
        (["gate", "--format", "json"], 1, set()),
        (["gate", "--mesh", "4"], 1, set()),
        (["gate", "--mesh", "4", "--update", "--baseline", "known.toml"], 1, set()),
        (["gate", "--rank-memory", "1"], 2, set()),
        (["graph"], 0, set()),
        (["graph", "--format", "mermaid"], 0, {"networkx", "numpy", "jinja2"}),
        (["report"], 1, {"networkx", "numpy", "jinja2"}),
        (["report", "--rank-memory", "512MiB"], 1, {"networkx", "numpy", "jinja2"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_reads_records_does_not_load_torch(
    typed: list[str], status: int, heavy: set[str], recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended, names, number = loaded(*typed, "--out", str(recorded))
    assert ended == status
    assert names & HEAVY <= heavy
    assert number < (900 if heavy else 500)
    assert (tmp_path / "known.toml").exists() == ("--update" in typed)


@pytest.mark.processes
def test_a_command_that_needs_torch_loads_it() -> None:
    """So that the tests above can fail."""
    _, names, _ = loaded("layouts", "row-wise-even", "--ranks", "2")
    assert "torch" in names
