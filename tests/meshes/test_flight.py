"""What a trial that is on its way has become, told from what has come back of it; no rank is started."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Shard

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Fate, Phase, ProcessReport, Raised
from verifier.meshes.flight import Flight, Terms
from verifier.meshes.tasks import Task

MESH = MeshSpec((2,))
TRIAL = Trial(OpCase("aten.neg.default", "torch.neg", (torch.ones(2),)), MESH, ((Shard(0),),))
DONE = ProcessReport((0,), Phase.DONE)
RAISED = ProcessReport((0,), Phase.FORWARD, Raised(Phase.FORWARD, "RuntimeError", "no"))


def idle() -> list[float]:
    return [1.0, 1.0]


def working() -> Callable[[], list[float]]:
    """Return what ranks have computed that compute all the time, as long as they are looked at."""
    seconds = [0.0]

    def computed() -> list[float]:
        seconds[0] += 0.5
        return [0.0, seconds[0]]

    return computed


TERMS = Terms(size=2, trial_limit=10.0, grace=0.25, on_cpu=True, computed=idle)


@pytest.mark.parametrize(
    ("reported", "lost", "silent", "fate"),
    [
        ([], [], False, None),
        ([0], [], False, None),
        ([0, 1], [], False, Fate.COMPLETED),
        ([0, 1], [1], False, Fate.COMPLETED),  # it ended once it had reported
        ([0], [1], False, Fate.DIED),
        ([], [0], False, Fate.DIED),
        ([0], [0], False, None),  # rank 1 may still report
    ],
)
def test_who_reported_and_who_died_decide(
    reported: list[int], lost: Collection[int], silent: bool, fate: Fate | None
) -> None:
    flight = Flight(TRIAL, TERMS)
    for rank in reported:
        flight.take(rank, "report", DONE)
    assert flight.fate(lost, silent) is fate


def test_a_silent_trial_is_looked_at_after_half_of_its_limit_and_hangs_after_all_of_it() -> None:
    flight = Flight(TRIAL, TERMS)
    assert flight.limit == 5.0
    assert flight.fate((), silent=True) is None
    assert flight.limit == 10.0
    assert flight.fate((), silent=True) is Fate.HANG


def test_a_rank_that_reported_and_died_is_why_others_are_silent() -> None:
    flight = Flight(TRIAL, TERMS)
    flight.take(0, "report", DONE)
    assert flight.fate([0], silent=True) is None
    assert flight.fate([0], silent=True) is Fate.DIED


@pytest.mark.parametrize(("on_cpu", "fate"), [(True, Fate.SLOW), (False, Fate.HANG)])
def test_ranks_that_compute_get_ten_times_the_limit_and_are_slow(on_cpu: bool, fate: Fate) -> None:
    flight = Flight(TRIAL, replace(TERMS, computed=working(), on_cpu=on_cpu))
    for _ in range(19):
        assert flight.fate((), silent=True) is None
    assert flight.limit == 100.0
    assert flight.fate((), silent=True) is fate


def test_others_are_stuck_when_the_grace_after_an_exception_is_over() -> None:
    flight = Flight(TRIAL, TERMS)
    flight.take(0, "raised", RAISED)
    assert flight.fate((), silent=False) is None
    flight.grace_until = 0.0
    assert flight.fate((), silent=False) is None
    assert flight.fate((), silent=True) is Fate.STUCK


def test_ranks_that_compute_when_the_grace_is_over_get_another_one() -> None:
    """On a busy machine a rank may be late to raise what all raise."""
    flight = Flight(TRIAL, replace(TERMS, computed=working()), started=time.monotonic())
    flight.take(0, "raised", RAISED)
    for _ in range(3):
        flight.grace_until = 0.0
        assert flight.fate((), silent=True) is None
        assert 0.0 < flight.grace_until - time.monotonic() <= TERMS.grace
    flight.started -= TERMS.trial_limit
    flight.grace_until = 0.0
    assert flight.fate((), silent=True) is Fate.STUCK


def test_who_raised_may_compute_and_the_others_are_stuck() -> None:
    flight = Flight(TRIAL, replace(TERMS, computed=working()), started=time.monotonic())
    flight.take(1, "raised", RAISED)
    flight.grace_until = 0.0
    assert flight.fate((), silent=True) is Fate.STUCK


def test_who_is_alone_waits_for_nobody() -> None:
    flight = Flight(TRIAL, replace(TERMS, size=1))
    flight.take(0, "raised", RAISED)
    assert flight.grace_until == float("inf")


def test_a_task_ends_at_the_limit_of_its_caller() -> None:
    flight = Flight(Task("tests.no_such", (), MESH, limit=3.0), TERMS)
    assert flight.limit == 3.0
    assert flight.fate((), silent=True) is Fate.HANG
