"""Hypothesis's shrinker, started from an example that is known to fail.

``hypothesis.find`` draws new examples until one fails, which may never happen for a rare failure. It replays the
examples in its database first, so the choices behind the failing example are put there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

import hypothesis
from hypothesis import Phase, settings
from hypothesis.control import current_build_context
from hypothesis.database import InMemoryExampleDatabase, choices_to_bytes
from hypothesis.errors import Flaky, NoSuchExample
from hypothesis.strategies import SearchStrategy

from verifier.planning.drawing import DRAWING, without_constants_of_modules

__all__ = ["current_choices", "shrink"]

Drawn = TypeVar("Drawn")
_KEY = b"failing example"


def current_choices() -> bytes:
    """Return the choices behind the example that Hypothesis is trying now, for :func:`shrink`."""
    return choices_to_bytes(current_build_context().data.choices)


def shrink(
    generator: SearchStrategy[Drawn],
    fails: Callable[[Drawn], bool],
    choices: bytes | None,
    max_examples: int,
    seed: int,
) -> Drawn | None:
    """Return the smallest example for which ``fails`` holds; None if there is none, or it fails only sometimes.

    Parameters
    ----------
    choices
        What :func:`current_choices` returned for an example that failed; None to look for one.
    max_examples
        How many examples to draw if the example of ``choices`` does not fail under this ``generator``.
    """
    database = InMemoryExampleDatabase()
    if choices is not None:
        database.save(_KEY, choices)
    phases = (Phase.reuse, Phase.generate, Phase.shrink)
    how = settings(DRAWING, max_examples=max_examples, database=database, phases=phases)
    try:
        with without_constants_of_modules():
            return hypothesis.find(generator, fails, settings=how, random=random.Random(seed), database_key=_KEY)
    except (NoSuchExample, Flaky):  # an example that fails only sometimes cannot be shrunk
        return None
