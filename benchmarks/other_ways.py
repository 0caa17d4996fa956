"""The same checks without the verifier, in the ways that torch offers: what the pool is compared with.

A check is the call, one backward pass, and both results gathered and compared with the local call bit for bit. Ranks
are simulated by ``LocalTensorMode``, or are threads under torch's threaded process group, or processes that are spawned
for each check. The first two keep one process alive, so that both sides are measured warm and in turn.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.placement_types import Placement

PLACEMENTS: tuple[tuple[Placement, Placement], ...] = (
    (Shard(0), Replicate()),
    (Shard(1), Replicate()),
    (Replicate(), Shard(0)),
    (Replicate(), Replicate()),
)
"""Of the table and of the indices: by row, by column, by batch, and not at all."""
CHUNK = 8
TURN_LIMIT = 600.0


@dataclass(frozen=True)
class Lookup:
    """One embedding with what the local call makes of it."""

    weight: torch.Tensor
    indices: torch.Tensor
    output: torch.Tensor
    gradient: torch.Tensor

    @classmethod
    def make(cls, weight: torch.Tensor, indices: torch.Tensor) -> Lookup:
        local = weight.detach().clone().requires_grad_()
        output = torch.nn.functional.embedding(indices, local)
        (gradient,) = torch.autograd.grad(output, local, torch.ones_like(output))
        return cls(weight.detach(), indices, output.detach(), gradient)


ROWS = 67
"""Rows of the smallest table: up to 9 ranks have no empty shard of any; on one torch's rule crashes."""


