"""A test without the mark starts no process, and repetitions for the night are left out by day."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
MARKERS = "[pytest]\nmarkers =\n    nightly\n    processes\n    ranks\n"
TESTS = """
    import pytest

    @pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
    def test_with(seed):
        pass
"""


@pytest.fixture
def same_profile() -> Iterator[None]:
    """Load the Hypothesis profile of before the test again."""
    name = settings.get_current_profile_name()
    yield
    settings.load_profile(name)


@pytest.mark.parametrize(
    "start",
    [
        lambda: subprocess.run([sys.executable, "-c", ""], check=False),
        lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
        lambda: os.fork(),  # looked up when it is called
    ],
    ids=["subprocess", "multiprocessing", "fork"],
)
def test_a_test_without_the_mark_fails_if_it_starts_a_process(start: Callable[[], object]) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"needs pytest\.mark\.processes"):
        start()


@pytest.mark.parametrize(
    ("options", "passed", "deselected"),
    [((), 1, 1), (("-m", "nightly"), 1, 1), (("--hypothesis-profile=nightly",), 2, 0)],
    ids=["by day", "by mark", "by profile"],
)
def test_nightly_tests_run_only_when_asked_for(
    pytester: pytest.Pytester, options: tuple[str, ...], passed: int, deselected: int, same_profile: None
) -> None:
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makeini(MARKERS)
    pytester.makepyfile(TESTS)
    pytester.runpytest_inprocess(*options).assert_outcomes(passed=passed, deselected=deselected)
