"""Whether the alpha-beta model puts redistribution paths into the order in which gloo ranks take them.

It predicts the seconds of 50 paths of one tensor on a mesh 2x2, measures them, and prints the rank correlation. All
paths are measured in turn, many times, and the least of each counts: other work on the machine only adds.

The latency and the bandwidth of each mesh dim are measured by all-gathers of a small and a large tensor alone, of sizes
that no path has. *By kind* is the same model with a latency and a bandwidth for each collective on each mesh dim, each
measured alone: what gloo takes for a reduction is not what it takes for a gather. *Measured again* is the correlation
of the least times of odd rounds with those of even rounds. No model can be expected to do better.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.multiprocessing import spawn

from verifier.redistribution.graph import Path
from verifier.redistribution.layouts import Layout, Space
from verifier.redistribution.models import LAUNCH, AlphaBeta, Link
from verifier.redistribution.steps import Step, steps_between
from verifier.redistribution.torch_side import NoSuchStep, Refused, TorchSide

MESH = (2, 2)
Route = tuple[tuple[str, ...], ...]
"""The placements of a path, one after another."""


# ---------------------------------------------------------------------------------------------------------------- paths
def paths_of(torch_side: TorchSide, count: int) -> list[Path]:
    """Return ``count`` paths that torch's planners take, spread evenly over the seconds that torch predicts.

    Steps to Partial are left out, because a caller cannot ask for them, and so are other shard orders.
    """
    found: dict[tuple[Layout, ...], Path] = {}
    layouts = [one for one in torch_side.space.layouts if one.default_order]
    for source in layouts:
        for target in layouts:
            for planner in ("greedy", "graph"):
                try:
                    path = torch_side.plan(source, target, planner)  # type: ignore[arg-type]
                except (Refused, NoSuchStep):
                    continue
                kinds = {step.kind for step in path.steps}
                if path.collectives and not kinds & {"split", "pad"} and all(one.default_order for one in path.layouts):
                    found[path.layouts] = path
    ranked = sorted(found.values(), key=lambda path: (path.seconds(torch_side.seconds), str(path.layouts)))
    return [ranked[number * len(ranked) // count] for number in range(min(count, len(ranked)))]


def as_gloo(step: Step, space: Space) -> Step:
    """Return the step that torch makes of ``step`` on gloo, which has no all-to-all: it gathers and keeps a slice."""
    if step.kind != "all_to_all":
        return step
    (mesh_dim,) = step.mesh_dims
    whole = [*step.source.placements]
    whole[mesh_dim] = "R"
    gathers = steps_between(space, step.source, step.source.moved_to(whole))
    return replace(next(one for one in gathers if one.kind == "all_gather"), target=step.target)


# ---------------------------------------------------------------------------------------------------------------- ranks
def placement(text: str) -> Placement:
    return Replicate() if text == "R" else Partial() if text.startswith("P") else Shard(int(text[2:-1]))


def local_shape(placements: Sequence[Placement], size: int) -> list[int]:
    shape = [size, size]
    for one, extent in zip(placements, MESH, strict=True):
        if isinstance(one, Shard):
            shape[one.dim] //= extent
    return shape


def seconds_of(mesh: DeviceMesh, route: Sequence[Sequence[Placement]], size: int) -> float:
    """Return the seconds that the slowest rank takes for a path; each step is asked for by itself."""
    tensor = DTensor.from_local(torch.ones(local_shape(route[0], size)), mesh, route[0], run_check=False)
    dist.barrier()
    started = time.perf_counter()
    for placements in route[1:]:
        tensor = tensor.redistribute(placements=placements)
    done = tensor.to_local()
    if hasattr(done, "wait"):
        done = done.wait()
    spent = torch.tensor([time.perf_counter() - started])
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


def on_a_rank(rank: int, asked: Sequence[tuple[int, Route]], rounds: int, store: str, results: str) -> None:
    """Measure every path ``rounds`` times, in turn, and keep the least of odd and of even rounds."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    ranks = math.prod(MESH)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=dist.FileStore(store, ranks))
    mesh = init_device_mesh("cpu", MESH)
    routes = [(size, [[placement(text) for text in placements] for placements in route]) for size, route in asked]
    best = [[math.inf] * len(routes) for _ in range(2)]
    for turn in range(rounds):
        least = best[turn % 2]
        for number, (size, route) in enumerate(routes):
            least[number] = min(least[number], seconds_of(mesh, route, size))
    if rank == 0:
        with open(results, "w", encoding="utf-8") as file:
            json.dump(best, file)
    dist.destroy_process_group()


def measured(asked: Sequence[tuple[int, Route]], rounds: int) -> list[list[float]]:
    """Return the least seconds of each path over the even rounds, and over the odd rounds."""
    with tempfile.TemporaryDirectory() as folder:
        results = os.path.join(folder, "results")
        spawn(on_a_rank, (asked, rounds, os.path.join(folder, "store"), results), nprocs=math.prod(MESH))
        with open(results, encoding="utf-8") as file:
            found: list[list[float]] = json.load(file)
    return found


