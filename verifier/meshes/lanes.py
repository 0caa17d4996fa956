"""Lanes: sets of pools side by side, so that the waiting in one trial hides behind the work of another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from verifier.core.case import Trial
from verifier.core.observation import Observation
from verifier.meshes.pool import PoolSet

__all__ = ["Lanes"]

Item = TypeVar("Item")
Result = TypeVar("Result")
Run = Callable[[Trial], Observation]


class _Stopped(Exception):  # noqa: N818 - an event: another lane has failed, or the user has interrupted
    """This lane runs no further trial."""


class Lanes:
    """Runs trials on several sets of pools at a time.

    Each trial runs alone, with DTensor's caches empty, so its observation does not depend on the number of lanes.

    Parameters
    ----------
    make
        Makes the pools of a lane, without starting any.
    count
        The most lanes.
    """

    def __init__(self, make: Callable[[], PoolSet], count: int) -> None:
        assert count >= 1, f"{count} lanes"
        self._lanes = [make() for _ in range(count)]

    @property
    def first(self) -> PoolSet:
        """The pools of the first lane; nothing else may use them during :meth:`map`."""
        return self._lanes[0]

    def map(self, function: Callable[[Run, Item], Result], items: Sequence[Item]) -> list[Result]:
        """Return ``function(run, item)`` of each item, in order; each call gets the pools of a lane for ``run``.

        Threads call the function. An exception of a call, or a Ctrl-C, ends the other calls before their next trial.
        """
        stopped = threading.Event()
        free: queue.SimpleQueue[PoolSet] = queue.SimpleQueue()
        lanes = self._lanes[: max(1, len(items))]
        for lane in lanes:
            free.put(lane)

        def call(item: Item) -> Result:
            lane = free.get()

            def run(trial: Trial) -> Observation:
                if stopped.is_set():
                    raise _Stopped
                return lane.run_alone(trial)

            try:
                return function(run, item)
            finally:
                free.put(lane)

        with ThreadPoolExecutor(len(lanes), "lane") as threads:
            futures = [threads.submit(call, item) for item in items]
            try:
                return [future.result() for future in futures]
            finally:
                stopped.set()
                for future in futures:
                    future.cancel()

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
