"""Worker processes that survive native crashes: a segmentation fault, an abort or a hang costs one position.

Level 1 runs native kernels on hostile data, and some of them corrupt memory. So a worker notes in shared memory, before
each step, which one it is about to take; when it dies, the controller reads the note, starts another worker and has it
go on after what has been received, without the step that was fatal. What the steps are is the task's business.
"""

from __future__ import annotations

import pickle
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Generic, TypeAlias, TypeVar

from verifier.core.errors import ReportedError
from verifier.core.wording import plural
from verifier.execution.imports import run_imports
from verifier.rules.campaign.worker_process import Flight, InFlight, Position, Task, WorkerProcess

__all__ = [
    "Died",
    "Failed",
    "Finished",
    "GaveUp",
    "InFlight",
    "Outcome",
    "Part",
    "Position",
    "Task",
    "WorkerError",
    "WorkerSet",
]

MEMORY_LIMIT = 2 << 30

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class _About:
    """The index of an item, and the number of its parts that were received before."""

    item: int
    ordinal: int


@dataclass(frozen=True)
class Part(_About, Generic[ResultT]):
    """A result that the task yielded."""

    result: ResultT


@dataclass(frozen=True)
class Finished(_About):
    """All parts of an item have been yielded; ``ordinal`` is their number."""


@dataclass(frozen=True)
class Died(_About):
    """A position killed its worker, and the item went on without it.

    Parameters
    ----------
    position
        As the task noted it.
    how
        Such as ``SIGSEGV``, ``exit status 1`` or ``no progress for 60 s``.
    detail
        The last line that the worker wrote to stdout or stderr in this item, such as ``double free or corruption``:
        what glibc notices first of corrupted memory may change from run to run, so compare the other fields only.
    """

    position: Position
    how: str
    detail: str


@dataclass(frozen=True)
class GaveUp(_About):
    """An item was left unfinished: its worker died with nothing in flight, or the item killed too many."""

    why: str
    detail: str


@dataclass(frozen=True)
class Failed(_About):
    """An item was left unfinished: the task raised an exception."""

    traceback: str


Outcome: TypeAlias = Part[ResultT] | Finished | Died | GaveUp | Failed


class WorkerError(ReportedError):
    """A worker could not be started."""


