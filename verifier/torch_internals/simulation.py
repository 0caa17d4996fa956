"""Ranks in one process: LocalTensorMode and threads."""

from __future__ import annotations

import contextlib
import importlib
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _local_tensor as local_tensor_module
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "ThreadedRanks",
    "in_world_of",
    "paused_simulation",
    "run_in_threads",
    "simulated_mode",
    "simulated_ranks",
    "start_simulated_world",
]


def start_simulated_world(world_size: int) -> None:
    """Make a default process group of ``world_size`` ranks in this process that transfers no data.

    Its collectives have an effect only under :func:`simulated_mode`.
    """
    # importing the module registers the "fake" backend
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())


@contextlib.contextmanager
def in_world_of(mesh: DeviceMesh) -> Iterator[None]:
    """Let ``torch.distributed`` tell this process that it is the rank that sees ``mesh``, of as many ranks as that has.

    The ranks hold no data. A process that is in a world already stays in that one.
    """
    if dist.is_initialized():
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=mesh._rank, world_size=mesh.size(), store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def simulated_mode(world_size: int) -> contextlib.AbstractContextManager[object]:
    """Return torch's ``LocalTensorMode``, under which one process simulates all ranks."""
    mode: contextlib.AbstractContextManager[object] = LocalTensorMode(world_size)
    return mode


def simulated_ranks() -> tuple[int, ...] | None:
    """Return the ranks that this process is simulating, or None if it is a real rank."""
    mode = local_tensor_module.local_tensor_mode()
    return None if mode is None else tuple(sorted(mode.ranks))


def paused_simulation() -> contextlib.AbstractContextManager[object]:
    """Return a context in which factory functions make plain tensors, whether or not ranks are simulated."""
    context: contextlib.AbstractContextManager[object] = local_tensor_module.maybe_disable_local_tensor_mode()
    return context


# ------------------------------------------------------------------------------------------------------------- threads
class _Mail:
    """Carries tensors from thread to thread; torch's process group for threads has collectives only."""

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended
        self._boxes: dict[tuple[str, int, int, int], queue.SimpleQueue[torch.Tensor]] = defaultdict(queue.SimpleQueue)

    def send(self, group: Any, tensors: Sequence[torch.Tensor], to: int, tag: int) -> _Delivery:
        self._boxes[group.pg_name, group.rank(), to, tag].put(tensors[0].detach().clone())
        return _Delivery(lambda: None)

    def receive(self, group: Any, tensors: Sequence[torch.Tensor], sender: int, tag: int) -> _Delivery:
        box = self._boxes[group.pg_name, sender, group.rank(), tag]

        def take() -> None:
            while not self._ended.is_set():
                with contextlib.suppress(queue.Empty):
                    tensors[0].detach().copy_(box.get(timeout=_LOOKS))
                    return
            raise SystemExit("another rank has ended")

        return _Delivery(take)


_LOOKS = 0.05
"""Seconds after which a rank that waits for a tensor looks whether another rank has ended."""
_STARTING = 6
"""So many limits of one function the ranks have to start in, which takes seconds on a busy machine."""


class _Delivery:
    """A message on its way, as a ``Work`` of torch's is."""

    def __init__(self, complete: Callable[[], None]) -> None:
        self._complete = complete

    def wait(self, timeout: object = None) -> bool:
        self._complete()
        return True


class _Backend:
    """What torch asks, from 2.14 on, before it sends to several ranks: whether messages can be sent as one."""

    supports_coalescing = False


@contextlib.contextmanager
def _threads_are_ranks() -> Iterator[Any]:
    """Let each thread have a process group of its own inside the block; yield the class of the groups."""
    # importing the module registers the "threaded" backend
    from torch.testing._internal.distributed import multi_threaded_pg

    threaded: Any = multi_threaded_pg
    isolate: Any = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    group, mail = threaded.ProcessLocalGroup, _Mail(threaded.ProcessLocalGroup._terminate)
    given = ("send", "recv", "_get_backend")
    own = {name: vars(group)[name] for name in given if name in vars(group)}
    isolate(True)
    threaded._install_threaded_pg()
    group.send = lambda self, tensors, to, tag=0: mail.send(self, tensors, to, tag)
    group.recv = lambda self, tensors, sender, tag=0: mail.receive(self, tensors, sender, tag)
    group._get_backend = lambda self, device: _Backend
    try:
        yield group
    finally:
        for name in given:
            delattr(group, name)
        for name, method in own.items():
            setattr(group, name, method)
        group.reset()
        threaded._uninstall_threaded_pg()
        isolate(False)


