"""A pool of processes that run trials: started once, fed in batches, mended after a fault.

A rank that raises while others wait for it, a hang and a death each end only one trial. The controller decides how the
trial ended. It sees which ranks have reported, raised or died, and the phase of each in a byte of shared memory.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import cast

from verifier.core.case import MeshSpec, Trial
from verifier.core.observation import Fate, Observation, ProcessReport
from verifier.core.verdict import Phase
from verifier.execution.imports import is_importing
from verifier.execution.packing import pack
from verifier.meshes.crew import Crew, PoolKey
from verifier.meshes.flight import Flight, Hangs, Terms
from verifier.meshes.processes import Gone, PoolError, Starter
from verifier.meshes.tasks import Task, TaskOutcome
from verifier.processes.limits import is_out_of_memory, memory_note

__all__ = ["Pool", "PoolSet", "Stopped"]

_log = logging.getLogger(__name__)
_BROKEN_MEMORY = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGSEGV})
"""What ends a process that finds its memory broken."""
_NAP = 0.006
"""Seconds for which reports gather: waking the controller for each one takes a processor from the ranks each time."""
_STOP_LOOK = 0.25
"""Seconds between two looks at whether to stop."""


class Stopped(Exception):  # noqa: N818 - an event, not an error
    """Another thread has called :meth:`PoolSet.stop`."""


class Pool:
    """Processes that run trials on any mesh of one world size.

    Parameters
    ----------
    key
        World size, backend and device; ``simulated`` is one process, the others are one per rank.
    imports
        Modules and files to run in every process first. The processes also import what defines the rules that this
        process has registered.
    trial_limit
        Seconds after which a trial is a hang, if no rank computes. Ranks that compute, on a busy machine or because
        DTensor plans much, get this many CPU seconds within ten times the limit; a trial that still computes is slow.
    grace
        Seconds that ranks get to reach the end of their phase after the last other rank has raised. They get more if
        all of these refused: otherwise a rank that is late to refuse, on a busy machine, would look like a crash.
    on_restart
        Called after the ranks were mended, with the reason and the seconds that mending took.
    memory_limit
        Bytes that a rank may map on top of what it has when it starts; beyond that, allocations fail. None for no
        limit.
    starter
        Starts the processes, with the same ``imports`` and ``memory_limit``; by default on this machine.
    imported_here
        Whether this process has run ``imports``, too. If so, ranks with other rules are an error.
    hangs
        The hangs of trials before, also of other pools: trials that hang in the same way are not waited for as long.
        Without them each hang takes its whole limit.

    Attributes
    ----------
    restarts
        How often the ranks had to be mended.
    stop
        Another thread sets it to have :meth:`run` raise Stopped; then only :meth:`close` is possible.

    Raises
    ------
    PoolError
        From :meth:`run`, if the processes do not start.
    RulesNotInRanks
        A PoolError: the ranks cannot have a rule that this process has registered, or they have another one.
    """

    def __init__(
        self,
        key: PoolKey,
        imports: Sequence[str] = (),
        trial_limit: float = 20.0,
        grace: float = 0.25,
        on_restart: Callable[[str, float], None] | None = None,
        memory_limit: int | None = None,
        starter: Starter | None = None,
        imported_here: bool = False,
        hangs: Hangs | None = None,
    ) -> None:
        self.key = key
        self.hangs = hangs
        self.trial_limit = trial_limit
        self.grace = grace
        self.on_restart = on_restart
        self.memory_limit = memory_limit
        self.restarts = 0
        self.stop = threading.Event()
        self._starter = starter or Starter(imports, memory_limit, imported_here=imported_here)
        self._crew = Crew(key, self._starter)
        self._engaged = False
        self._lost: set[int] = set()
        self._retried: int | None = None

    @property
    def size(self) -> int:
        """Number of processes."""
        return self._crew.size

    @property
    def imports(self) -> tuple[str, ...]:
        """Everything that the processes have imported: the given imports, and those added after the start."""
        return (*self._starter.imports, *self._crew.brought)

    @property
    def pids(self) -> list[int]:
        """Process ids, in order of rank; empty before the first trial."""
        return [process.pid for process in self._crew.processes]

    @property
    def replaced(self) -> int:
        """How many processes have taken the place of another one."""
        return self._crew.replaced

    def start(self, also: Sequence[str] = ()) -> None:
        """Start the processes if they are not running; :meth:`run` does this, too.

        Processes that lack rules which this process has by now are started again.

        Parameters
        ----------
        also
            Modules and files that they run from now on, in addition to the ``imports``.

        Raises
        ------
        PoolError
            If they do not start.
        """
        if is_importing():  # a rank that runs it would start ranks in turn, without end
            raise PoolError("a file that is imported starts ranks; have it do so under if __name__ == '__main__'")
        if self._crew.start(also):
            self._engaged = False

    def close(self) -> None:
        """End all processes; the next :meth:`run` starts new ones."""
        self._crew.close()
        self._engaged = False

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------------- the trials
    def run(self, trials: Sequence[Trial], *, fresh: bool = False) -> Iterator[Observation]:
        """Yield the observation of each trial, in order, whatever happens to the processes meanwhile.

        Parameters
        ----------
        fresh
            Empty DTensor's caches first, and give each rank its own hash seed, so that earlier trials have no effect.

        Raises
        ------
        ValueError
            If a trial's mesh has another world size, backend or device than the pool.
        """
        for trial in trials:
            if PoolKey.of(trial.mesh) != self.key:
                raise ValueError(f"mesh {trial.mesh} does not fit a pool of {self.key}")
        if not trials:
            return
        self.start()
        if self._engaged:  # the iterator of an earlier call was left early, and its trials may still be running
            self._crew.mend()
        self._engaged = True
        self._retried = None
        done = 0
        while done < len(trials):
            self._replace_dead()
            for observation in self._fly(trials, done, fresh):
                done += 1
                if observation.fate is not Fate.COMPLETED:
                    self._recover(f"{observation.fate}: {observation.detail}")
                elif self._out_of_step(observation):
                    self._crew.mend(self._lost)
                yield observation
        self._engaged = False

    def call(self, task: Task) -> TaskOutcome:
        """Have every rank call the function of ``task``, and return the outcome, whatever happens to the processes.

        Raises
        ------
        ValueError
            If the mesh has another world size, backend or device than the pool, or its ranks are simulated.
        """
        if PoolKey.of(task.mesh) != self.key:
            raise ValueError(f"mesh {task.mesh} does not fit a pool of {self.key}")
        if self.key.backend == "simulated":
            raise ValueError(f"mesh {task.mesh}: a function that ranks call needs a process for each of them")
        self.start()
        if self._engaged:
            self._crew.mend()
        self._engaged = True
        self._retried = None
        observations: list[Observation] = []
        while not observations:
            self._replace_dead()
            observations += self._fly([task], 0)
        (observation,) = observations
        raised = tuple(report.raised if report is not None else None for report in observation.reports)
        if observation.fate is not Fate.COMPLETED or any(raised):  # collectives that a rank had begun may still run
            self._recover(f"{task.call}: {observation.fate}: {observation.detail or 'raised'}")
        self._engaged = False
        returned = tuple(report.returned if report is not None else None for report in observation.reports)
        return TaskOutcome(observation.fate, returned, raised, observation.detail, observation.seconds)

    def _out_of_step(self, observation: Observation) -> bool:
        """Return whether the next agreements or collectives of the ranks would not pair up.

        Agreements do not if some ranks raised in a phase that no agreement ends. Collectives do not if some ranks have
        begun more of them than others: where one rank raises, another may begin a collective and not wait for it.
        """
        reports = [report for report in observation.reports if report is not None]
        raised = [report.raised.phase for report in reports if report.raised]
        exchanged = {Phase.FORWARD, Phase.BACKWARD}
        unfinished = 0 < len(raised) < self.size and not exchanged.issuperset(raised)
        return unfinished or len({report.issued for report in reports}) > 1

    def _replace_dead(self) -> None:
        """Replace processes that ended while they were idle, which no trial is blamed for."""
        self._lost = {index for index, process in enumerate(self._crew.processes) if not process.running}
        if self._lost:
            self._recover(f"while idle: {self._who_died(sorted(self._lost))}")

    def _recover(self, reason: str) -> None:
        """Make the ranks usable after a fault, with as few new processes as possible.

        What wrote where it should not in one process has run in all of them, and another one may die of it later.
        """
        started, replaced = time.monotonic(), self._crew.replaced
        broken = any(self._crew.processes[index].signal() in _BROKEN_MEMORY for index in self._lost)
        self._crew.mend(range(self.size) if broken else self._lost)
        self._lost = set()
        seconds = time.monotonic() - started
        self.restarts += 1
        new = self._crew.replaced - replaced
        _log.info("ranks mended in %.2f s with %d new processes after %s", seconds, new, reason)
        if self.on_restart is not None:
            self.on_restart(reason, seconds)

    def _fly(self, trials: Sequence[Trial] | Sequence[Task], first: int, fresh: bool = False) -> Iterator[Observation]:
        """Run ``trials[first:]`` up to and including the first one after which the ranks need mending.

        A trial yields nothing if a process ended before it began the trial: the trial is then run once more.
        """
        message = pack(("fresh batch" if fresh else "batch", list(enumerate(trials[first:], first))))
        self._lost = lost = self._give_out(message)
        processes = enumerate(self._crew.processes)
        waiting = {process.connection: index for index, process in processes if index not in lost}
        terms = Terms(
            self.size, self.trial_limit, self.grace, self.key.device == "cpu", self._computed, self.hangs,
            lambda: self._states(flight),
        )  # fmt: skip
        flights = {number: Flight(trials[number], terms) for number in range(first, len(trials))}
        for number in range(first, len(trials)):
            flight, silent = flights[number], False
            flight.begin()
            while (fate := flight.fate(lost, silent)) is None:
                until = min(flight.started + flight.limit, flight.grace_until)
                silent = not self._receive(flights, number, waiting, until)
            dead = sorted(lost - flight.reports.keys())
            if fate is Fate.DIED and dead and self._may_retry(number, dead):
                self._recover(f"between trials: {self._who_died(dead)}")
                return
            observation = self._ended(flight, fate, dead or sorted(lost))
            if fate is Fate.HANG and self.hangs is not None and isinstance(flight.trial, Trial):
                self.hangs.note(flight.trial.case.op, self._states(flight))
            yield observation
            if fate is not Fate.COMPLETED or self._out_of_step(observation):
                return
            del flights[number]

    def _receive(
        self, flights: Mapping[int, Flight], number: int, waiting: dict[Connection, int], until: float
    ) -> bool:
        """Wait for messages, take them in, and return whether there were any.

        ``waiting`` has the ranks that may still send something, by connection; ranks that are gone are removed.
        """
        if number + 1 in flights and not wait(list(waiting), 0):
            time.sleep(_NAP)  # the ranks are at the next trial already
        ready = self._await(list(waiting), until)
        for connection in ready:
            index = waiting[connection]
            try:
                message = self._crew.processes[index].receive()
            except Gone:
                self._lost.add(index)
                del waiting[connection]
                continue
            if message is None:
                continue
            kind, about, payload = message
            if kind not in ("report", "raised"):
                raise PoolError(f"process {index} failed: {payload}")
            flights[about].take(index, kind, cast(ProcessReport, payload))
        return bool(ready)

    def _await(self, connections: Sequence[Connection], until: float) -> list[Connection]:
        """Return the connections with messages; none if none comes until then."""
        while True:
            if self.stop.is_set():
                raise Stopped
            left = max(0.0, until - time.monotonic())
            ready = wait(connections, min(left, _STOP_LOOK))
            if ready or left <= _STOP_LOOK:
                return cast(list[Connection], ready)

    def _give_out(self, message: bytes) -> set[int]:
        """Send ``message`` to all processes and return the indices of the processes that are gone."""
        lost = set()
        for index, process in enumerate(self._crew.processes):
            try:
                process.send_packed(message)
            except Gone:
                process.kill()  # it may have stopped reading in the middle of the message
                lost.add(index)
        return lost

    def _may_retry(self, number: int, lost: Sequence[int]) -> bool:
        """Return whether the ranks that died had not begun the trial, so that it is not to blame; once per trial."""
        if self._retried == number or any(self._crew.processes[index].phase != "idle" for index in lost):
            return False
        self._retried = number
        return True

    def _ended(self, flight: Flight, fate: Fate, dead: Sequence[int]) -> Observation:
        """Return the observation of a trial that has ended; ``dead`` are the ranks that died, if its fate is DIED."""
        reports = tuple(flight.reports.get(index) or flight.raised.get(index) for index in range(self.size))
        if fate is Fate.COMPLETED:
            detail = ""
        else:
            detail = self._who_died(dead) if fate is Fate.DIED else self._who_waits(flight)
        trial = cast(Trial, flight.trial)  # a task's comes back as a TaskOutcome, which does not name it
        ended = [self._crew.processes[index] for index in dead] if fate is Fate.DIED else []
        return Observation(
            trial, fate, reports, detail, time.monotonic() - flight.started,
            signals=tuple(process.signal() for process in ended),
            out_of_memory=self.memory_limit is not None and any(is_out_of_memory(one.tail()) for one in ended),
        )  # fmt: skip

    def _computed(self) -> list[float]:
        return [process.computed for process in self._crew.processes]

    def _who_died(self, lost: Sequence[int]) -> str:
        texts = []
        for index in lost:
            process = self._crew.processes[index]
            ending, tail = process.ending(), process.tail()
            note = memory_note(tail, self.memory_limit)
            texts.append(f"{note}rank {index} ended with {ending} in {process.phase}" + (f": {tail}" if tail else ""))
        return "; ".join(texts)

    def _states(self, flight: Flight) -> dict[str, list[int]]:
        """Return the ranks by their states, such as ``in forward``, ``raised IndexError in forward`` and ``done``."""
        by_state: dict[str, list[int]] = {}
        for index, process in enumerate(self._crew.processes):
            if index in flight.raised:
                raised = flight.raised[index].raised
                assert raised is not None
                state = f"raised {raised.type} in {raised.phase}"
            elif index in flight.reports:
                state = "done"
            else:
                state = f"in {process.phase}"
            by_state.setdefault(state, []).append(index)
        return by_state

    def _who_waits(self, flight: Flight) -> str:
        """Return where each rank is: ``ranks 0, 2 in forward, rank 1 raised IndexError``."""
        limit = flight.patience if flight.raised else flight.waited
        parts = [
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {state}"
            for state, ranks in self._states(flight).items()
        ]
        return f"after {limit:g} s: {', '.join(parts)}"


class PoolSet:
    """The pools of a run, at most ``keep`` of them alive at a time.

    Parameters
    ----------
    make
        Makes a pool for a key, without starting it.
    on_restart
        Called after the ranks of a mesh were mended, with the reason and the seconds that mending took. It may be
        replaced at any time.
    """

    def __init__(
        self,
        make: Callable[[PoolKey], Pool],
        keep: int = 2,
        on_restart: Callable[[MeshSpec, str, float], None] | None = None,
    ) -> None:
        self._make = make
        self._keep = keep
        self.on_restart = on_restart
        self._pools: dict[PoolKey, Pool] = {}
        self._stop = threading.Event()

    def of(self, mesh: MeshSpec) -> Pool:
        """Return the pool for ``mesh``; if there are too many pools, close the one used longest ago."""
        key = PoolKey.of(mesh)
        pool = self._pools.pop(key, None) or self._made(key)
        self._pools[key] = pool
        while len(self._pools) > self._keep:
            self._pools.pop(next(iter(self._pools))).close()
        return pool

    def _made(self, key: PoolKey) -> Pool:
        pool = self._make(key)
        pool.stop = self._stop
        if self.on_restart is not None:
            mesh = MeshSpec((key.world_size,), key.backend, key.device)  # type: ignore[arg-type]
            pool.on_restart = lambda reason, seconds: self.on_restart and self.on_restart(mesh, reason, seconds)
        return pool

    def run_alone(self, trial: Trial) -> Observation:
        """Run one trial with DTensor's caches empty."""
        (observation,) = self.of(trial.mesh).run([trial], fresh=True)
        return observation

    def stop(self) -> None:
        """Have a trial that another thread runs end with Stopped; then only :meth:`close` is possible."""
        self._stop.set()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