# ---------------------------------------------------------------------------------------------------------- correlation
def ranks_of(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    first = 0
    while first < len(order):
        last = first
        while last + 1 < len(order) and math.isclose(values[order[last + 1]], values[order[first]], rel_tol=1e-9):
            last += 1
        for position in range(first, last + 1):
            found[order[position]] = (first + last) / 2
        first = last + 1
    return found


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's rank correlation, with ties."""
    return statistics.correlation(ranks_of(one), ranks_of(other))


def calibration(seconds: Sequence[float], large: int, small: int) -> Link:
    """Return the link that explains an all-gather over two ranks of ``small`` and of ``large`` bytes on each."""
    bandwidth = (large - small) / max(seconds[1] - seconds[0], 1e-9)
    return Link(max(seconds[0] - LAUNCH - small / bandwidth, 1e-9), bandwidth)


# --------------------------------------------------------------------------------------------------------- by kind
ALONE: dict[str, tuple[str, str]] = {
    "all_gather": ("S(0)", "R"), "all_reduce": ("P(sum)", "R"), "reduce_scatter": ("P(sum)", "S(0)"),
    "all_to_all": ("S(0)", "S(1)"),
}  # fmt: skip
"""Collectives on one mesh dim by their kind, with the placements before and after; the other mesh dim is replicated."""


def alone(kind: str, mesh_dim: int) -> Route:
    """Return the path of one collective alone."""
    before, after = ALONE[kind]
    return ((before, "R"), (after, "R")) if mesh_dim == 0 else (("R", before), ("R", after))


def busiest_of(route: Route, size: int) -> int:
    """Return the bytes that a rank receives in the collective of a path of :func:`alone`."""
    space = Space(MESH, (size, size))
    ends = [next(one for one in space.layouts if one.placements == placements) for placements in route]
    return next(step.busiest for step in steps_between(space, *ends) if not step.is_local)


@dataclass(frozen=True)
class ByKind:
    """The alpha-beta model with a link for each kind of collective on each mesh dim."""

    links: Mapping[tuple[str, int], Link]

    def seconds(self, step: Step) -> float:
        if step.is_local:
            return 0.0
        (mesh_dim,) = step.mesh_dims
        link = self.links[step.kind, mesh_dim]
        return LAUNCH + link.latency + step.busiest / link.bandwidth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="64,512", help="rows and columns of the tensors of float32")
    parser.add_argument("--paths", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--list", action="store_true", help="print each path")
    options = parser.parse_args()
    sizes = [int(text) for text in options.sizes.split(",")]
    small, large = 32, 1024
    kinds = [(kind, mesh_dim) for kind in ALONE for mesh_dim in range(len(MESH))]
    asked: list[tuple[int, Route]] = [(size, alone(*kind)) for kind in kinds for size in (small, large)]
    chosen: list[tuple[int, TorchSide, list[Path]]] = []
    for size in sizes:
        torch_side = TorchSide(Space(MESH, (size, size)), torch.float32)
        paths = paths_of(torch_side, options.paths)
        chosen.append((size, torch_side, paths))
        asked += [(size, tuple(layout.placements for layout in path.layouts)) for path in paths]
    turns = measured(asked, options.rounds)
    seconds = list(map(min, *turns))
    links = {
        kind: calibration(seconds[2 * n : 2 * n + 2], *(busiest_of(alone(*kind), size) for size in (large, small)))
        for n, kind in enumerate(kinds)
    }
    model, by_kind = AlphaBeta(tuple(links["all_gather", dim] for dim in range(len(MESH)))), ByKind(links)
    for (kind, dim), link in links.items():
        print(f"{kind} over mesh dim {dim}: {link.latency * 1e6:.0f} us, {link.bandwidth / 1e9:.2f} GB/s")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {options.rounds} rounds")
    print(
        "| tensor | paths | alpha-beta | as gloo runs it | by kind | torch's cost model | measured again "
        "| slowest / fastest |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    position = len(kinds) * 2
    for size, torch_side, paths in chosen:
        here = slice(position, position + len(paths))
        times, position = seconds[here], position + len(paths)
        space = torch_side.space

        def on_gloo(step: Step, space: Space = space) -> float:
            return model.seconds(as_gloo(step, space))

        models: list[Callable[[Step], float]] = [model.seconds, on_gloo, by_kind.seconds, torch_side.seconds]
        found = [rank_correlation([path.seconds(one) for path in paths], times) for one in models]
        found.append(rank_correlation(*(turn[here] for turn in turns)))
        texts = " | ".join(f"{one:.3f}" for one in found)
        print(f"| {size}x{size} | {len(paths)} | {texts} | {max(times) / min(times):.1f}x |")
        for path, took in sorted(zip(paths, times, strict=True), key=lambda pair: pair[1]) if options.list else ():
            steps = " -> ".join(map(str, path.layouts))
            print(f"  {took * 1e6:9.0f} us, predicted {path.seconds(by_kind.seconds) * 1e6:9.0f} us  {steps}")


if __name__ == "__main__":
    main()
