"""Settings with which tests of generators draw the same samples each time."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

DRAWING = settings(
    max_examples=100,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