class WorkerSet:
    """Workers that are started once and used for any number of runs.

    Parameters
    ----------
    jobs
        Number of workers; with 0, items run in this process, without protection and limits: for tests and debuggers.
    imports
        Modules and files to run in every worker first, as for :func:`verifier.execution.imports.run_imports`.
    stall_limit
        Seconds without a note of progress after which a worker that has an item is killed.
    max_deaths_per_item
        An item that has killed more workers is given up.
    memory_limit
        Bytes of address space that a worker may map on top of what it has when it is ready; beyond that, allocations
        raise. None for no limit, as CUDA needs, which reserves far more than it uses.
    confirm
        Whether a death counts only in a worker that has had no item before. Corrupted memory often kills later than
        it is corrupted; without this, the innocent item that happened to come next would be charged, another one for
        each number of jobs. A death that does not happen again costs the start of a worker and is not reported.
    prepare
        A function of a module that every worker calls before it is ready.
    alone
        Whether the workers run ops by torch's own rules, and not by those of this process; for at least one job.

    Attributes
    ----------
    deaths
        Number of workers that have died, those included whose death was not reported.

    Raises
    ------
    ValueError
        If ``jobs`` is negative.
    """

    def __init__(
        self,
        jobs: int,
        imports: Sequence[str] = (),
        stall_limit: float = 60.0,
        max_deaths_per_item: int = 20,
        memory_limit: int | None = MEMORY_LIMIT,
        confirm: bool = True,
        prepare: Callable[[], None] | None = None,
        alone: bool = False,
    ) -> None:
        if jobs < 0:
            raise ValueError(f"jobs={jobs}, but should be 0 (in this process) or the number of workers")
        self.jobs = jobs
        self.imports = tuple(imports)
        self.stall_limit = stall_limit
        self.max_deaths_per_item = max_deaths_per_item
        self.memory_limit = memory_limit
        self.confirm = confirm
        self.prepare = prepare
        self.alone = alone
        self.deaths = 0
        self._workers: list[WorkerProcess] = []
        self._running = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that have been started."""
        return [worker.pid for worker in self._workers]

    def __enter__(self) -> WorkerSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers at once; the next run starts new ones."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill_for("closed")
        for worker in workers:
            worker.close()

    def start(self) -> None:
        """Start all workers and wait until they are ready, so that a run can be timed; :meth:`run` needs no start.

        Raises
        ------
        WorkerError
            If a worker ends before it is ready, as when a module cannot be imported.
        """
        if self.jobs == 0:
            run_imports(self.imports)
        while len(self._workers) < self.jobs or not all(worker.ready for worker in self._workers):
            self._hire(self.jobs)
            for _ in self._listen():
                raise AssertionError("a worker without an item sent an outcome")

    def run(self, items: Sequence[ItemT], task: Task[ItemT, ResultT]) -> Iterator[Outcome[ResultT]]:
        """Yield outcomes as they come; those of an item in order, the last of them Finished, GaveUp or Failed.

        No more workers are started than there are
        items. If the iterator is closed early, workers with an unfinished item are killed.

        Raises
        ------
        RuntimeError
            If an earlier run has neither ended nor been closed.
        WorkerError
            If a worker cannot be started.
        """
        if self._running:
            raise RuntimeError("workers are busy: exhaust or close the iterator of the run before")
        if self.jobs == 0:
            run_imports(self.imports)
            yield from _run_here(items, task)
            return
        self._running = True
        todo = deque(range(len(items)))
        try:
            while todo or any(worker.flight for worker in self._workers):
                for worker in self._workers:
                    if worker.ready and worker.flight is None and todo:
                        worker.give(Flight(number := todo.popleft()), items[number], task)
                    elif worker.ready and worker.flight is not None and worker.served == 0:  # takes a dead one's place
                        worker.give(worker.flight, items[worker.flight.item], task)
                busy = sum(worker.flight is not None for worker in self._workers)
                self._hire(min(self.jobs, busy + len(todo)))
                yield from self._listen()
        finally:
            self._running = False
            for worker in [worker for worker in self._workers if worker.flight is not None]:
                self._workers.remove(worker)
                worker.close()

    def _hire(self, number: int) -> None:
        """Start workers until there are ``number``."""
        while len(self._workers) < number:
            self._workers.append(WorkerProcess(self.imports, self.memory_limit, self.prepare, self.alone))

    def _listen(self) -> Iterator[Outcome[Any]]:
        """Wait for messages for a while, and yield the outcomes that they are."""
        patience = min(5.0, max(0.05, self.stall_limit / 10))
        ready = wait([worker.connection for worker in self._workers], patience)
        for worker in list(self._workers):
            if worker.connection in ready:
                yield from self._read(worker)
            else:  # one whose message has not been read may be waiting for that
                worker.look(self.stall_limit)

    def _read(self, worker: WorkerProcess) -> Iterator[Outcome[Any]]:
        try:
            message = worker.connection.recv_bytes()
        except (EOFError, OSError):  # the latter within a message
            yield from self._bury(worker, worker.in_flight.position)
            return
        try:
            kind, content = pickle.loads(message)
        except Exception as error:  # noqa: BLE001 - corrupted memory may make anything of a result
            worker.kill_for(f"a result that cannot be read ({type(error).__name__}: {error})")
            yield from self._bury(worker, None)  # what it is at now is not where that came from
            return
        worker.alive()
        flight = worker.flight
        if kind == "ready":
            worker.ready = True
            return
        assert flight is not None, f"a worker without an item sent {kind}"
        about = flight.item, flight.received
        if kind == "part":
            flight.received += 1
            yield Part(*about, content)
        else:
            worker.flight = None
            yield Finished(*about) if kind == "finished" else Failed(*about, content)

    def _bury(self, worker: WorkerProcess, position: Position | None) -> Iterator[Outcome[Any]]:
        """Draw the conclusions from the end of a worker; one that was in the middle of an item is replaced."""
        self.deaths += 1
        how, detail, flight, began = worker.ending(), worker.last_line(), worker.flight, worker.began
        self._workers.remove(worker)
        worker.close()
        if not worker.ready:
            raise WorkerError(f"a worker did not start: {how}: {detail}")
        if flight is None:
            return
        if began and (worker.served == 1 or not self.confirm):
            flight.deaths += 1
            if position is not None:
                flight.skip.add(position)
                yield Died(flight.item, flight.received, position, how, detail)
            if position is None or flight.deaths > self.max_deaths_per_item:
                why = (
                    f"{how} with nothing in flight" if position is None else f"killed {plural(flight.deaths, 'worker')}"
                )
                yield GaveUp(flight.item, flight.received, why, detail)
                return
        replacement = WorkerProcess(self.imports, self.memory_limit, self.prepare, self.alone)
        replacement.flight = flight
        self._workers.append(replacement)


def _run_here(items: Sequence[ItemT], task: Task[ItemT, ResultT]) -> Iterator[Outcome[ResultT]]:
    in_flight = InFlight(bytearray(InFlight.SIZE))
    for number, item in enumerate(items):
        received = 0
        try:
            for result in task(item, in_flight, frozenset(), 0):
                yield Part(number, received, result)
                received += 1
        except Exception:  # noqa: BLE001 - as at the boundary of a process
            yield Failed(number, received, traceback.format_exc())
        else:
            yield Finished(number, received)
        in_flight.leave()
