"""A pool of processes that run trials: started once, fed in batches, started anew after a fault.

A rank that raises while others wait for it, a hang and a death are each the fate of one trial. The controller decides:
it sees who has reported, who raised, who is gone, and, in a byte of shared memory per process, which phase each is in.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import IO

import msgspec
import torch
import torch.distributed as dist

from verifier.cases import Fate, MeshSpec, Observation, Phase, ProcessReport, Trial
from verifier.codec import pack, unpack
from verifier.meshes.worker import PHASE_CODES, WorkerConfig

__all__ = ["Pool", "PoolError", "PoolKey", "PoolSet"]

START_LIMIT = 180.0
REBUILD_LIMIT = 5.0
STDERR_TAIL = 600
_FOR_REFUSALS = 10
"""So many times the usual grace: one rank refuses only if all do, or nearly always."""
_PROGRAM = "from verifier.meshes.worker import main; main()"


class PoolError(RuntimeError):
    """The processes of a pool could not be started; nothing was tried."""


@dataclass(frozen=True)
class PoolKey:
    """What two meshes must share to share processes."""

    world_size: int
    backend: str
    device: str

    @classmethod
    def of(cls, mesh: MeshSpec) -> PoolKey:
        return cls(mesh.world_size, mesh.backend, mesh.device)


@dataclass
class _Process:
    popen: subprocess.Popen[bytes]
    connection: Connection
    lifeline: int
    stderr: IO[bytes]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.popen.kill()
        self.popen.wait()
        self.close()

    def close(self) -> None:
        self.connection.close()
        os.close(self.lifeline)
        self.stderr.close()

    def tail(self) -> str:
        """Return the end of what the process wrote to stderr."""
        self.stderr.seek(0, os.SEEK_END)
        self.stderr.seek(max(0, self.stderr.tell() - STDERR_TAIL))
        return self.stderr.read().decode(errors="replace").strip()


@dataclass
class _Flight:
    """One trial on its way: what has come back of it so far."""

    reports: dict[int, ProcessReport] = field(default_factory=dict)
    raised: dict[int, ProcessReport] = field(default_factory=dict)

    def patience(self, grace: float) -> float:
        """Return how long the others get after a rank has raised: longer to refuse as well, since then all do."""
        errors = [report.raised for report in self.raised.values()]
        return grace * (_FOR_REFUSALS if all(error is not None and error.refusal for error in errors) else 1)


class Pool:
    """Processes that run trials on any mesh of one world size.

    Parameters
    ----------
    key
        World size, backend and device; ``simulated`` is one process, the others are one per rank.
    imports
        Modules and files to run in every process first.
    trial_limit
        Seconds without progress after which a trial is a hang.
    grace
        Seconds that ranks get to reach the end of their phase after the last of others has raised; more if all of these
        refused, since a rank of a busy machine that is late to refuse would make a crash of it.
    on_restart
        Called with the reason and the seconds that it took after the processes were started anew.

    Raises
    ------
    PoolError
        From :meth:`run`, if the processes do not start.
    """

    def __init__(
        self,
        key: PoolKey,
        imports: Sequence[str] = (),
        trial_limit: float = 20.0,
        grace: float = 0.25,
        on_restart: Callable[[str, float], None] | None = None,
    ) -> None:
        self.key = key
        self.imports = list(imports)
        self.trial_limit = trial_limit
        self.grace = grace
        self.on_restart = on_restart
        self.restarts = 0
        self._epoch = 0
        self._processes: list[_Process] = []
        self._phases: mmap.mmap | None = None
        self._store: dist.TCPStore | None = None  # type: ignore[name-defined]

    @property
    def size(self) -> int:
        """Number of processes."""
        return 1 if self.key.backend == "simulated" else self.key.world_size

    @property
    def pids(self) -> list[int]:
        """Process ids, in order of rank; empty before the first trial."""
        return [process.popen.pid for process in self._processes]

    # ---------------------------------------------------------------------------------------------- starting and ending
    def start(self) -> None:
        """Start the processes if they are not running; :meth:`run` does so by itself."""
        if self._processes:
            return
        gpus = torch.cuda.device_count() if self.key.backend == "nccl" else self.size
        if gpus < self.size:
            raise PoolError(f"nccl needs one GPU per rank: {self.size} ranks were asked for, {gpus} GPUs are here")
        port = 0
        if self.key.backend != "simulated":
            self._store = dist.TCPStore("127.0.0.1", 0, self.size, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
            port = self._store.port
        phases_fd = os.memfd_create("phases")
        try:
            os.ftruncate(phases_fd, mmap.PAGESIZE)
            self._phases = mmap.mmap(phases_fd, 0)
            for index in range(self.size):
                self._processes.append(self._spawn(index, port, phases_fd))
        finally:
            os.close(phases_fd)
        self._await_ready()

    def _spawn(self, index: int, port: int, phases_fd: int) -> _Process:
        ours, theirs = Pipe()
        lifeline_read, lifeline_write = os.pipe()
        key = self.key
        config = WorkerConfig(
            index,
            key.world_size,
            key.backend,
            key.device,
            port,
            theirs.fileno(),
            lifeline_read,
            phases_fd,
            self.imports,
        )
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        environment = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYTHONPATH=os.pathsep.join(
            [path for path in sys.path if path] or [""]))  # fmt: skip
        popen = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, msgspec.json.encode(config).decode()],
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            pass_fds=(theirs.fileno(), lifeline_read, phases_fd),
            start_new_session=True,  # a Ctrl-C is the controller's to handle
            env=environment,
        )
        theirs.close()
        os.close(lifeline_read)
        return _Process(popen, ours, lifeline_write, stderr)

    def _await_ready(self) -> None:
        waiting = {process.connection: process for process in self._processes}
        deadline = time.monotonic() + START_LIMIT
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise PoolError(f"{len(waiting)} of {self.size} ranks did not start within {START_LIMIT:.0f} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                process = waiting.pop(connection)
                try:
                    kind, _, payload = unpack(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    kind, payload = "failed", f"ended with {_ending(process)}; {process.tail()}"
                if kind != "ready":
                    self.close()
                    raise PoolError(f"a rank did not start: {payload}")

    def close(self) -> None:
        """End all processes; the next :meth:`run` starts new ones."""
        processes, self._processes = self._processes, []
        self._epoch = 0
        for process in processes:
            process.popen.kill()
        for process in processes:
            process.kill()
        self._store = None
        if self._phases is not None:
            self._phases.close()
            self._phases = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------------- the trials
    def run(self, trials: Sequence[Trial]) -> Iterator[Observation]:
        """Yield the observation of each trial, in order, whatever happens to the processes on the way.

        Raises
        ------
        ValueError
            If a trial's mesh has another world size, backend or device than the pool.
        """
        for trial in trials:
            if PoolKey.of(trial.mesh) != self.key:
                raise ValueError(f"mesh {trial.mesh} does not fit a pool of {self.key}")
        done = 0
        while done < len(trials):
            self.start()
            for observation in self._fly(trials, done):
                done += 1
                if observation.fate is not Fate.COMPLETED:
                    self._recover(observation)
                elif self._out_of_step(observation) and not self._rebuild_groups():
                    self.close()
                yield observation

    def _out_of_step(self, observation: Observation) -> bool:
        """Return whether ranks stopped where others went on without an exchange, so that their next ones differ."""
        raised = [report.raised.phase for report in observation.reports if report is not None and report.raised]
        exchanged = {Phase.FORWARD, Phase.BACKWARD}
        return 0 < len(raised) < self.size and not exchanged.issuperset(raised)

    def _recover(self, observation: Observation) -> None:
        """Make the ranks usable after a fault: by new process groups if all processes live, else by new processes."""
        started = time.monotonic()
        if observation.fate is not Fate.STUCK or not self._rebuild_groups():
            self.close()
            self.start()
        self.restarts += 1
        if self.on_restart is not None:
            self.on_restart(f"{observation.fate}: {observation.detail}", time.monotonic() - started)

    def _rebuild_groups(self) -> bool:
        """Break off the collectives that ranks wait in and have all make new groups; return whether all did."""
        self._epoch += 1
        waiting = {process.connection: process for process in self._processes}
        try:
            for process in self._processes:
                os.write(process.lifeline, b"b")
            for process in self._processes:
                process.connection.send_bytes(pack(("rebuild", self._epoch)))
            deadline = time.monotonic() + REBUILD_LIMIT
            while waiting:
                ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
                if not ready:
                    return False
                for connection in ready:
                    assert isinstance(connection, Connection)
                    kind, _, payload = unpack(connection.recv_bytes())
                    if kind == "ready" and payload == self._epoch:  # anything else is of the trial that has ended
                        del waiting[connection]
        except (OSError, EOFError):
            return False
        return True

    def _fly(self, trials: Sequence[Trial], first: int) -> Iterator[Observation]:
        """Run ``trials[first:]`` until the first one after which the ranks need mending, that one included."""
        message = pack(("batch", list(enumerate(trials[first:], first))))
        lost: dict[Connection, int] = {}
        for index, process in enumerate(self._processes):
            try:
                process.connection.send_bytes(message)
            except (BrokenPipeError, ConnectionResetError):
                lost[process.connection] = index
        flights: dict[int, _Flight] = {number: _Flight() for number in range(first, len(trials))}
        index_of = {process.connection: index for index, process in enumerate(self._processes)}
        for number in range(first, len(trials)):
            flight = flights[number]
            started = time.monotonic()
            raised, grace_until = 0, float("inf")
            while len(flight.reports) < self.size:
                if lost:
                    yield self._ended(trials[number], flight, Fate.DIED, started, self._who_died(lost))
                    return
                if len(flight.raised) > raised:
                    raised, grace_until = len(flight.raised), time.monotonic() + flight.patience(self.grace)
                limit = min(started + self.trial_limit, grace_until)
                ready = wait(list(index_of), max(0.0, limit - time.monotonic()))
                if not ready:
                    fate = Fate.STUCK if flight.raised else Fate.HANG
                    yield self._ended(trials[number], flight, fate, started, self._who_waits(flight))
                    return
                for connection in ready:
                    assert isinstance(connection, Connection)
                    try:
                        kind, about, payload = unpack(connection.recv_bytes())
                    except (EOFError, ConnectionResetError):
                        lost[connection] = index_of[connection]
                        continue
                    if kind == "report":
                        flights[about].reports[index_of[connection]] = payload
                    elif kind == "raised":
                        flights[about].raised[index_of[connection]] = payload
                    else:
                        raise PoolError(f"process {index_of[connection]} failed: {payload}")
            observation = self._ended(trials[number], flight, Fate.COMPLETED, started, "")
            yield observation
            if self._out_of_step(observation):
                return
            del flights[number]

    def _ended(self, trial: Trial, flight: _Flight, fate: Fate, started: float, detail: str) -> Observation:
        reports: list[ProcessReport | None] = []
        for index in range(self.size):
            reports.append(flight.reports.get(index) or flight.raised.get(index))
        return Observation(trial, fate, tuple(reports), detail, time.monotonic() - started)

    def _phase(self, index: int) -> str:
        assert self._phases is not None
        return PHASE_CODES[self._phases[index]]

    def _who_died(self, lost: dict[Connection, int]) -> str:
        texts = []
        for index in lost.values():
            process = self._processes[index]
            ending = _ending(process)
            tail = process.tail()
            texts.append(f"rank {index} ended with {ending} in {self._phase(index)}" + (f": {tail}" if tail else ""))
        return "; ".join(texts)

    def _who_waits(self, flight: _Flight) -> str:
        """Return who is where: ``ranks 0, 2 in forward, rank 1 raised IndexError``."""
        by_state: dict[str, list[int]] = {}
        for index in range(self.size):
            if index in flight.raised:
                raised = flight.raised[index].raised
                assert raised is not None
                state = f"raised {raised.type} in {raised.phase}"
            elif index in flight.reports:
                state = "done"
            else:
                state = f"in {self._phase(index)}"
            by_state.setdefault(state, []).append(index)
        limit = flight.patience(self.grace) if flight.raised else self.trial_limit
        parts = [
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {state}" for state, ranks in by_state.items()
        ]
        return f"after {limit:g} s: {', '.join(parts)}"


def _ending(process: _Process) -> str:
    """Return how a process ended, as ``signal SIGKILL`` or ``exit status 1``."""
    try:
        code = process.popen.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return "a closed pipe"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


class PoolSet:
    """The pools of a run, at most ``keep`` of them alive at a time.

    Parameters
    ----------
    make
        Makes a pool for a key, without starting it.
    """

    def __init__(self, make: Callable[[PoolKey], Pool], keep: int = 2) -> None:
        self._make = make
        self._keep = keep
        self._pools: dict[PoolKey, Pool] = {}

    def of(self, mesh: MeshSpec) -> Pool:
        """Return the pool for ``mesh``; the one used longest ago is closed if there are too many."""
        key = PoolKey.of(mesh)
        pool = self._pools.pop(key, None) or self._make(key)
        self._pools[key] = pool
        while len(self._pools) > self._keep:
            self._pools.pop(next(iter(self._pools))).close()
        return pool

    @property
    def restarts(self) -> int:
        return sum(pool.restarts for pool in self._pools.values())

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
