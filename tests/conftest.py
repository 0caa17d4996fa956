"""Loads the plugin where the distribution is not installed, and gives Hypothesis a profile when no option names one."""

from __future__ import annotations

from importlib.metadata import entry_points

from hypothesis import settings

from verifier.profiles import register_profiles

_PLUGIN = "verifier.pytest_plugin"
_installed = any(entry_point.value == _PLUGIN for entry_point in entry_points(group="pytest11"))
pytest_plugins = ["pytester"] if _installed else ["pytester", _PLUGIN]

register_profiles()
settings.load_profile("dev")
