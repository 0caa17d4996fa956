"""Loads the plugin if the distribution is not installed, marks tests by what they start, and orders them.

Samples under ``derandomize`` depend only on the test here. Hypothesis would also draw constants from the modules of
this project that are loaded, and these depend on the tests before.
"""

from __future__ import annotations

import gc
import multiprocessing.process
import os
import platform
import subprocess
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from importlib.metadata import entry_points

import pytest
import torch
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from verifier.meshes.pool import Pool, PoolSet
from verifier.planning.profiles import register_profiles
from verifier.processes import child, scripts
from verifier.processes.forks import FORKS, shared_servers
from verifier.torch_internals.caches import clear_caches
from verifier.torch_internals.registries import keys_of_rules, registries_of_rules

gc.disable()  # until all tests are loaded: a collection would find nothing, and they take a third of the time

_PLUGIN = "verifier.pytest_plugin"
_installed = any(entry_point.value == _PLUGIN for entry_point in entry_points(group="pytest11"))
pytest_plugins = ["pytester"] if _installed else ["pytester", _PLUGIN]

# as the command line sets it: ranks under other values would be forked from servers of their own
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
torch.set_num_threads(1)  # beside busy ranks and workers, threads of one small op wait for each other
platform.processor()  # starts a process once; torch's own tests ask for it when they are loaded
register_profiles()
settings.load_profile("dev")

assert hasattr(providers, "_get_local_constants"), "this Hypothesis draws constants of modules in another way"
_none = providers.Constants()
providers._get_local_constants = lambda: _none  # no setting turns it off


# --------------------------------------------------------------------------------------------------------- collection
_POOLS = ("our_pools", "mesh_pools", "pools", "pool")
"""Fixtures that are pools of ranks. Tests that share one of the first two, which last for the session, run in a row."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that start processes, deselect nightly tests, and put modules that share pools next to each other."""
    for item in items:
        if not {*_POOLS}.isdisjoint(item.fixturenames):  # type: ignore[attr-defined]
            item.add_marker("ranks")
        if item.get_closest_marker("ranks") is not None:
            item.add_marker("processes")
        if item.path.parent.name == "cli":
            item.add_marker("cli")
    _leave_out_nightly(config, items)
    _put_together(items)


def _leave_out_nightly(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--hypothesis-profile") == "nightly" or "nightly" in config.getoption("markexpr"):
        return
    nightly = [item for item in items if item.get_closest_marker("nightly") is not None]
    if nightly:
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if item.get_closest_marker("nightly") is None]


def _put_together(items: list[pytest.Item]) -> None:
    """Sort modules by the pools of the session that their tests ask for; within a module the order stays.

    Modules with a test that takes long come first, so that no worker waits for such a test in the end.
    """
    shared: dict[object, set[str]] = {}
    for item in items:
        shared.setdefault(item.path, set()).update({*_POOLS[:2]} & set(item.fixturenames))  # type: ignore[attr-defined]
    long = {item.path for item in items if item.get_closest_marker("long") is not None}
    items.sort(key=lambda item: [item.path not in long, *(name in shared[item.path] for name in _POOLS[:2])])


def pytest_configure(config: pytest.Config) -> None:
    """Let all ranks and workers of this session be forked from processes that have loaded torch."""
    servers = ExitStack()
    servers.enter_context(shared_servers())
    config.add_cleanup(servers.close)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Let collections of garbage begin, also in the process that hands out tests, which collects none itself."""
    gc.enable()
    gc.collect()
    gc.freeze()  # otherwise each full collection would look through torch and the tests
    gc.set_threshold(10_000, 20, 20)  # the usual thresholds cost a twentieth of a test's time


# ---------------------------------------------------------------------------------------------------------- processes
def _refuse(*args: object, **kwargs: object) -> None:
    pytest.fail("a test that starts a process needs pytest.mark.processes, or pytest.mark.ranks if these are ranks")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that starts a process without the mark, so that ``-m "not processes"`` stays fast."""
    if item.get_closest_marker("processes") is not None:
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", _refuse)
        patch.setattr(subprocess.Popen, "__del__", lambda self: None)
        patch.setattr(child, "fork", _refuse)
        patch.setattr(scripts, "fork", _refuse)
        patch.setattr(multiprocessing.process.BaseProcess, "start", _refuse)
        for name in ("fork", "posix_spawn", "posix_spawnp", "system"):
            patch.setattr(os, name, _refuse)
        return (yield)


@pytest.fixture(scope="session")
def our_pools() -> Iterator[PoolSet]:
    """Ranks in which the strategies of this repository are installed."""
    pools = PoolSet(lambda key: Pool(key, ["strategies.install"]), keep=4)
    yield pools
    pools.close()


# -------------------------------------------------------------------------------------------------------------- rules
def _rules() -> tuple[dict[object, object], ...]:
    return tuple(dict(registry) for registry in registries_of_rules())


@pytest.fixture
def rules_taken_back() -> Iterator[None]:
    """Remove the rules that a test registers with DTensor in this process."""
    registries = (*registries_of_rules(), *keys_of_rules())
    before = [dict(registry) for registry in registries]
    yield
    for registry, old in zip(registries, before, strict=True):
        registry.clear()
        registry.update(old)
    clear_caches()


@pytest.fixture(autouse=True)
def _nothing_left_for_later_tests() -> Iterator[None]:
    """Fail a test that leaves a rule in DTensor's registries, or takes the fork servers from later tests.

    All pools of later tests would refuse to start, or start slowly.
    """
    before, servers = _rules(), os.environ[FORKS]
    yield
    assert os.environ[FORKS] == servers
    after = _rules()
    ops = {str(op) for old, new in zip(before, after, strict=True) for op in new if old.get(op) is not new[op]}
    assert not ops, f"the test registered rules of {', '.join(sorted(ops))}: ask for the fixture rules_taken_back"
