"""How often torch's planners of redistributions are beaten, by how much, and by which optimum, over all ordered pairs.

It prints the table of ``docs/explanations/redistribution.md``, the seconds and the memory of each process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Sequence

from verifier.redistribution.judging import Judge, Judgement
from verifier.report.paths.asking import Question, judge_for
from verifier.report.paths.words import ratio_text

MESHES = ("2x2", "2x3", "2x4", "2x2x2")
EVEN, UNEVEN = "1152,1152", "1151,1147"
HEADER = (
    "mesh", "shape", "planner", "paths", "torch's model, torch's steps", "torch's model, all steps",
    "alpha-beta, all steps", "bytes over the bound", "memory over the ends",
)  # fmt: skip


def cell(judgements: Sequence[Judgement], name: str) -> str:
    """Return how many paths cost over 1 % more than an optimum, and the median and worst ratio of these."""
    ratios = [one.regrets[name].ratio for one in judgements if one.regrets[name].is_beaten]
    finite = [ratio for ratio in ratios if ratio != float("inf")]
    if not ratios:
        return "0"
    return f"{len(ratios):,}: {ratio_text(statistics.median_high(ratios))}, {ratio_text(max(finite, default=1.0))}"


def rows(asked: tuple[str, str]) -> tuple[list[tuple[str, ...]], float, int]:
    """Return a row for each of torch's planners, the seconds that they took, and the most memory in bytes."""
    mesh, shape = asked
    started = time.perf_counter()
    judge: Judge = judge_for(Question(mesh, shape))
    found = []
    for planner in ("default", "graph"):
        paths = [one for one in judge.all_pairs(planner) if one.path is not None]  # type: ignore[arg-type]
        cells = [cell(paths, name) for name in ("planner", "step", "model", "bytes", "memory")]
        found.append((mesh, shape.replace(",", "x"), planner, f"{len(paths):,}", *cells))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found, time.perf_counter() - started, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--meshes", default=",".join(MESHES))
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    asked = [(mesh, shape) for shape in (EVEN, UNEVEN) for mesh in options.meshes.split(",")]
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=1) as pool:
        results = pool.map(rows, asked[::-1], chunksize=1)[::-1]
    print("| " + " | ".join(HEADER) + " |")
    print("|" + " --- |" * len(HEADER))
    for found, _, _ in results:
        for row in found:
            print("| " + " | ".join(row) + " |")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    peak = max(peak for _, _, peak in results) / 2**20
    seconds = time.perf_counter() - started
    print(
        f"\n{seconds:.0f} s on {options.jobs} processes, {used.ru_utime + used.ru_stime:.0f} s of CPU; {peak:.0f} MiB"
    )


if __name__ == "__main__":
    main()
