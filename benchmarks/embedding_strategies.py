"""Our own strategy of embeddings against torch's: time of forward and backward, collectives, and bytes.

    python benchmarks/embedding_strategies.py [--ranks 4] [--rows 20000] [--columns 64] [--ids 2048] [--repeat 20]

Both run in the same processes by turns, on gloo, so that whatever else the machine does falls on both. The time is the
median over the turns, on the slowest rank; the ratio is ours by torch's. Collectives are what torch's CommDebugMode
counts; bytes are those that each rank holds of what is redistributed, by DTensor's own plan. Where torch's rule fails,
the exception stands in the place of its figures.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, init_device_mesh
from torch.nn.functional import embedding

import strategies
from verifier.placements.parsing import parse_placements
from verifier.torch_internals.placements import Placements
from verifier.torch_internals.recording import RedistributionRecorder
from verifier.torch_internals.watching import count_collectives

STEPS = 50
"""So many are timed together, as it takes some to get over the switch from one side to the other: it leaves caches cold
that a training loop keeps warm. With 5 steps, ratios of what takes half a millisecond are a tenth higher."""


@dataclass(frozen=True)
class Layout:
    """How table and ids are placed, on which mesh, and with which options."""

    name: str
    mesh: tuple[int, ...]
    weight: str
    ids: str
    scale: bool = False


def layouts(ranks: int) -> list[Layout]:
    found = [
        Layout("row-wise", (ranks,), "S(0)", "R"),
        Layout("column-wise", (ranks,), "S(1)", "R"),
        Layout("by batch", (ranks,), "R", "S(0)"),
        Layout("by batch, scaled", (ranks,), "R", "S(0)", scale=True),
        Layout("Partial table", (ranks,), "P(sum)", "R"),
    ]
    if ranks % 2 == 0:
        square = (2, ranks // 2)
        found += [
            Layout("rows x batch", square, "(S(0), R)", "(R, S(0))"),
            Layout("rows x columns", square, "(S(0), S(1))", "(R, R)"),
            Layout("rows x rows", square, "(S(0), S(0))", "(R, R)"),
        ]
    return found


@dataclass
class Figures:
    """Of one strategy under one layout."""

    seconds: list[float]
    collectives: str = ""
    bytes: int = 0
    failure: str = ""


def place(value: torch.Tensor, mesh: object, placements: Placements) -> DTensor:
    """Return ``value`` placed; a Partial of it is the value on the first rank of the mesh dim and 0 on the others."""
    shards = [Replicate() if p.is_partial() else p for p in placements]
    whole = distribute_tensor(value, mesh, shards)  # type: ignore[arg-type]
    local = whole.to_local().clone()
    coordinate = whole.device_mesh.get_coordinate() or [0]
    if any(p.is_partial() and at for p, at in zip(placements, coordinate, strict=True)):
        local.zero_()
    return DTensor.from_local(local, whole.device_mesh, placements, shape=value.shape, stride=value.stride())


def step(layout: Layout, weight: DTensor, ids: DTensor) -> None:
    """Look up, reduce what has to be reduced, and go back."""
    out = embedding(ids, weight, scale_grad_by_freq=layout.scale)
    wanted = [Replicate() if p.is_partial() else p for p in out.placements]
    whole = out.redistribute(placements=wanted)
    torch.autograd.grad(whole, weight, torch.ones_like(whole))


def measure(layout: Layout, arguments: argparse.Namespace) -> dict[str, Figures]:
    generator = torch.Generator().manual_seed(0)
    mesh = init_device_mesh("cpu", layout.mesh)
    table = torch.randn(arguments.rows, arguments.columns, generator=generator)
    ids = place(
        torch.randint(0, arguments.rows, (arguments.ids,), generator=generator), mesh, parse_placements(layout.ids)
    )
    weight = place(table, mesh, parse_placements(layout.weight)).requires_grad_()
    figures = {"torch": Figures([]), "ours": Figures([])}
    for turn in range(arguments.repeat + 1):
        # each goes first as often as second: what the one leaves in the processor's caches, the other finds there
        for name, one in list(figures.items())[:: 1 if turn % 2 else -1]:
            if one.failure:
                continue
            with strategies.installed() if name == "ours" else nullcontext():
                try:
                    for _ in range(2):  # fills DTensor's caches, which the switch has emptied
                        step(layout, weight, ids)
                    dist.barrier()
                    began = time.perf_counter()
                    for _ in range(STEPS):
                        step(layout, weight, ids)
                    one.seconds.append((time.perf_counter() - began) / STEPS)
                    if turn == 0:
                        recorder = RedistributionRecorder()
                        with recorder.recording(), count_collectives() as counts:
                            step(layout, weight, ids)
                        one.collectives = ", ".join(f"{count} {op}" for op, count in counts.items()) or "none"
                        one.bytes = sum(s.bytes for s in recorder.steps if s.collective)
                except Exception as error:  # noqa: BLE001 - a rule that fails is a figure as well
                    one.failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return figures


def run(rank: int, arguments: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=arguments.ranks)
    for layout in layouts(arguments.ranks):
        figures = measure(layout, arguments)
        slowest = {}
        for name, one in figures.items():
            seconds = torch.tensor(one.seconds[1:] or [0.0], dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            slowest[name] = statistics.median(seconds.tolist())
        if rank:
            continue
        print(f"{layout.name}: weight {layout.weight}, ids {layout.ids}, mesh {layout.mesh}", flush=True)
        for name, one in figures.items():
            told = f"{1000 * slowest[name]:7.2f} ms, {one.bytes:>10,} B, {one.collectives}"
            print(f"  {name:6} {one.failure or told}", flush=True)
        if not any(one.failure for one in figures.values()):
            print(f"  ratio  {slowest['ours'] / slowest['torch']:7.2f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", 4), ("rows", 20_000), ("columns", 64), ("ids", 2048), ("repeat", 20)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {vars(arguments)}", flush=True)
    multiprocessing.spawn(run, (arguments, port), nprocs=arguments.ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
