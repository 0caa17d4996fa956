"""Time of a single dispatch with all remedies in force, beside plain torch, with DTensor's caches full and empty.

    python benchmarks/remedy_dispatch.py [--calls 5] [--batches 5]

Small tensors on two ranks in one process with one thread, whose process group moves no data. A figure is the least of
the batches, in microseconds a call. The two sides take turns. Bytes are those that DTensor redistributes in one call of
each, as the ranks' recorder counts them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from verifier.execution.remedies import installed_remedies, remedied
from verifier.torch_internals.caches import clear_caches
from verifier.torch_internals.recording import RedistributionRecorder
from verifier.torch_internals.simulation import start_simulated_world

SIDES = ("torch", "remedied")


def calls_on(rows: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return what is timed; ``rows`` is a DTensor of even shards, which no remedy vetoes unless the name says so."""
    return {
        "add": lambda: rows + rows,
        "sum": lambda: rows.sum(1),
        "cumsum": lambda: rows.cumsum(1),
        "softmax": lambda: rows.softmax(1),
        "cumsum, dim -2 (mended)": lambda: rows.cumsum(-2),
    }


def least(call: Callable[[], object], calls: int, batches: int, emptied: bool) -> float:
    """Return the seconds of one call in the fastest of the batches, of calls with empty caches if ``emptied``."""
    best = float("inf")
    for _ in range(batches):
        seconds = 0.0
        for _ in range(calls):
            if emptied:
                clear_caches()
            began = time.perf_counter()
            call()
            seconds += time.perf_counter() - began
        best = min(best, seconds / calls)
    return best


def moved(call: Callable[[], object]) -> int:
    """Return the bytes that enter the redistributions of one call."""
    recorder = RedistributionRecorder()
    with recorder.recording():
        call()
    return sum(step.bytes for step in recorder.steps if step.collective is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--batches", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start_simulated_world(2)
    mesh = init_device_mesh("cpu", (2,))
    calls = calls_on(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)], src_data_rank=None))
    found: dict[tuple[str, str, bool], float] = {}
    bytes_of: dict[tuple[str, str], int] = {}
    for turn in range(2):
        for side in SIDES[:: 1 if turn else -1]:
            with remedied(installed_remedies()) if side == "remedied" else nullcontext():
                for name, call in calls.items():
                    call()
                    bytes_of[name, side] = moved(call)
                    for emptied in (False, True):
                        seconds = least(call, options.calls, options.batches, emptied)
                        found[name, side, emptied] = min(found.get((name, side, emptied), seconds), seconds)
    print(
        f"{'call':26}{'cached: torch':>15}{'remedied':>10}{'not cached: torch':>19}{'remedied':>10}{'bytes':>8}{'':>8}"
    )
    for name in calls:
        cached = [1e6 * found[name, side, False] for side in SIDES]
        fresh = [1e6 * found[name, side, True] for side in SIDES]
        sent = [bytes_of[name, side] for side in SIDES]
        print(f"{name:26}{cached[0]:15.0f}{cached[1]:10.0f}{fresh[0]:19.0f}{fresh[1]:10.0f}{sent[0]:8}{sent[1]:8}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