def run_in_threads(function: Callable[[int], object], world_size: int, limit: float) -> list[BaseException | None]:
    """Call ``function(rank)`` in a thread for each rank, and return what each raised.

    Tensors go from rank to rank in memory, through the threaded process group of torch's tests. If one thread raises,
    the threads that wait for it end as well. A thread that has not ended after ``limit`` seconds is left running, and a
    TimeoutError is returned for it.
    """
    store = dist.HashStore()  # type: ignore[attr-defined]
    raised: list[BaseException | None] = [None] * world_size
    over = threading.Event()

    with _threads_are_ranks() as group:

        def run(rank: int) -> None:
            try:
                dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
                try:
                    function(rank)
                finally:
                    if not over.is_set():  # after that, the process group is the one of the process
                        dist.destroy_process_group()
            except BaseException as error:  # noqa: BLE001 - goes to the caller
                if not over.is_set():
                    raised[rank] = error
                    group.exception_handle(error)

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + limit
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        over.set()
        for rank, thread in enumerate(threads):
            if thread.is_alive():
                raised[rank] = TimeoutError(f"no end within {limit:g} s")
        return list(raised)


class ThreadedRanks:
    """Threads of this process that are the ranks of a mesh on CPUs, and run one function after the other.

    Parameters
    ----------
    mesh_shape
        Of the mesh.
    limit
        Seconds for one function, after which the ranks count as hanging and are left alone.

    Only one such object can be open at a time.
    """

    def __init__(self, mesh_shape: tuple[int, ...], limit: float) -> None:
        self._shape, self._limit = mesh_shape, limit
        self._tasks: list[queue.SimpleQueue[Callable[[int, DeviceMesh], object] | None]] = []
        self._answers: queue.SimpleQueue[tuple[int, object, BaseException | None]] = queue.SimpleQueue()
        self._open = contextlib.ExitStack()

    def run(self, function: Callable[[int, DeviceMesh], object]) -> list[object]:
        """Return what ``function`` returns on each rank.

        Raises
        ------
        BaseException
            What the first rank to raise has raised. The next call has new ranks.
        TimeoutError
            If a rank has not answered in time.
        """
        if not self._tasks:
            self._start()
            # a rank that ended before others have joined the group would leave them waiting; none runs code of a caller
            self._gathered(_STARTING * self._limit)
        for tasks in self._tasks:
            tasks.put(function)
        return self._gathered(self._limit)

    def _gathered(self, limit: float) -> list[object]:
        """Return one answer of each rank, in order."""
        values: list[object] = [None] * len(self._tasks)
        until = time.monotonic() + limit
        for _ in self._tasks:
            try:
                rank, values[rank], error = self._answers.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                error = TimeoutError(f"no end within {limit:g} s")
                self._group.exception_handle(error)  # ends ranks that wait for each other
            if error is not None:
                self.close()
                raise error
        return values

    def _start(self) -> None:
        importlib.import_module("torch._dynamo")  # half imported by one rank, it would fail another
        ranks = torch.arange(math.prod(self._shape)).view(self._shape)
        store = dist.HashStore()  # type: ignore[attr-defined]
        group = self._group = self._open.enter_context(_threads_are_ranks())
        answers: queue.SimpleQueue[tuple[int, object, BaseException | None]] = queue.SimpleQueue()
        self._answers = answers
        self._tasks = [queue.SimpleQueue() for _ in range(ranks.numel())]

        def serve(rank: int, tasks: queue.SimpleQueue[Callable[[int, DeviceMesh], object] | None]) -> None:
            try:
                dist.init_process_group("threaded", rank=rank, world_size=ranks.numel(), store=store)
                mesh = DeviceMesh("cpu", ranks)
                answers.put((rank, None, None))
                while (function := tasks.get()) is not None:
                    answers.put((rank, function(rank, mesh), None))
                dist.destroy_process_group()
            except SystemExit:
                return  # another rank has raised
            except BaseException as error:  # noqa: BLE001 - goes to the caller
                group.exception_handle(error)
                answers.put((rank, None, error))

        self._threads = [
            threading.Thread(target=serve, args=(rank, tasks), daemon=True) for rank, tasks in enumerate(self._tasks)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the ranks, if there are any."""
        for tasks in self._tasks:
            tasks.put(None)
        if self._tasks:
            for thread in self._threads:
                thread.join(_LOOKS * 20)
        self._tasks = []
        self._open.close()
