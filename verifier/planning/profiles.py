"""Profiles of Hypothesis: how much the tests draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from verifier.core.wording import did_you_mean

__all__ = ["hypothesis_settings", "register_profiles"]

# The differences between profiles. ci and gpu gate merges, so they are deterministic and store no examples. dev and
# nightly draw new examples each time, after they repeat examples that failed before.
_DIFFERENCES: dict[str, dict[str, Any]] = {
    "dev": {"max_examples": 25, "stateful_step_count": 20, "derandomize": False},
    "ci": {"max_examples": 100, "stateful_step_count": 30, "derandomize": True},
    "nightly": {"max_examples": 2000, "stateful_step_count": 60, "derandomize": False},
    "gpu": {"max_examples": 50, "stateful_step_count": 30, "derandomize": True},
}


def hypothesis_settings(name: str, directory: Path = Path()) -> settings:
    """Return the Hypothesis settings of profile ``name``, with every field given.

    A field that is left out takes Hypothesis's default, which depends on whether ``CI`` is set.

    Parameters
    ----------
    name
        A key of :data:`CAMPAIGN_PROFILES`.
    directory
        ``dev`` and ``nightly`` keep failing examples in ``.hypothesis/examples`` of this directory.

    Raises
    ------
    ValueError
        If there is no profile of this name; the message has the nearest one.
    """
    if name not in _DIFFERENCES:
        hint = did_you_mean(name, _DIFFERENCES)
        raise ValueError(f"profile {name!r} is none of {', '.join(_DIFFERENCES)}{hint}")
    differences = _DIFFERENCES[name]
    examples = directory.absolute() / ".hypothesis" / "examples"
    return settings(
        # Hypothesis refuses a database beside derandomize: a stored example would make the outcome depend on the past.
        database=None if differences["derandomize"] else DirectoryBasedExampleDatabase(examples),
        verbosity=Verbosity.normal,
        # Without Phase.explain: it traces every line of this process, but failures happen in other processes.
        phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink),
        report_multiple_bugs=True,
        # The mesh sets time limits. An example is slow if ranks are started, not because a generator is bad.
        deadline=None,
        suppress_health_check=(HealthCheck.too_slow,),
        print_blob=True,
        backend="hypothesis",
        **differences,
    )


def register_profiles(directory: Path = Path()) -> None:
    """Register ``dev``, ``ci``, ``nightly`` and ``gpu`` with Hypothesis; loads none of them."""
    for name in _DIFFERENCES:
        settings.register_profile(name, hypothesis_settings(name, directory))
