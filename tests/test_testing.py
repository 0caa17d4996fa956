"""The harness: test methods that run on every rank, what becomes of their failures, and that pytest can run them."""

from __future__ import annotations

import unittest
from pathlib import Path

import pytest
import rank_cases
import torch

from verifier import testing
from verifier.meshes.pool import PoolSet
from verifier.testing import with_comms

BOTH = [rank_cases.Processes, rank_cases.Threads]


@pytest.fixture(autouse=True)
def shared_ranks(monkeypatch: pytest.MonkeyPatch, mesh_pools: PoolSet) -> None:
    """The ranks that other tests have started; those of the harness itself would take as long to start again."""
    monkeypatch.setattr(testing, "_pools", lambda: mesh_pools)


def outcome(case: type[unittest.TestCase], method: str) -> unittest.TestResult:
    result = unittest.TestResult()
    case(method).run(result)
    assert result.testsRun == 1
    return result


def failure(case: type[unittest.TestCase], method: str) -> str:
    result = outcome(case, method)
    assert not result.errors
    ((_, text),) = result.failures
    return text.partition("AssertionError: ")[2]


@pytest.mark.parametrize("case", BOTH)
@pytest.mark.parametrize("method", ["sums", "shards"])
def test_runs_on_every_rank(case: type[unittest.TestCase], method: str) -> None:
    assert outcome(case, method).wasSuccessful()


@pytest.mark.parametrize("method", ["own_processes", "collectives_are_those_of_torch"])
def test_on_processes(method: str) -> None:
    result = outcome(rank_cases.Processes, method)
    assert result.wasSuccessful(), result.failures


@pytest.mark.parametrize("case", BOTH)
def test_failure_names_the_rank_and_the_others_do_not_wait(case: type[unittest.TestCase]) -> None:
    text = failure(case, "one_fails")
    assert text.startswith(f"rank 1 raised AssertionError: wrong on this rank\n  in {case.__name__}.one_fails on ")
    assert "rank_cases.py" in text
    assert outcome(case, "sums").wasSuccessful()


@pytest.mark.parametrize("case", BOTH)
def test_failing_subtest_is_named(case: type[unittest.TestCase]) -> None:
    text = failure(case, "subtests")
    assert "raised AssertionError: too large" in text
    assert "subtest dim=0, factor=2" in text


@pytest.mark.parametrize("case", BOTH)
def test_skips(case: type[unittest.TestCase]) -> None:
    assert [reason for _, reason in outcome(case, "skips").skipped] == ["not on this machine"]
    seen = torch.cuda.device_count()
    assert [r for _, r in outcome(case, "needs_gpus").skipped] == [f"needs 10000 GPUs, torch sees {seen}"]


@pytest.mark.parametrize("case", BOTH)
def test_decorators_count(case: type[unittest.TestCase]) -> None:
    assert len(outcome(case, "fails_as_expected").expectedFailures) == 1


@pytest.mark.parametrize("case", BOTH)
def test_cleanups_run_on_ranks(case: type[unittest.TestCase]) -> None:
    assert outcome(case, "cleans_up").wasSuccessful()
    assert outcome(case, "is_clean").wasSuccessful()
    assert failure(case, "cannot_clean_up").startswith("rank 0 raised KeyError: 'nothing'")


@pytest.mark.parametrize("case", BOTH)
def test_a_failure_counts_more_than_a_skip(case: type[unittest.TestCase]) -> None:
    assert failure(case, "one_skips_and_one_fails").startswith("rank 1 raised AssertionError: wrong on this rank")


@pytest.mark.parametrize("case", BOTH)
def test_another_backend_is_refused(case: type[unittest.TestCase]) -> None:
    assert "for_nccl is for backend nccl, the ranks have " in failure(case, "for_nccl")


def test_process_group_of_other_tests_is_not_to_be_destroyed() -> None:
    text = failure(rank_cases.Processes, "destroys_the_group")
    assert "raised ValueError: destroys_the_group has destroyed the process group" in text.partition("\n")[0]
    assert outcome(rank_cases.Processes, "sums").wasSuccessful()


def test_modules_of_packages_that_ranks_do_not_find(tmp_path: Path) -> None:
    """Under ``--import-mode=importlib`` the package of a test need not be on the path."""
    file = tmp_path / "test_in_a_package.py"
    file.write_text("VALUE = 3", encoding="utf-8")
    assert testing._imported("a_package_of_nobody.test_in_a_package", str(file)).VALUE == 3
    file = tmp_path / "test_that_imports.py"
    file.write_text("import a_module_that_nobody_has", encoding="utf-8")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        testing._imported("a_package_of_nobody.test_that_imports", str(file))


def test_class_of_a_function_is_refused() -> None:
    class Inner(rank_cases.Processes):
        """A class that ranks cannot import."""

    ((_, text),) = outcome(Inner, "sums").errors
    assert "<locals>.Inner is made by a function, where no rank finds it; put it at the top level" in text


def test_no_process_group_is_refused() -> None:
    with pytest.raises(ValueError, match="has no process group; derive its class from ProcessTestCase"):
        with_comms(lambda: None)()


def test_rank_that_hangs() -> None:
    text = failure(rank_cases.Hanging, "one_sleeps")
    assert text.startswith("hang: after 2 s: ranks 0, 1 in forward\n  in Hanging.one_sleeps on 2 ranks, backend gloo")


def test_thread_that_hangs() -> None:
    text = failure(rank_cases.SlowThreads, "one_sleeps")
    assert text.startswith("rank 1 raised TimeoutError: no end within 1 s")


FILE = """
import pytest
import torch
import torch.distributed as dist
from verifier.testing import ProcessTestCase, ThreadTestCase, with_comms

class TestOnProcesses(ProcessTestCase):
    @with_comms
    def test_ranks(self):
        ranks = [None, None]
        dist.all_gather_object(ranks, self.rank)
        self.assertEqual(ranks, [0, 1])

    def test_imported(self):
        pytest.importorskip("a_module_that_nobody_has")

    def test_known(self):
        pytest.xfail("by a call")

    def test_fails(self):
        pytest.fail("not yet")

class TestOnThreads(ThreadTestCase):
    world_size = 3

    @with_comms
    def test_ranks(self):
        total = torch.ones(1)
        dist.all_reduce(total)
        self.assertEqual(total.item(), 4)

    def test_imported(self):
        pytest.importorskip("a_module_that_nobody_has")

    def test_known(self):
        pytest.xfail("by a call")

    @pytest.mark.skip(reason="by a mark")
    def test_skipped(self):
        raise AssertionError

    @pytest.mark.xfail(reason="by a mark", strict=True)
    def test_expected_to_fail(self):
        raise AssertionError
"""


def test_pytest_runs_them(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_ranks_of_a_file=FILE)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=2, skipped=3, xfailed=3)
    result.stdout.fnmatch_lines(["*AssertionError: rank 0 raised AssertionError: not yet*"])
    result.stdout.fnmatch_lines(["*AssertionError: rank 0 raised AssertionError: 3.0 != 4*"])
