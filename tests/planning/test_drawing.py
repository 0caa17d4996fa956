"""Draws outside of tests: the same in every process, whatever modules are loaded."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from sortedcontainers import SortedSet

from verifier.findings.shrinking import shrink
from verifier.planning.drawing import DRAWING, draw_each

WRITTEN_SOMEWHERE = 7_340_033
NUMBERS = st.integers(0, 10**9)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a module that is loaded have a number in its source."""
    constants = providers.Constants(integers=SortedSet([WRITTEN_SOMEWHERE]))
    monkeypatch.setattr(providers, "_get_local_constants", lambda: constants)


def drawn() -> list[int]:
    numbers: list[int] = []
    draw_each(NUMBERS, 5, 200, numbers.append)
    return numbers


def test_a_seed_draws_the_same_whatever_modules_are_loaded(request: pytest.FixtureRequest) -> None:
    before = drawn()
    request.getfixturevalue("written")
    assert drawn() == before
    assert len(before) > 100


@pytest.mark.usefixtures("written")
def test_hypothesis_itself_draws_what_modules_hold() -> None:
    numbers: list[int] = []

    @hypothesis.seed(5)
    @hypothesis.settings(DRAWING, max_examples=200)
    @hypothesis.given(NUMBERS)
    def draw(number: int) -> None:
        numbers.append(number)

    draw()
    assert WRITTEN_SOMEWHERE in numbers
    assert WRITTEN_SOMEWHERE not in drawn()
    draw()
    assert numbers.count(WRITTEN_SOMEWHERE) > 1  # what our draws leave behind is as before


@pytest.mark.usefixtures("written")
def test_no_failure_is_sought_among_what_modules_hold() -> None:
    assert shrink(NUMBERS, lambda number: number == WRITTEN_SOMEWHERE, None, 200, 5) is None
