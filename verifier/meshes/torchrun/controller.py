"""The controller of ranks that torchrun started, and how it uses keepers; see :mod:`.environment`."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import replace
from functools import cached_property
from multiprocessing.connection import Connection
from types import TracebackType

from torch.distributed.distributed_c10d import Store

from verifier.meshes.hosts import Place, own_place
from verifier.meshes.processes import PoolError, RankProcess, Starter
from verifier.meshes.torchrun.connections import Doorway, limit_receiving
from verifier.meshes.torchrun.environment import (
    GATHERING_LIMIT,
    VERSIONS,
    Hello,
    KeeperFailure,
    TorchrunRank,
    WorkerHello,
    gloo_interface,
)
from verifier.meshes.worker_program import LOOPBACK, ProgramSpec

__all__ = ["Cluster"]

ANSWER_LIMIT = 60
"""Seconds that a keeper gets to answer."""

_log = logging.getLogger(__name__)


class _KeeperGone(OSError):  # noqa: N818 - an event, not an error of ours
    """A keeper does not answer any more."""


class _Keeper:
    """The controller's end of a keeper."""

    def __init__(self, connection: Connection, hello: Hello) -> None:
        self.rank = hello.rank
        self.place = hello.place
        self.connection = connection
        self._asked = 0
        self._gone = False
        limit_receiving(connection, ANSWER_LIMIT)

    @property
    def gone(self) -> str:
        """The message about a keeper that is gone."""
        return f"the process that torchrun started as rank {self.rank}, on {self.place.host}, is gone"

    def tell(self, action: str, *arguments: object) -> int:
        """Tell the keeper to do something and return the number under which its answer will come."""
        if self._gone:
            raise _KeeperGone(self.gone)
        self._asked += 1
        try:
            self.connection.send((self._asked, action, arguments))
        except OSError as error:
            self._gone = True
            raise _KeeperGone(self.gone) from error
        return self._asked

    def answer(self, number: int) -> object:
        """Return the answer with that number; earlier answers belong to calls that a Ctrl-C cut short."""
        try:
            while (answer := self.connection.recv())[0] != number:
                pass
        except (EOFError, OSError) as error:
            self._gone = True
            raise _KeeperGone(self.gone) from error
        if isinstance(answer[1], KeeperFailure):
            raise PoolError(f"rank {self.rank} on {self.place.host}: {answer[1].text}")
        value: object = answer[1]
        return value

    def ask(self, action: str, *arguments: object) -> object:
        return self.answer(self.tell(action, *arguments))


class _RemoteProgram:
    """A :class:`~verifier.meshes.worker_program.Program` that a keeper started."""

    def __init__(self, keeper: _Keeper, number: int) -> None:
        self._keeper = keeper
        self._number = number

    @cached_property
    def pid(self) -> int:
        return int(str(self._ask("pid", 0)))

    @property
    def phase(self) -> str:
        return str(self._ask("phase", "idle"))

    @property
    def running(self) -> bool:
        return bool(self._ask("running", False))

    @property
    def computed(self) -> float:
        return float(str(self._ask("computed", 0.0)))

    def interrupt(self) -> None:
        self._keeper.ask("interrupt", self._number)

    def ending(self) -> str:
        return str(self._ask("ending", f"its keeper ({self._keeper.gone})"))

    def signal(self) -> int:
        answer = self._ask("signal", 0)
        return answer if isinstance(answer, int) else 0

    def tail(self) -> str:
        return str(self._ask("tail", ""))

    def kill(self) -> None:
        self._ask("kill", None)

    def close(self) -> None:
        self._ask("close", None)

    def _ask(self, action: str, otherwise: object) -> object:
        try:
            return self._keeper.ask(action, self._number)
        except _KeeperGone:  # an error is reported when the rank has to be replaced
            return otherwise


