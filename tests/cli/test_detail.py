"""How much a command prints, and what it would try."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_commands import run_module

from verifier.cli.options import Detail
from verifier.runs.estimate import estimate_of_rules, estimate_of_trials
from verifier.runs.store import RunStore

from run_factory import make_header, make_op_rules, make_rules, make_rules_run, make_run  # isort: skip


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    store = RunStore(tmp_path)
    rules = make_rules(ops={"exp": make_op_rules(seconds=30.0)})
    for run in (
        make_run(header=make_header(id="20260101T000000-000000-000001"), trials=1000, seconds=100.0),
        make_rules_run(rules, header=make_header(id="20260101T000000-000000-000002")),
    ):
        with store.open_run(run.header) as writer:
            writer.finish(run)
    return store


def test_an_estimate_is_by_the_newest_runs_of_the_folder(store: RunStore) -> None:
    said = estimate_of_trials(store, 10, 16, ["2", "2x2"], 3, None)
    assert "3 ops on 2 meshes 2 2x2: at most 10 cases on each and 320 trials, in at most about 40 s" in said
    assert said.endswith("as in run 20260101T000000-000000-000001")
    said = estimate_of_trials(store, 1000, 16, ["2"], 3, 60.0)
    assert said.endswith("it ends after 60 s")

    said = estimate_of_rules(store, ["exp", "log"], ["2"], 2)
    assert "2 ops on meshes 2, in about 38 s with 2 jobs" in said
    assert said.endswith("as in run 20260101T000000-000000-000002")


def test_an_estimate_without_any_run_says_so(tmp_path: Path) -> None:
    empty = RunStore(tmp_path)
    assert estimate_of_trials(empty, 1, 1, ["2"], 1, None).endswith("as nothing was recorded yet")
    assert estimate_of_rules(empty, ["exp"], ["2"], 1).endswith("as nothing was recorded yet")


def test_quiet_and_verbose_exclude_each_other() -> None:
    assert [Detail.of(*given) for given in ((False, False), (True, False), (False, True))] == [
        Detail.SCREEN, Detail.QUIET, Detail.FULL,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="give one of them"):
        Detail.of(True, True)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("run", "embedding", "--mesh", "2"), "level 2 would try 2 ops on 1 mesh 2"),
        (("rules", "exp"), "level 1 would check 1 op on meshes 2 3 2x2"),
        (("gate", "embedding", "--fresh"), "level 2 would try 2 ops on 6 meshes"),
    ],
)
def test_a_dry_run_tries_and_writes_nothing(
    command: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = run_module("verifier", *command, "--dry-run")
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith(said)
    assert not Path("reports").exists()
