"""Ranks in one process: LocalTensorMode and threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _local_tensor as local_tensor_module
from torch.distributed._local_tensor import LocalTensorMode

__all__ = [
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


def run_in_threads(function: Callable[[int], object], world_size: int, limit: float) -> list[BaseException | None]:
    """Call ``function(rank)`` in a thread for each rank, and return what each raised.

    Collectives go through the threaded process group of torch's tests, which passes tensors in memory. If one thread
    raises, the threads that wait for it end as well. A thread that has not ended after ``limit`` seconds is left
    running, and a TimeoutError is returned for it.
    """
    # importing the module registers the "threaded" backend
    from torch.testing._internal.distributed import multi_threaded_pg

    threaded: Any = multi_threaded_pg
    isolate: Any = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    store = dist.HashStore()  # type: ignore[attr-defined]
    raised: list[BaseException | None] = [None] * world_size
    over = threading.Event()

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
                threaded.ProcessLocalGroup.exception_handle(error)

    isolate(True)
    threaded._install_threaded_pg()
    try:
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
    finally:
        over.set()
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        isolate(False)
