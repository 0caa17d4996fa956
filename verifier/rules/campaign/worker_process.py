"""One worker process: the controller's end, the program that runs in it, and the note that outlives it."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import pickle
import struct
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from typing import Protocol, TypeVar

import torch

from verifier.execution.imports import follow, rules_of_the_user, run_imports
from verifier.processes.child import Child, begin
from verifier.processes.limits import limit_memory
from verifier.processes.scripts import TORCH_ALONE
from verifier.rules.options import Position

__all__ = ["Flight", "InFlight", "Position", "Task", "WorkerProcess"]

START_LIMIT = 180.0
_TAIL = 600
_WAITING, _BUSY = 0.02, 10
"""A worker that got less than this share of a processor waits for something; one that computes gets at most so many
times the limit."""

ItemT_contra = TypeVar("ItemT_contra", contravariant=True)
ResultT_co = TypeVar("ResultT_co", covariant=True)


class InFlight:
    """Notes where a worker is, in memory that outlives it; a note takes about 0.3 µs.

    Parameters
    ----------
    memory
        At least ``InFlight.SIZE`` bytes, shared with the process that is to read the note.
    """

    _LAYOUT = struct.Struct("Q4qQ")  # progress, position, whether it holds: last, so that no torn position is believed
    SIZE = _LAYOUT.size

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self._memory = memory
        self._progress = 0
        self._pack = self._LAYOUT.pack_into

    def enter(self, position: Position) -> None:
        """Note that ``position`` is about to be run; leaves the one before."""
        self._progress += 1
        self._pack(self._memory, 0, self._progress, *position, 1)

    def leave(self) -> None:
        """Note that nothing dangerous is being run; a sign of life, too, in long stretches of that."""
        self._progress += 1
        self._pack(self._memory, 0, self._progress, 0, 0, 0, 0, 0)

    @property
    def position(self) -> Position | None:
        """What is, or was when the process died, being run; None outside :meth:`enter` and :meth:`leave`."""
        _, *position, holds = self._LAYOUT.unpack_from(self._memory)
        return (position[0], position[1], position[2], position[3]) if holds else None

    def snapshot(self) -> bytes:
        """Return the note as it is; it differs from an earlier one if there was progress in between."""
        return bytes(self._memory[: self.SIZE])


class Task(Protocol[ItemT_contra, ResultT_co]):
    """What is run in a worker: a function of a module, not ``__main__``, that yields the results of an item's parts.

    It notes each position with ``in_flight``, leaves out the positions in ``skip``, does not yield the first
    ``resume_at`` parts, which have been received, and yields the same parts in the same order whenever it is run.
    """

    def __call__(
        self, item: ItemT_contra, in_flight: InFlight, skip: frozenset[Position], resume_at: int, /
    ) -> Iterator[ResultT_co]: ...


@dataclass
class Flight:
    """An item on its way: what has come back of it so far."""

    item: int
    received: int = 0
    deaths: int = 0
    skip: set[Position] = field(default_factory=set)


class WorkerProcess:
    """The controller's end of one worker.

    Parameters
    ----------
    imports
        Modules and files that the worker runs first.
    memory_limit
        Bytes that it may map on top of what it has then.
    prepare
        A function of a module that it calls before it is ready.
    alone
        Whether it runs ops by torch's own rules, and not by those of this process.

    Attributes
    ----------
    ready
        Whether it has said that it is.
    served
        Number of items that it has been given.
    flight
        The item that it has, or is to get when it is ready.
    """

    def __init__(
        self,
        imports: Sequence[str],
        memory_limit: int | None,
        prepare: Callable[[], None] | None = None,
        alone: bool = False,
    ) -> None:
        self.connection, theirs = Pipe()
        try:
            steps = [(f"{prepare.__module__}:{prepare.__qualname__}",)] if prepare is not None else []
            environment = {**os.environ, "PYTHONHASHSEED": "0"}  # that of a rank, so that they share a fork server
            self._child = Child(__name__, theirs.fileno(), environment=environment, steps=steps, base=TORCH_ALONE)
        finally:
            theirs.close()
        self.in_flight = InFlight(self._child.memory)
        self._log_start = 0
        self._send((list(imports), memory_limit, prepare, {} if alone else rules_of_the_user()))
        self.ready = False
        self.served = 0
        self.flight: Flight | None = None
        self._killed_for = ""
        self._given = self._seen = self.in_flight.snapshot()
        self._seen_at = self._started_at = time.monotonic()
        self._computed = 0.0

    @property
    def pid(self) -> int:
        """Its process id; waits until it has started."""
        return self._child.pid

    def _send(self, content: object) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead, as the end of file is going to tell
            self.connection.send_bytes(pickle.dumps(content))

    def give(self, flight: Flight, item: object, task: object) -> None:
        """Have the worker run ``task`` on ``item``, from where ``flight`` says."""
        self.flight = flight
        self._log_start = self._child.written
        self._given = self.in_flight.snapshot()
        self.alive()
        self.served += 1
        self._send((task, item, frozenset(flight.skip), flight.received))

    @property
    def began(self) -> bool:
        """Whether the worker has set about its item, so that its death can be the item's doing."""
        return self.in_flight.snapshot() != self._given

    def alive(self) -> None:
        """Note that something has come from the worker."""
        self._seen_at, self._computed = time.monotonic(), self._child.computed

    def look(self, stall_limit: float) -> None:
        """Kill the worker if it is at work and there was no progress for too long.

        On a busy machine a worker gets little of a processor. One that computes gets ``stall_limit`` CPU seconds.
        """
        now = time.monotonic()
        seen = self.in_flight.snapshot()
        if not self.ready and now - self._started_at > START_LIMIT:
            self.kill_for(f"not ready after {START_LIMIT:g} s")
        elif not self.ready or self.flight is None or seen != self._seen:
            self._seen = seen
            self.alive()
        elif (waited := now - self._seen_at) > stall_limit:
            computed = self._child.computed - self._computed
            if not _WAITING * waited < computed < stall_limit or waited > _BUSY * stall_limit:
                self.kill_for(f"no progress for {stall_limit:g} s")

    def kill_for(self, why: str) -> None:
        """Kill the worker; what it has sent can still be received, and then the end of file."""
        self._killed_for = self._killed_for or why
        self._child.kill()

    def ending(self) -> str:
        """Return how the worker, whose end of the pipe is closed, ended."""
        ending = self._child.ending()
        return self._killed_for or ending.removeprefix("signal ")

    def last_line(self) -> str:
        """Return the last line that was written since the item was given out."""
        lines = self._child.log(self._log_start)[0][-_TAIL:].split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def close(self) -> None:
        """Kill the worker, if it lives, and release what belongs to it."""
        self._child.close()
        self.connection.close()


