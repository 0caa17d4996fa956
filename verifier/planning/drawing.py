"""Drawing with Hypothesis outside of tests: one seed draws the same in every process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers
from hypothesis.strategies import SearchStrategy

__all__ = ["DRAWING", "draw_each", "without_constants_of_modules"]

Drawn = TypeVar("Drawn")

DRAWING = settings(
    database=None, deadline=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False, derandomize=False, print_blob=False,
)  # fmt: skip
"""For drawing outside of tests, whatever Hypothesis profile is loaded."""


def draw_each(generator: SearchStrategy[Drawn], seed: int, most: int, use: Callable[[Drawn], None]) -> None:
    """Call ``use`` with each of at most ``most`` examples that Hypothesis draws from ``generator`` with ``seed``."""

    @hypothesis.seed(seed)
    @settings(DRAWING, max_examples=most)
    @hypothesis.given(generator)
    def draw(one: Drawn) -> None:
        use(one)

    with without_constants_of_modules():
        draw()


@contextmanager
def without_constants_of_modules() -> Iterator[None]:
    """Let Hypothesis draw no constants that it finds in the source of modules.

    It takes those of all modules that are loaded and not installed. So one seed would draw other examples from a
    checkout than from a wheel, and others again beside a file of the user's. Hypothesis has no setting for it; a
    version of Hypothesis that finds them in another way draws as it does.
    """
    if not hasattr(providers, "_get_local_constants"):
        yield
        return
    nothing = providers.Constants()  # type: ignore[attr-defined]
    found = providers._get_local_constants
    providers._get_local_constants = lambda: nothing
    providers.CONSTANTS_CACHE.cache.clear()
    try:
        yield
    finally:
        providers._get_local_constants = found
        providers.CONSTANTS_CACHE.cache.clear()
