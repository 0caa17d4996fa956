"""Time of a single dispatch of an embedding through DTensor, by our own strategy and by torch's rule.

    python benchmarks/embedding_dispatch.py [--calls 20] [--batches 300] [--markdown]

A table of ``[8, 4]`` and four ids on two ranks, so that hardly anything but the dispatch is timed, in one process with
one thread. Its process group moves no data, so that nothing is sent or waited for. A row-wise lookup by itself is left
Partial, which for torch's rule has a mask; with autograd it is reduced, as in training. A figure is the least of the
batches, in microseconds a call, where the two sides take turns; the ratio is ours by torch's.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn.functional import embedding

import strategies
from verifier.torch_internals.simulation import start_simulated_world

ROWS, COLUMNS, IDS = 8, 4, 4
LAYOUTS: dict[str, tuple[Placement, Placement]] = {
    "column-wise": (Shard(1), Replicate()),
    "by batch": (Replicate(), Shard(0)),
    "row-wise": (Shard(0), Replicate()),
}
"""Placements of the table and of the ids."""
OPS = ("lookup", "gradient", "both, with autograd")
SIDES = ("torch", "ours")
BATCHES_OF_A_TURN = 10
WARM_UP = 50
"""Calls at the start of a turn: DTensor's caches are emptied by the switch, and those of the processor are cold."""

aten = torch.ops.aten


def calls_of(weight: DTensor, ids: DTensor) -> tuple[Callable[[], object], ...]:
    """Return what is timed, one for each of ``OPS``."""
    table = weight.detach()
    result = aten.embedding.default(table, ids, -1, False, False)
    reduced = [Replicate() if p.is_partial() else p for p in result.placements]
    pending = reduced != list(result.placements)
    cotangent = result.redistribute(placements=reduced)

    def step() -> object:
        found = embedding(ids, weight)
        return torch.autograd.grad(found.redistribute(placements=reduced) if pending else found, weight, cotangent)

    return (
        lambda: aten.embedding.default(table, ids, -1, False, False),
        lambda: aten.embedding_dense_backward.default(cotangent, ids, ROWS, -1, False),
        step,
    )


def least(call: Callable[[], object], calls: int, batches: int) -> float:
    """Return the seconds of one call in the fastest of the batches."""
    for _ in range(WARM_UP):
        call()
    seconds = []
    for _ in range(batches):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        seconds.append((time.perf_counter() - began) / calls)
    return min(seconds)


def measure(weight: DTensor, ids: DTensor, calls: int, batches: int) -> dict[str, tuple[float, ...]]:
    """Return the seconds of one call of each of ``OPS``, by either side."""
    found: dict[str, list[tuple[float, ...]]] = {side: [] for side in SIDES}
    for first in range(0, batches, BATCHES_OF_A_TURN):
        size = min(BATCHES_OF_A_TURN, batches - first)
        # each goes first as often as second
        for side in SIDES if first // BATCHES_OF_A_TURN % 2 else SIDES[::-1]:
            with strategies.installed() if side == "ours" else nullcontext():
                found[side].append(tuple(least(call, calls, size) for call in calls_of(weight, ids)))
    return {side: tuple(map(min, zip(*turns, strict=True))) for side, turns in found.items()}


def table(rows: Sequence[Sequence[str]], markdown: bool) -> str:
    header = ("op", "layout", "weight", "torch, us", "ours, us", "ours / torch")
    if markdown:
        rows = [header, ["---"] * len(header), *rows]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (header, *rows)]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20, help="calls timed together [default: 20]")
    parser.add_argument("--batches", type=int, default=300, help="of so many calls, for each side [default: 300]")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    arguments = parser.parse_args()
    if arguments.calls < 1 or arguments.batches < 1:
        parser.error("--calls and --batches have to be at least 1")
    torch.set_num_threads(1)
    machine = f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{machine}, least of {arguments.batches} batches of {arguments.calls} calls\n", flush=True)
    start_simulated_world(2)
    mesh = init_device_mesh("cpu", (2,))
    rows = []
    for layout, (weight_placement, ids_placement) in LAYOUTS.items():
        weight = distribute_tensor(torch.ones(ROWS, COLUMNS), mesh, [weight_placement], src_data_rank=None)
        ids = distribute_tensor(torch.arange(IDS), mesh, [ids_placement], src_data_rank=None)
        seconds = measure(weight.requires_grad_(), ids, arguments.calls, arguments.batches)
        for op, theirs, ours in zip(OPS, *(seconds[side] for side in SIDES), strict=True):
            figures = f"{1e6 * theirs:.1f}", f"{1e6 * ours:.1f}", f"{ours / theirs:.2f}"
            rows.append((op, layout, str(weight_placement), *figures))
    print(table(rows, arguments.markdown))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