# ------------------------------------------------------------------------------------------------------ in the worker
def _serve(message: bytes, connection: Connection, in_flight: InFlight) -> None:
    """Run a task on an item and send what it yields."""
    in_flight.leave()  # tells the controller that the item has arrived
    try:
        task, item, skip, resume_at = pickle.loads(message)
        for result in task(item, in_flight, skip, resume_at):
            # by value: multiprocessing's own pickler would move tensors through files that die with the worker
            connection.send_bytes(pickle.dumps(("part", result)))
        last = ("finished", "")
    except Exception:  # noqa: BLE001 - the boundary of the process: it becomes an outcome
        last = ("failed", traceback.format_exc())
    in_flight.leave()
    connection.send_bytes(pickle.dumps(last))


def main() -> None:
    """Run the items that come through the connection to the controller."""
    connection, memory, _, _ = begin()
    in_flight = InFlight(memory)
    torch.set_num_threads(1)
    imports, memory_limit, prepare, rules = pickle.loads(connection.recv_bytes())
    run_imports(imports)  # an exception ends the process, and the controller quotes its last line
    if prepare is not None:
        prepare()
    follow(rules)
    gc.collect()
    gc.freeze()  # what is loaded stays, and what a check makes is seldom a cycle: collecting takes a tenth of the time
    gc.set_threshold(100_000, 50, 50)
    gc.enable()
    if memory_limit is not None:
        limit_memory(memory_limit)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the controller is gone
        connection.send_bytes(pickle.dumps(("ready", None)))
        while True:
            _serve(connection.recv_bytes(), connection, in_flight)
    os._exit(0)  # memory may be corrupted: no finalisers
