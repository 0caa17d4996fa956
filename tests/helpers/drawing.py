"""How tests of generators draw: the same each time, and nothing else."""

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
