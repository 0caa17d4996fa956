"""Loads the plugin where the distribution is not installed, and gives Hypothesis a profile when no option names one.

Samples under ``derandomize`` follow from the test alone here. By itself Hypothesis also draws numbers that stand in the
modules of this project which the process has loaded by then; which these are depends on the tests that it ran before.
"""

from __future__ import annotations

import gc
from importlib.metadata import entry_points

from hypothesis import settings
from hypothesis.internal.conjecture import providers

from verifier.planning.profiles import register_profiles

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
