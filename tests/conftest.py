"""Loads the plugin where the distribution is not installed, and gives Hypothesis a profile when no option names one.

Samples under ``derandomize`` follow from the test alone here. By itself Hypothesis also draws numbers that stand in the
modules of this project which the process has loaded by then; which these are depends on the tests that it ran before.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from importlib.metadata import entry_points

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from verifier.planning.profiles import register_profiles
from verifier.torch_internals.caches import clear_caches
from verifier.torch_internals.registries import registries_of_rules

_PLUGIN = "verifier.pytest_plugin"
_installed = any(entry_point.value == _PLUGIN for entry_point in entry_points(group="pytest11"))
pytest_plugins = ["pytester"] if _installed else ["pytester", _PLUGIN]

register_profiles()
settings.load_profile("dev")

_none = providers.Constants()
providers._get_local_constants = lambda: _none  # no setting turns it off


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # torch and the tests stay; each full collection would look through them


def _rules() -> tuple[dict[object, object], ...]:
    return tuple(dict(registry) for registry in registries_of_rules())


@pytest.fixture
def rules_taken_back() -> Iterator[None]:
    """Take back the rules that a test registers with DTensor in this process."""
    before = _rules()
    yield
    for registry, old in zip(registries_of_rules(), before, strict=True):
        registry.clear()
        registry.update(old)
    clear_caches()


@pytest.fixture(autouse=True)
def _no_rules_left_behind() -> Iterator[None]:
    """Fail a test that leaves a rule in DTensor's registries: all pools of later tests would refuse to start."""
    before = _rules()
    yield
    after = _rules()
    ops = {str(op) for old, new in zip(before, after, strict=True) for op in new if old.get(op) is not new[op]}
    assert not ops, f"the test registered rules of {', '.join(sorted(ops))}: ask for the fixture rules_taken_back"
