"""Ops of torch's database as its ``test_dtensor_ops`` tests them: ranks are threads, and nothing is the verifier's.

Each op gets new threads. They make DTensors of a sample with torch's own converter, which yields replicated arguments
and even shards, and compare what ``full_tensor()`` gathers with the local call; with the first combination that fails
the op ends. torch's wheel has no tests in it, so this is written anew.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
from opinfo_ops import Call, calls_of
from other_ways import lock_propagation
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorConverter

from verifier.torch_internals.names import pytree
from verifier.torch_internals.simulation import run_in_threads

PATIENCE = 30.0
"""Seconds without a combination that any thread completes, after which an op hangs."""


def even_combinations(call: Call, world_size: int) -> list[tuple[Placement, ...]]:
    """Return the combinations that torch's ``DTensorConverter`` tries: replicated, and every even shard."""
    # all that it asks of a mesh before it makes DTensors
    mesh: Any = SimpleNamespace(size=lambda: world_size)
    return [tuple(choice) for choice in DTensorConverter(mesh, call.args, call.kwargs).sharding_combs]


@dataclass(frozen=True)
class OpRun:
    """How far the threads came with an op.

    ``done`` combinations were completed by all of them, in ``seconds``. They ended after ``whole`` seconds, with the
    first combination that failed and why, or at the end of all.
    """

    done: int
    seconds: float
    whole: float
    failure: str


class ThreadedOps:
    """A process whose threads test op after op as torch's ``test_dtensor_ops`` does, with new threads for each op.

    After an op in which it crashed or hung, it is replaced.
    """

    def __init__(self, world_size: int, backward: bool, patience: float = PATIENCE) -> None:
        self._world_size, self._backward, self._patience = world_size, backward, patience
        self._context = multiprocessing.get_context("spawn")
        # read from outside, so that it is known how far those came that crashed
        self._progress: Any = self._context.Array("d", 2 * world_size, lock=False)
        self._start()

    def _start(self) -> None:
        self._connection, theirs = self._context.Pipe()
        arguments = (self._world_size, self._backward, theirs, self._progress)
        self._process = self._context.Process(target=_serve_ops, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        assert self._connection.recv() == "ready"

    def run(self, place: int, most: int | None = None) -> OpRun:
        """Test all samples of the op at this place of the database, or the first ``most``."""
        self._progress[:] = [0.0] * len(self._progress)
        started = time.perf_counter()
        try:
            self._connection.send((place, most))
            self._wait()
            whole, failure = self._connection.recv()
        except (EOFError, OSError) as error:
            whole = time.perf_counter() - started
            if isinstance(error, TimeoutError):
                failure = f"hang: {error}"
            else:
                self._process.join()
                failure = f"crash: the process ended with status {self._process.exitcode}"
            self.close()
            self._start()
        counts, times = self._progress[: self._world_size], self._progress[self._world_size :]
        return OpRun(int(min(counts)), max(times) if min(counts) else 0.0, whole, failure)

    def _wait(self) -> None:
        """Wait for an answer, or for the end of the process; raises a TimeoutError if nothing goes on in it."""
        seen, since = list(self._progress), time.monotonic()
        while not self._connection.poll(0.2):
            if (now := list(self._progress)) != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self._patience:
                raise TimeoutError(f"nothing in {self._patience:g} s")

    def close(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.join()


def _serve_ops(world_size: int, backward: bool, connection: Connection, progress: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    lock_propagation()
    connection.send("ready")
    with contextlib.suppress(EOFError, BrokenPipeError):  # the one that asks has ended
        while True:
            place, most = connection.recv()
            calls, _ = calls_of(place, most)
            started = time.perf_counter()

            def test(rank: int, calls: Sequence[Call] = calls, started: float = started) -> None:
                mesh = init_device_mesh("cpu", (world_size,))
                for call in calls:
                    for _ in check_as_torch_does(mesh, call, backward):
                        progress[world_size + rank] = time.perf_counter() - started
                        progress[rank] += 1

            raised = [error for error in run_in_threads(test, world_size, 1e6) if error is not None]
            whole = time.perf_counter() - started
            # those that only waited for the one that failed leave with SystemExit
            raised.sort(key=lambda error: isinstance(error, SystemExit))
            connection.send((whole, f"{type(raised[0]).__name__}: {raised[0]}" if raised else ""))


def check_as_torch_does(mesh: DeviceMesh, call: Call, backward: bool) -> Iterator[None]:
    """Run every combination of a call, compare results and gradients, and yield after each.

    The backward pass starts at the sum of the results.
    """
    own = _copied(call)  # each rank draws its own samples there
    expected, expected_gradients = _results(_copied(call), backward)
    converter = DTensorConverter(mesh, own.args, own.kwargs)
    for distributed in converter:
        assert converter.successful(), "not all arguments could be made DTensors"
        args, kwargs = pytree.tree_map_only(torch.Tensor, _leaf, distributed)
        results, gradients = _results(Call(call.function, args, kwargs), backward)
        if all(result.numel() for result in results):  # it does not look at others
            for got, wanted in zip([*results, *gradients], [*expected, *expected_gradients], strict=True):
                whole = got.full_tensor() if isinstance(got, DTensor) else got
                torch.testing.assert_close(whole, wanted, equal_nan=True)
        yield


def _copied(call: Call) -> Call:
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: _leaf(t.clone()), (call.args, call.kwargs))
    return Call(call.function, args, kwargs)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _results(call: Call, backward: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    returned = pytree.tree_leaves(call.function(*call.args, **call.kwargs))
    results = [leaf for leaf in returned if isinstance(leaf, torch.Tensor)]
    # a backward pass cannot start at a complex number
    total = [t.sum() for t in results if backward and t.requires_grad and not t.is_complex()]
    gradients = list(torch.autograd.grad(total, inputs, allow_unused=True)) if total and inputs else []
    return [t.detach() for t in results], [gradient for gradient in gradients if gradient is not None]
