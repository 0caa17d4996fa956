"""The share of a trial's time that goes into recording its redistributions.

    python benchmarks/recording_share.py [--families embedding,redistribution,chains] [--mesh 2x2] [--seconds 60]

Each trial is run three times in a row on the same ranks: without any recording, with the planned steps, and with all
that is recorded (the collectives that were issued, peak and seconds as well). Ratios are those of sums over the same
trials in one run, so that what else the machine does meanwhile is in all three.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import hypothesis
import torch
from hypothesis import Phase, settings

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.verdict import VerdictKind
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.planning.families import DrawContext, Family, installed_families
from verifier.planning.trials import plan_case

SWITCH = str(Path(__file__).with_name("recording_switch.py"))
WAYS = ("nothing", "steps", "all")
CASES, COMBINATIONS = 8, 12


def drawn(family: Family, mesh: MeshSpec, seed: int) -> list[Trial]:
    """Return trials as a run of the family has them, each three times."""
    context = DrawContext(mesh, (torch.float64,), family.select("*"))
    found: list[Trial] = []

    @hypothesis.seed(seed)
    @settings(max_examples=CASES, database=None, deadline=None, phases=(Phase.generate,))
    @hypothesis.given(family.cases(context))
    def draw(case: OpCase) -> None:
        found.extend(plan_case(case, make_reference(case), mesh, COMBINATIONS, seed).trials)

    draw()
    return [trial for trial in found for _ in WAYS]


def measured(pool: Pool, trials: Sequence[Trial]) -> Iterator[tuple[list[Counter[str]], int]]:
    """Yield what rank 0 spent on each trial in the three ways, and the redistributions of its call, if it passed."""
    row: list[Counter[str]] = []
    known = None
    for number, observation in enumerate(pool.run(trials)):
        if known is None or known.case is not observation.trial.case:
            known = make_reference(observation.trial.case)
        passed = judge(observation, known).kind is VerdictKind.PASS
        report = observation.reports[0]
        if not number % len(WAYS):
            row = []
        if report is not None and passed and number:  # the first one's cycle has the wait for the batch in it
            row.append(Counter({str(name): seconds for name, seconds in report.seconds}))  # type: ignore[misc]
        if len(row) == len(WAYS) and {int(one["way"]) for one in row} == {0, 1, 2}:
            assert report is not None
            begun = sum(step.begins and step.phase in ("forward", "backward") for step in report.redistributions)
            yield sorted(row, key=lambda one: one["way"]), begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default="embedding,redistribution,chains")
    parser.add_argument("--mesh", default="2x2")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each family")
    options = parser.parse_args()
    mesh = MeshSpec.parse(options.mesh)
    print(f"mesh {mesh}, gloo, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print("| family | trials | redistributions each | ms each | steps, CPU | all, CPU | steps, wall | all, wall |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in options.families.split(","):
        pool = Pool(PoolKey.of(mesh), [SWITCH])
        sums = [Counter[str]() for _ in WAYS]
        trials = redistributions = seed = 0
        try:
            started = time.perf_counter()
            while time.perf_counter() - started < options.seconds:
                for row, begun in measured(pool, drawn(installed_families()[name], mesh, seed)):
                    for total, one in zip(sums, row, strict=True):
                        total.update(one)
                    trials, redistributions = trials + 1, redistributions + begun
                seed += 1
        finally:
            pool.close()
        shares = [
            f"{100 * (1 - sums[0][clock] / sums[way][clock]):.1f} %" for clock in ("cpu", "cycle") for way in (1, 2)
        ]
        each = 1000 * sums[2]["cycle"] / trials
        print(f"| {name} | {trials} | {redistributions / trials:.2f} | {each:.1f} | {' | '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main()
