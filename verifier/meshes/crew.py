"""The processes that are the ranks of one world: connected to each other, and kept complete after faults.

Mending takes the same steps after every fault. Processes that are gone are replaced. The others drop their connections
and return to their loop; a process that does not return is replaced, too. Then all ranks meet in a new world. So a
fault costs no more processes than necessary. Each step may fail in turn.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import torch.distributed as dist

from verifier.core.case import MeshSpec
from verifier.execution.registrations import Registered, registered_rules
from verifier.meshes.hosts import Place, gpu_problem, gpus_shared
from verifier.meshes.processes import Gone, PoolError, RankProcess, RulesNotInRanks, Starter
from verifier.meshes.worker import Seat

__all__ = ["Crew", "PoolKey"]

PAUSE_LIMIT = 1.0
"""Seconds that a rank gets to come back to its loop once its connections are broken."""
BUILD_LIMIT = 20.0
"""Seconds that ranks get to meet."""
ATTEMPTS = 4
ALL_ANEW = 2
"""From which attempt on all processes are new ones."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PoolKey:
    """What two meshes must share to share processes."""

    world_size: int
    backend: str
    device: str

    @classmethod
    def of(cls, mesh: MeshSpec) -> PoolKey:
        return cls(mesh.world_size, mesh.backend, mesh.device)


