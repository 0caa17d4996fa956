"""Profiles pin every field of Hypothesis's settings, whatever the environment says."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from verifier.planning import profiles
from verifier.planning.budgets import CAMPAIGN_PROFILES, OWN_RULES
from verifier.planning.profiles import hypothesis_settings, register_profiles

NAMES = ("dev", "ci", "nightly", "gpu")
FIELDS = sorted(set(inspect.signature(settings.__init__).parameters) - {"self", "parent"})

PRINT_ALL = """
from hypothesis import settings
from verifier.planning.profiles import register_profiles
register_profiles()
for name in ("dev", "ci", "nightly", "gpu"):
    profile = settings.get_profile(name)
    print(name, [(field, repr(getattr(profile, field))) for field in FIELDS])
"""


@pytest.mark.parametrize("name", NAMES)
def test_profile_passes_every_field(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}

    def spy(**fields: object) -> settings:
        given.update(fields)
        return settings()

    monkeypatch.setattr(profiles, "settings", spy)
    hypothesis_settings(name)
    assert sorted(given) == FIELDS


@pytest.mark.processes
def test_profiles_do_not_depend_on_ci() -> None:
    printed = set()
    without = {key: value for key, value in os.environ.items() if key not in ("CI", "GITHUB_ACTIONS", "TF_BUILD")}
    for environment in (without, {**without, "CI": "true", "GITHUB_ACTIONS": "true"}):
        program = PRINT_ALL.replace("FIELDS", repr(FIELDS))
        result = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert all(f"{name} [" in result.stdout for name in NAMES)
        printed.add(result.stdout)
    assert len(printed) == 1, printed


@pytest.mark.parametrize("name", NAMES)
def test_profile_leaves_time_to_the_mesh_and_reports_all_bugs(name: str) -> None:
    profile = hypothesis_settings(name)
    assert profile.deadline is None
    assert profile.report_multiple_bugs
    assert profile.print_blob
    assert profile.backend == "hypothesis"


def test_gating_profiles_are_deterministic_and_the_others_remember(tmp_path: Path) -> None:
    for name in ("ci", "gpu"):
        assert hypothesis_settings(name).derandomize
        assert hypothesis_settings(name).database is None
    for name in ("dev", "nightly"):
        profile = hypothesis_settings(name, tmp_path)
        assert not profile.derandomize
        assert profile.database is not None
        profile.database.save(b"key", b"value")
    assert (tmp_path / ".hypothesis" / "examples").is_dir()


def test_register_profiles_registers_and_loads_nothing() -> None:
    loaded = settings.get_current_profile_name()
    register_profiles()
    assert settings.get_current_profile_name() == loaded
    assert [settings.get_profile(name).max_examples for name in NAMES] == [25, 100, 2000, 50]


def test_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"profile 'nigthly' is none of dev, ci, nightly, gpu; .*'nightly'"):
        hypothesis_settings("nigthly")


def test_campaign_profiles_grow_from_dev_to_nightly() -> None:
    assert tuple(CAMPAIGN_PROFILES) == (*NAMES, OWN_RULES)
    assert all(name == profile.name for name, profile in CAMPAIGN_PROFILES.items())
    work = {name: p.max_examples * p.combinations_per_case for name, p in CAMPAIGN_PROFILES.items()}
    assert work[OWN_RULES] < work["dev"] < work["ci"] == work["gpu"] < work["nightly"]