class Cluster:
    """All processes that torchrun started, as the controller sees them; a context manager.

    Attributes
    ----------
    places
        The place of each rank.
    status
        The exit status of all processes of the job.
    """

    def __init__(self, own: TorchrunRank) -> None:
        self.places: tuple[Place, ...] = (own_place(own.local_rank),)
        self.status = 2
        self._own = own
        self._doorway = Doorway()
        self._keepers: dict[int, _Keeper] = {}
        self._started = 0
        self._store: Store | None = None  # it may be this process that serves it to the others

    @property
    def world_size(self) -> int:
        return len(self.places)

    @property
    def one_machine(self) -> bool:
        return len({place.machine for place in self.places}) == 1

    @property
    def store_host(self) -> str:
        """The address of this machine for the others."""
        return "127.0.0.1" if self.one_machine else self._own.host

    def describe(self) -> str:
        """Return how many ranks there are and where, for people."""
        hosts = dict.fromkeys(place.host for place in self.places)
        machines = len({place.machine for place in self.places})
        return (
            f"torchrun: {self.world_size} rank{'s' * (self.world_size != 1)} on "
            f"{machines} machine{'s' * (machines != 1)} ({', '.join(hosts)})"
        )

    def __enter__(self) -> Cluster:
        try:
            self._gather()
        except BaseException:
            self._end()
            raise
        _log.info("%s", self.describe())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _gather(self) -> None:
        """Wait for all keepers.

        Raises
        ------
        PoolError
            If some keepers do not connect.
        ValueError
            If a keeper has another version.
        """
        until = time.monotonic() + GATHERING_LIMIT
        self._store = self._own.store()
        self._store.set("controller", f"{self._own.host} {self._doorway.port} {self._doorway.key.hex()}")
        awaited = set(range(1, self._own.world_size))
        while awaited:
            entered = self._doorway.accept(until)
            if entered is None:
                listing = ", ".join(map(str, sorted(awaited)))
                raise PoolError(f"of {self._own.world_size} processes of torchrun, ranks {listing} did not come")
            connection, hello = entered
            if not isinstance(hello, Hello) or hello.rank not in awaited:
                connection.close()
                continue
            awaited.remove(hello.rank)
            self._keepers[hello.rank] = _Keeper(connection, hello)
            if hello.versions != VERSIONS:
                theirs, ours = (f"verifier {own} with torch {torchs}" for own, torchs in (hello.versions, VERSIONS))
                raise ValueError(f"rank {hello.rank} on {hello.place.host} has {theirs}, rank 0 has {ours}")
        self.places = (*self.places, *(self._keepers[rank].place for rank in range(1, self._own.world_size)))

    def _end(self) -> None:
        """Tell the keepers the exit status. They end after this process, so that torchrun does not end it with them."""
        for keeper in self._keepers.values():
            with contextlib.suppress(_KeeperGone):
                keeper.tell("end", self.status)

    def starter(self, imports: tuple[str, ...] = (), memory_limit: int | None = None) -> Starter:
        """Return what starts the processes of pools whose ranks are in this cluster."""
        return _ClusterStarter(self, imports, memory_limit)

    def start(self, rank: int, spec: ProgramSpec) -> RankProcess:
        """Start a process on the machine of ``rank``.

        Raises
        ------
        PoolError
            If its keeper is gone or cannot start it.
        """
        if rank == 0:
            return RankProcess.start(replace(spec, interface=self._interface()))
        keeper = self._keepers[rank]
        self._started += 1
        hello = WorkerHello(rank, self._started)
        try:
            here = keeper.place.machine == self.places[0].machine
            number = keeper.tell("start", self._started, replace(spec, interface=self._interface() if here else None))
            until = time.monotonic() + ANSWER_LIMIT
            while (entered := self._doorway.accept(until, instead=keeper.connection)) and entered[1] != hello:
                entered[0].close()  # of a start that a Ctrl-C cut short
            keeper.answer(number)  # if no process connected, it says why
        except _KeeperGone as gone:
            raise PoolError(str(gone)) from gone
        assert entered is not None
        return RankProcess(entered[0], _RemoteProgram(keeper, self._started))

    def _interface(self) -> str | None:
        """Return the interface for gloo on this machine."""
        if self.one_machine:
            return LOOPBACK
        others = (keeper for keeper in self._keepers.values() if keeper.place.machine != self.places[0].machine)
        return gloo_interface(next(others).connection)


class _ClusterStarter(Starter):
    """Starts the processes of a cluster's ranks, each on the machine of its rank."""

    def __init__(self, cluster: Cluster, imports: tuple[str, ...], memory_limit: int | None) -> None:
        super().__init__(imports, memory_limit)
        self._cluster = cluster
        self.store_host = cluster.store_host

    def places(self, size: int) -> tuple[Place, ...]:
        if size > self._cluster.world_size:
            raise PoolError(f"a world of {size} ranks was asked for, torchrun started {self._cluster.world_size}")
        return self._cluster.places[:size]

    def start(self, rank: int) -> RankProcess:
        return self._cluster.start(rank, self.spec(rank))
