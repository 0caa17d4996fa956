"""The servers that are started ahead are those that the processes of a command are forked from."""

from __future__ import annotations

import os
import sys

import pytest

from verifier.cli.loading import WORKER, WORKER_STEPS, start_servers
from verifier.meshes.processes import Starter
from verifier.processes import forks
from verifier.processes.forks import FORKS
from verifier.rules.campaign import worker_process
from verifier.rules.campaign.work import prepare
from verifier.rules.campaign.worker_process import WorkerProcess

pytestmark = pytest.mark.processes


def test_names_of_the_worker_are_those_of_its_module_and_its_step() -> None:
    assert worker_process.__name__ == WORKER
    assert ((f"{prepare.__module__}:{prepare.__qualname__}",),) == WORKER_STEPS


def test_no_other_servers_are_started_for_ranks_and_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def note(module: str, steps: object, environment: dict[str, str], path: object, base: str = "") -> None:
        given = {name: value for name, value in environment.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
        seed = given["PYTHONHASHSEED"]
        loading = sorted(name for name in given if name.startswith(("OMP_", "TORCH", "PYTORCH_")))
        asked.append(f"{module if module == WORKER else base or module} {seed} {loading} {steps if base else ''}")

    monkeypatch.delenv(FORKS, raising=False)
    monkeypatch.setattr(forks, "_server", note)
    start_servers(2, workers=True)
    ahead = {*asked}
    assert len(ahead) == 3
    asked.clear()
    monkeypatch.setitem(os.environ, "TORCHINDUCTOR_CACHE_DIR", "as torch sets it")
    assert sys.modules["torch"]
    worker = WorkerProcess((), None, prepare)
    worker.close()
    assert {one for one in asked if one.startswith(WORKER)} <= ahead
    assert Starter(hash_seeds=2).spec(3).hash_seed == 1
