"""Runs in every rank of a pool that is measured: records nothing in one trial, steps in the next, all in the third.

Given to a pool among its imports, which then has to run each trial three times in a row. Which of the ways comes
first rotates, because the first run of a trial fills DTensor's caches for the others. The reports of the ranks have
three more shares: ``way`` (its number in :data:`WAYS`), ``cycle`` (from the end of a trial to the end of the next) and
``cpu``, the CPU time of the main thread meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from verifier.core.observation import ProcessReport
from verifier.execution.runner import TrialRunner
from verifier.torch_internals.recording import RedistributionRecorder

WAYS = ("nothing", "steps", "all")
_number = 0
_ended = (0.0, 0.0)


def way_of(number: int) -> int:
    """Return which of :data:`WAYS` the trial with this number is run in.

    >>> [way_of(number) for number in range(9)]
    [0, 1, 2, 1, 2, 0, 2, 0, 1]
    """
    return (number + number // len(WAYS)) % len(WAYS)


def _install() -> None:
    original, recording = TrialRunner.run, RedistributionRecorder.recording
    chosen = 0

    @contextlib.contextmanager
    def chosen_recording(self: RedistributionRecorder) -> Iterator[RedistributionRecorder]:
        if WAYS[chosen] == "nothing":
            yield self
        else:
            with recording(self):
                yield self

    def run(self: Any, *args: Any) -> ProcessReport:
        nonlocal chosen
        global _number, _ended
        chosen = way_of(_number)
        _number += 1
        report = original(self, *args)
        now = (time.perf_counter(), time.thread_time())
        more = (("way", float(chosen)), ("cycle", now[0] - _ended[0]), ("cpu", now[1] - _ended[1]))
        _ended = now
        return replace(report, seconds=(*report.seconds, *more))

    def measures(self: RedistributionRecorder) -> bool:
        return self._measures and WAYS[chosen] == "all"  # type: ignore[attr-defined,no-any-return]

    def set_measures(self: RedistributionRecorder, value: bool) -> None:
        self._measures = value  # type: ignore[attr-defined]

    RedistributionRecorder.recording = chosen_recording  # type: ignore[method-assign]
    RedistributionRecorder.measures = property(measures, set_measures)  # type: ignore[assignment]
    TrialRunner.run = run  # type: ignore[assignment]


if __name__ != "__main__":
    _install()
