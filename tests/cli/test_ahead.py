"""The servers that are started ahead are those that the processes of a command are forked from."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from forked_commands import run_python

from verifier.cli.loading import OF_IMPORTS, WORKER, WORKER_STEP, start_servers
from verifier.meshes.processes import Starter
from verifier.processes import forks
from verifier.processes.forks import FORKS
from verifier.rules.campaign import worker_process
from verifier.rules.campaign.work import preparation
from verifier.rules.campaign.worker_process import WorkerProcess

pytestmark = pytest.mark.processes


def test_names_of_the_worker_are_those_of_its_module_and_its_step() -> None:
    assert worker_process.__name__ == WORKER
    for imports, step in ((), WORKER_STEP), (("rule.py",), OF_IMPORTS):
        prepare = preparation(imports)
        assert f"{prepare.__module__}:{prepare.__qualname__}" == step


@pytest.mark.parametrize("imports", [(), ("rule.py",)])
def test_no_other_servers_are_started_for_ranks_and_workers(
    imports: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def note(module: str, steps: Iterable[object], environment: dict[str, str], path: object, base: str = "") -> None:
        given = {name: value for name, value in environment.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
        seed = given["PYTHONHASHSEED"]
        loading = sorted(name for name in given if name.startswith(("OMP_", "TORCH", "PYTORCH_")))
        asked.append(f"{module if module == WORKER else base or module} {seed} {loading} {[*steps] if base else ''}")

    monkeypatch.delenv(FORKS, raising=False)
    monkeypatch.setattr(forks, "_server", note)
    start_servers(2, OF_IMPORTS if imports else WORKER_STEP)
    ahead = {*asked}
    assert len(ahead) == 3
    asked.clear()
    monkeypatch.setitem(os.environ, "TORCHINDUCTOR_CACHE_DIR", "as torch sets it")
    assert sys.modules["torch"]
    worker = WorkerProcess(imports, None, preparation(imports))
    worker.close()
    assert {one for one in asked if one.startswith(WORKER)} <= ahead
    assert Starter(hash_seeds=2).spec(3).hash_seed == 1


_STRATEGY = """
import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.experimental import register_sharding

@register_sharding(torch.ops.aten.cumsum.default)
def cumsum(x, dim, dtype=None):
    return [([one], [one, None, None]) for one in {Replicate()}]
"""
_PROGRAM = """
from verifier.campaign.recorded import load_ahead
from verifier.campaign.request import Request, make_plan
from verifier.gate.baseline import Baseline
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool
from verifier.meshes.processes import Starter
from verifier.planning.families import DrawContext
from verifier.processes import forks

plan = make_plan(Request(imports=["rule.py"], only=("aten.cumsum.default",)), Baseline())
load_ahead(plan)
before = {*forks._started}
assert len(before) == 6, before  # for each of two hash seeds torch alone, what ranks need, and the import
((name, ops),) = plan.selected.items()
assert plan.families[name].cases(DrawContext(plan.meshes[0], plan.dtypes, ops)).is_empty is False
starter = Starter(plan.imports, plan.rank_memory, plan.hash_seeds)
with Pool(PoolKey.of(plan.meshes[0]), plan.imports, starter=starter) as pool:
    pool.start()
    assert {*forks._started} == before, {*forks._started} - before
"""


def test_ranks_are_forked_from_what_a_plan_has_loaded_ahead(tmp_path: Path) -> None:
    (tmp_path / "rule.py").write_text(_STRATEGY)
    environment = {name: value for name, value in os.environ.items() if name != FORKS}
    done = run_python("-c", _PROGRAM, folder=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
