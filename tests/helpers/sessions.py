"""Test sessions in processes of their own, under the plugin, and what they recorded."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from forked_commands import run_module

from verifier.records.schema import RunRecord
from verifier.runs.store import RunStore

ROOT = Path(__file__).resolve().parents[2]


def run_session(pytester: pytest.Pytester, *arguments: str, forked: bool = True) -> pytest.RunResult:
    """Run pytest in a process of its own, with the plugin as it is loaded here.

    A forked process has torch and the verifier loaded.
    """
    environment = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    pytester.makeini("[pytest]\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment)
        patch.delenv("PYTEST_ADDOPTS", raising=False)
        plugin = [] if _is_installed() else ["-p", "verifier.pytest_plugin"]
        if not forked:
            return pytester.runpytest_subprocess(*plugin, "-p", "no:cacheprovider", *arguments)
        done = run_module("pytest", *plugin, "-p", "no:cacheprovider", *map(str, arguments), folder=pytester.path)
        return pytest.RunResult(done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), 0.0)


def _is_installed() -> bool:
    return any(entry_point.value == "verifier.pytest_plugin" for entry_point in entry_points(group="pytest11"))


def newest(pytester: pytest.Pytester, folder: str = "reports") -> RunRecord:
    run = RunStore(pytester.path / folder).newest()
    assert run is not None
    return run
