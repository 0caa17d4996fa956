"""Derandomised tests of this suite draw the same whatever else the process has loaded."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st


def sample() -> list[int]:
    drawn: list[int] = []

    @settings(max_examples=200, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(st.integers(0, 2**40))
    def draw(number: int) -> None:
        drawn.append(number)

    draw()
    return drawn


def test_numbers_in_a_module_of_the_project_do_not_change_what_is_drawn(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sample()
    number = random.Random(0).randrange(2**40)
    directory: Path = tmp_path_factory.mktemp("project")
    (directory / "with_numbers.py").write_text(f"NUMBERS = [{number}, {number + 7}, {number + 11}]\n")
    monkeypatch.syspath_prepend(str(directory))
    try:
        importlib.import_module("with_numbers")
        assert sample() == before
    finally:
        sys.modules.pop("with_numbers", None)