class Crew:
    """One process per rank, or one for all if they are simulated.

    Parameters
    ----------
    key
        World size, backend and device.
    starter
        Starts the processes.

    Attributes
    ----------
    replaced
        How many processes have taken the place of another one.
    brought
        What the processes imported in addition, to have the rules that this process has.
    """

    def __init__(self, key: PoolKey, starter: Starter) -> None:
        self.key = key
        self.size = 1 if key.backend == "simulated" else key.world_size
        self.replaced = 0
        self.brought: tuple[str, ...] = ()
        self._rules: Mapping[str, Registered] = {}
        self._refused: RulesNotInRanks | None = None
        self._also: list[str] = []
        self._starter = starter
        self._seats: list[RankProcess | None] = [None] * self.size
        self._places: tuple[Place, ...] = ()
        self._epoch = 0
        self._pauses = 0
        self._store: dist.TCPStore | None = None  # type: ignore[name-defined]

    @property
    def processes(self) -> list[RankProcess]:
        """The processes in order of rank; empty unless all are there."""
        present = [process for process in self._seats if process is not None]
        return present if len(present) == self.size else []

    def start(self, also: Sequence[str] = ()) -> bool:
        """Start the ranks if they are not running, and start them again if they lack a rule registered here since.

        Returns whether they were started.

        Parameters
        ----------
        also
            What the ranks import from now on, in addition to their earlier imports.

        Raises
        ------
        PoolError
            If the start fails, with what the ranks said.
        RulesNotInRanks
            If this process has a rule that the ranks cannot have.
        """
        if new := [name for name in also if name not in self._also]:
            self._also += new
            self.close()
        rules = registered_rules()
        if rules is not self._rules:
            self._rules, self._refused = rules, None
            lacking = [one for process in self.processes for one in process.lacks(rules, self._starter.imported_here)]
            if lacking:
                _log.info("ranks start anew, since the rules of %s have changed here", lacking[0].op)
                self.close()
        if self.processes:
            return False
        if self._refused is not None:  # Hypothesis may ask hundreds of times
            raise self._refused
        self.brought = ()
        self._places = self._starter.places(self.size)
        if self.key.device == "cuda":
            if problem := gpu_problem(self._places, self.key.backend):
                raise PoolError(problem)
            if gpus_shared(self._places):
                _log.info("%d ranks share GPUs: gloo moves CUDA tensors through the memory of the host", self.size)
        started = time.monotonic()
        if self.key.backend != "simulated":
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                "127.0.0.1", 0, self.size, is_master=True, wait_for_workers=False
            )  # it listens on every interface
        self._assemble()
        _log.info("%d ranks of %s started in %.2f s", self.size, self.key.backend, time.monotonic() - started)
        return True

    def mend(self, lost: Collection[int] = ()) -> None:
        """Let the ranks meet again; replace the processes of ranks in ``lost`` and those that do not react.

        Raises
        ------
        PoolError
            If the ranks do not meet.
        """
        for index in lost:
            self._dismiss(index, "is lost")
        self._pause()
        self._assemble()

    def close(self) -> None:
        """End all processes of the crew."""
        seats, self._seats = self._seats, [None] * self.size
        present = [process for process in seats if process is not None]
        for process in present:
            process.kill()
        for process in present:
            process.close()
        self._store = None
        self._epoch = 0

    # ----------------------------------------------------------------------------------------------------------- steps
    def _dismiss(self, index: int, why: str) -> None:
        process, self._seats[index] = self._seats[index], None
        if process is not None:
            _log.info("rank %d %s: process %d is replaced", index, why, process.pid)
            process.close()
            self.replaced += 1

    def _pause(self) -> None:
        """Interrupt whatever the processes wait for, so that they return to their loop; dismiss those that do not."""
        if self.key.backend == "nccl" and None in self._seats:  # kernels that wait on a GPU for a rank that is gone
            for index in range(self.size):
                self._dismiss(index, "cannot be disconnected")
            return
        self._pauses += 1
        for index, process in self._present():
            try:
                process.interrupt()
                process.send("pause", self._pauses)
            except Gone:
                self._dismiss(index, "is gone")
        for index in self._collect("paused", self._pauses, PAUSE_LIMIT):
            self._dismiss(index, "does not come back")

    def _assemble(self) -> None:
        failed: dict[int, str] = {}
        try:
            for attempt in range(ATTEMPTS):
                if attempt:
                    self._pause()
                for index in range(self.size) if attempt >= ALL_ANEW else ():
                    self._dismiss(index, "may be what keeps the others from meeting")
                failed = self._fill()
                if not failed:
                    failed = self._build()
                if not failed:
                    return
                _log.warning("ranks do not come together: %s", _listing(failed))
        except BaseException:
            self.close()
            raise
        self.close()
        raise PoolError(f"ranks did not come together in {ATTEMPTS} attempts: {_listing(failed)}")

    def _fill(self) -> dict[int, str]:
        """Put a loaded process on each empty seat; return the seats for which this failed, and why."""
        failed: dict[int, str] = {}
        for index, process in enumerate(self._seats):
            if process is None:
                self._seats[index] = self._starter.start(index)
        for index, process in self._present():
            process.name = f"rank {index}"
            try:
                process.await_loaded()
                process.follow(self._rules, self._starter.imported_here, self._also)
                self.brought = tuple(dict.fromkeys((*self.brought, *process.brought)))
            except RulesNotInRanks as refused:
                self._refused = refused
                raise
            except Gone as gone:
                failed[index] = str(gone) or self._end_of(process)
                self._dismiss(index, failed[index])
        return failed

    def _build(self) -> dict[int, str]:
        """Have all ranks meet in a new world; return the ranks that did not, and why."""
        self._epoch += 1
        port = self._store.port if self._store is not None else 0
        together = len({place.machine for place in self._places}) == 1
        meeting = f"verifier-{secrets.token_hex(8)}" if together else ""
        failed: dict[int, str] = {}
        for index, process in self._present():
            try:
                process.send("build", Seat(
                    index, self.key.world_size, self.key.backend, self.key.device, self._places[index].number,
                    self._starter.store_host, port, self._epoch, meeting))  # fmt: skip
            except Gone:
                failed[index] = self._end_of(process)
        failed = failed or self._collect("built", self._epoch, BUILD_LIMIT)
        for index, process in self._present():
            if index in failed and not process.running:
                self._dismiss(index, failed[index])
        return failed

    def _collect(self, kind: str, token: int, limit: float) -> dict[int, str]:
        """Wait until all ranks have sent ``kind`` with ``token``; return the ranks that have not, and why.

        A rank that fails to meet the others ends the wait, because the others would wait for it in vain.
        """
        awaited = {process.connection: (index, process) for index, process in self._present()}
        deadline = time.monotonic() + limit
        while awaited:
            ready = wait(list(awaited), max(0.0, deadline - time.monotonic()))
            if not ready:
                return {index: f"no answer within {limit:g} s" for index, _ in awaited.values()}
            for connection in ready:
                assert isinstance(connection, Connection)
                index, process = awaited[connection]
                try:
                    message = process.receive()
                except Gone:
                    if kind == "built":
                        return {index: self._end_of(process)}
                    self._dismiss(index, self._end_of(process))
                    del awaited[connection]
                    continue
                if message is None:
                    continue
                if message[0] == "unbuilt" and kind == "built":
                    assert isinstance(message[2], tuple)
                    return {index: message[2][1]}
                if message[0] == kind and message[2] == token:  # other messages belong to work that has ended
                    del awaited[connection]
        return {}

    def _present(self) -> Iterator[tuple[int, RankProcess]]:
        for index, process in enumerate(list(self._seats)):
            if process is not None:
                yield index, process

    @staticmethod
    def _end_of(process: RankProcess) -> str:
        tail = process.tail()
        return f"ended with {process.ending()}" + (f": {tail}" if tail else "")


def _listing(failed: dict[int, str]) -> str:
    return "; ".join(f"rank {index} {why}" for index, why in failed.items())
