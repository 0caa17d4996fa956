"""Tries blocks of cases on several sets of pools at a time, and tells their outcomes in the order of the cases.

Cases do not depend on outcomes, so they are drawn ahead. Each lane is a thread with pools of its own. What is told, in
which order, and which trials are skipped is the same for any number of lanes.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from verifier.campaign.costs import Costs
from verifier.campaign.history import Answer, Past
from verifier.campaign.outcomes import Outcomes
from verifier.campaign.trying import BlockRun, PlannedCase
from verifier.core.case import MeshSpec
from verifier.events import Event, Listener, PoolRestarted
from verifier.meshes.pool import PoolSet

__all__ = ["Blocks"]

_MOST_CASES = 8
"""The most cases of a block of a family that is not broad. Calls in one block may make each other fail."""
_AHEAD = 3
"""Blocks for each lane that may be given out: while one hangs, the others go on."""
_STOP_LIMIT = 10.0
"""Seconds that lanes get to end; processes that are starting cannot be interrupted."""

_Told = PlannedCase | Event | Answer
"""What comes of a block, in order. Each case comes before what comes of it."""


@dataclass(eq=False)
class _Block:
    """Cases that a lane tries: ``costs`` is what decides about their trials, from all trials before the block."""

    number: int
    cases: tuple[PlannedCase, ...]
    costs: Costs
    told: queue.SimpleQueue[_Told | BaseException | None] = field(default_factory=queue.SimpleQueue)
    given_up: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def outcomes(self) -> Iterator[_Told]:
        """Yield what comes of the block, waiting for it; what its lane raised is raised here."""
        while (told := self.told.get()) is not None:
            if isinstance(told, BaseException):
                raise told
            yield told


_Todo = queue.PriorityQueue[tuple[int, int, _Block | None]]
"""The number of a block, a number that no other entry has, and the block; None ends a lane."""


class _Lane(threading.Thread):
    """Tries the blocks in ``todo`` on its own pools, until None comes."""

    def __init__(self, pools: PoolSet, todo: _Todo, past: Past, clock: Callable[[], float]) -> None:
        super().__init__(name="lane", daemon=True)
        self._pools, self._todo, self._past, self._clock = pools, todo, past, clock

    def run(self) -> None:
        while (block := self._todo.get()[-1]) is not None:
            kept, self._pools.on_restart = self._pools.on_restart, _restarts_told(block.told.put)
            try:
                self._try(block)
            except BaseException as error:  # noqa: BLE001 - is raised where the outcomes are read
                block.told.put(error)
            finally:
                self._pools.on_restart = kept
                block.ended.set()
                block.told.put(None)

    def _try(self, block: _Block) -> None:
        run = BlockRun(self._pools, self._past, block.costs.of(), self._clock)
        for case in block.cases:
            block.told.put(case)
            for told in run.of(case):
                if block.given_up.is_set():
                    return
                block.told.put(told)


def _restarts_told(tell: Callable[[PoolRestarted], None]) -> Callable[[MeshSpec, str, float], None]:
    return lambda mesh, reason, seconds: tell(PoolRestarted(mesh, reason, seconds))


class Blocks:
    """Takes cases and events, tries the cases, and tells everything in the order in which it was given.

    Parameters
    ----------
    pools
        A set for each lane. If there is one, cases are tried when they are added, in the caller's thread.
    outcomes
        Takes the answers.
    """

    def __init__(
        self, pools: Sequence[PoolSet], past: Past, outcomes: Outcomes, emit: Listener, clock: Callable[[], float]
    ) -> None:
        self._pools, self._past, self._outcomes, self._emit, self._clock = pools, past, outcomes, emit, clock
        self._size = 1
        self._cases: list[PlannedCase] = []
        """The cases of the block that is not full yet."""
        self._run: BlockRun | None = None
        """Tries this block, if there is one lane."""
        self._given: deque[_Block | Event] = deque()
        self._todo: _Todo = queue.PriorityQueue()
        self._entries = itertools.count()
        self._blocks = itertools.count()
        self._lanes: list[_Lane] = []

    def begin_unit(self, most: int, whole: bool) -> None:
        """Begin ``most`` cases at most of other ops, in blocks of equal size, or as a ``whole`` block."""
        self._end_block()
        count = 1 if whole else -(-most // _MOST_CASES)
        self._size = -(-most // count)

    def tell(self, event: Event) -> None:
        """Tell an event after all cases before it."""
        self._end_block()
        self._given.append(event)
        self._settle(_AHEAD * len(self._lanes))

    def add(self, case: PlannedCase) -> None:
        """Try a case, now or later."""
        self._cases.append(case)
        if len(self._pools) == 1:
            self._run = self._run or BlockRun(self._pools[0], self._past, self._outcomes.costs.of(), self._clock)
            self._take([case])
            self._take(self._run.of(case), case)
        if len(self._cases) == self._size:
            self._end_block()
        self._settle(_AHEAD * len(self._lanes))

    def finish(self) -> None:
        """Wait for all cases."""
        self._end_block()
        self._settle(0)

    def close(self) -> None:
        """End the lanes, whatever they do."""
        lanes, self._lanes = self._lanes, []
        for pools in self._pools if lanes else ():
            pools.stop()
        for _ in lanes:
            self._todo.put((-1, next(self._entries), None))
        for lane in lanes:
            lane.join(_STOP_LIMIT)

    # ----------------------------------------------------------------------------------------------------------- blocks
    def _end_block(self) -> None:
        cases, self._cases, self._run = tuple(self._cases), [], None
        if cases and len(self._pools) > 1:
            self._given.append(self._give_out(next(self._blocks), cases))

    def _give_out(self, number: int, cases: tuple[PlannedCase, ...]) -> _Block:
        """Return a block of cases that a lane tries as soon as one is free, the first blocks first."""
        if not self._lanes:
            self._lanes = [_Lane(pools, self._todo, self._past, self._clock) for pools in self._pools]
            for lane in self._lanes:
                lane.start()
        block = _Block(number, cases, self._costs(cases))
        self._todo.put((number, next(self._entries), block))
        return block

    def _costs(self, cases: Iterable[PlannedCase]) -> Costs:
        return self._outcomes.costs.of({case.started.case.op for case in cases})

    def _settle(self, most: int) -> None:
        """Tell what comes of all but the last ``most`` blocks, waiting for it, and then of all that have ended."""
        blocks = sum(isinstance(one, _Block) for one in self._given)
        while self._given:
            first = self._given[0]
            if isinstance(first, _Block):
                if blocks <= most and not first.ended.is_set():
                    return
                blocks -= 1
                self._take(first.outcomes())
                self._given.popleft()
                self._renew()
            else:
                self._given.popleft()
                self._emit(first)

    def _renew(self) -> None:
        """Give out the blocks again for which more trials, or fewer, are unaffordable by now."""
        for number, block in enumerate(self._given):
            if isinstance(block, _Block) and block.costs != self._costs(block.cases):
                block.given_up.set()
                self._given[number] = self._give_out(block.number, block.cases)

    def _take(self, told: Iterable[_Told], case: PlannedCase | None = None) -> None:
        """Judge answers and tell events; ``case`` is what they come of."""
        for one in told:
            match one:
                case PlannedCase():
                    case = one
                    self._emit(case.started)
                    for event in case.announced:
                        self._emit(event)
                case Answer():
                    assert case is not None
                    self._outcomes.take(one, case.drawn, case.reference)
                case _:
                    self._emit(one)