def draw_lookup(rows: int, columns: int = 8, ids: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a table [rows, columns] of small integers, and indices [ids] into it."""
    generator = torch.Generator().manual_seed(rows * 1000 + ids)
    weight = torch.randint(-8, 9, (rows, columns), generator=generator).double()
    return weight, torch.randint(0, rows, (ids,), generator=generator)


def check_lookup(mesh: DeviceMesh, lookup: Lookup, placements: tuple[Placement, Placement]) -> None:
    """Distribute a lookup, run it forward and backward, and compare what is gathered."""
    table = distribute_tensor(lookup.weight, mesh, [placements[0]]).requires_grad_()
    indices = distribute_tensor(lookup.indices, mesh, [placements[1]])
    output = torch.nn.functional.embedding(indices, table)
    expect(output.full_tensor(), lookup.output)
    cotangent = distribute_tensor(torch.ones_like(lookup.output), mesh, [Replicate()])
    (gradient,) = torch.autograd.grad(output, table, cotangent)
    expect(gradient.full_tensor(), lookup.gradient)


def expect(got: torch.Tensor, expected: torch.Tensor) -> None:
    # simulated ranks: every one of them holds a tensor of its own
    for local in getattr(got, "_local_tensors", {0: got}).values():
        assert torch.equal(local.detach(), expected), "a value is wrong"


def lookups(repeated: bool) -> Iterator[Lookup]:
    """Yield lookups without end: always the same one, or each in a shape of its own."""
    if repeated:
        same = Lookup.make(*draw_lookup(ROWS))
        while True:
            yield same
    rows = ROWS
    while True:
        rows += 1
        yield Lookup.make(*draw_lookup(rows))


# ------------------------------------------------------------------------------------------------ simulated and threads
class SimulatedRanks:
    """All ranks in one process, under torch's ``LocalTensorMode``."""

    def __init__(self, world_size: int) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
        self._world_size = world_size
        self._mesh = init_device_mesh("cpu", (world_size,))

    def each(self, check: Callable[[DeviceMesh], object]) -> None:
        """Run ``check`` as every rank."""
        from torch.distributed._local_tensor import LocalTensorMode

        with LocalTensorMode(self._world_size):
            check(self._mesh)


class ThreadedRanks:
    """One thread for each rank, under torch's threaded process group; set up as ``MultiThreadedTestCase`` does it."""

    def __init__(self, world_size: int) -> None:
        from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg

        lock_propagation()
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        _install_threaded_pg()
        store = dist.HashStore()
        self._todo: list[queue.Queue[Callable[[DeviceMesh], object]]] = [queue.Queue() for _ in range(world_size)]
        self._done: queue.Queue[BaseException | None] = queue.Queue()
        for rank in range(world_size):
            threading.Thread(target=self._serve, args=(rank, world_size, store), daemon=True).start()

    def _serve(self, rank: int, world_size: int, store: dist.Store) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
        mesh = init_device_mesh("cpu", (world_size,))
        while True:
            check = self._todo[rank].get()
            try:
                check(mesh)
            except Exception as error:  # noqa: BLE001 - handed to the main thread, which raises it
                self._done.put(error)
            else:
                self._done.put(None)

    def each(self, check: Callable[[DeviceMesh], object]) -> None:
        """Run ``check`` in every thread, and wait for all."""
        for todo in self._todo:
            todo.put(check)
        for _ in self._todo:
            error = self._done.get(timeout=TURN_LIMIT)
            if error is not None:
                raise error


def lock_propagation() -> None:
    """Let one thread at a time propagate shardings on fake tensors, as torch's threaded tests of DTensor do."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    ShardingPropagator._fake_mode_lock = threading.Lock()


WAYS: dict[str, type[SimulatedRanks] | type[ThreadedRanks]] = {"simulated": SimulatedRanks, "threads": ThreadedRanks}


def _serve(way: str, world_size: int, connection: Connection) -> None:
    """Measure whenever asked; the program of a process of its own."""
    torch.set_num_threads(1)
    ranks = WAYS[way](world_size)
    sources = {repeated: lookups(repeated) for repeated in (True, False)}
    connection.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            repeated, seconds = connection.recv()
            connection.send(_timed_lookups(ranks, sources[repeated], seconds))
    os._exit(0)  # threads of ranks would keep the process


def _timed_lookups(
    ranks: SimulatedRanks | ThreadedRanks, source: Iterator[Lookup], seconds: float
) -> tuple[int, float]:
    started, done = time.perf_counter(), 0
    while done == 0 or time.perf_counter() - started < seconds:
        chunk = [next(source) for _ in range(CHUNK)]

        def check(mesh: DeviceMesh, chunk: Sequence[Lookup] = chunk) -> None:
            for number, lookup in enumerate(chunk):
                check_lookup(mesh, lookup, PLACEMENTS[number % len(PLACEMENTS)])

        ranks.each(check)
        done += CHUNK
    return done, time.perf_counter() - started


class Peer:
    """A process that measures one way of checking at one number of ranks."""

    def __init__(self, way: str, world_size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(way, world_size, theirs), daemon=True)
        self._process.start()
        theirs.close()
        assert self._connection.recv() == "ready"

    def rate(self, repeated: bool, seconds: float) -> float:
        """Return checks per second of lookups, in shapes that repeat or that are new."""
        self._connection.send((repeated, seconds))
        try:
            done, took = self._connection.recv()
        except EOFError:
            self._process.join(10)
            raise RuntimeError(f"the process measured ended with status {self._process.exitcode}") from None
        return float(done / took)

    def close(self) -> None:
        self._connection.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()


# ------------------------------------------------------------------------------------- tests that spawn their processes
def spawned_test(rank: int, world_size: int, port: int) -> None:
    """One test in the style of torch's own multi-process tests."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    check_lookup(init_device_mesh("cpu", (world_size,)), Lookup.make(*draw_lookup(ROWS)), PLACEMENTS[0])
    dist.destroy_process_group()


def rate_of_spawned(world_size: int) -> float:
    """Return checks per second where each check spawns its own processes, from one of them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = time.perf_counter()
    torch.multiprocessing.spawn(spawned_test, (world_size, port), world_size)
    return 1 / (time.perf_counter() - started)
