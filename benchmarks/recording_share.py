"""The share of a trial's time that goes into recording its redistributions.

    python benchmarks/recording_share.py [--families embedding,redistribution,chains] [--mesh 2x2] [--seconds 60]

The time of the code that records is measured in the same trials as the whole, on rank 0, which records most. Shares are
those of sums over all trials that passed. CPU time is that of the rank's main thread, in which waiting does not count;
in wall time other processes of a busy machine are in both.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
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

CLOCK = str(Path(__file__).with_name("recording_clock.py"))
CASES, COMBINATIONS = 8, 12


def drawn(family: Family, mesh: MeshSpec, seed: int) -> list[Trial]:
    """Return trials as a run of the family has them."""
    context = DrawContext(mesh, (torch.float64,), family.select("*"))
    found: list[Trial] = []

    @hypothesis.seed(seed)
    @settings(max_examples=CASES, database=None, deadline=None, phases=(Phase.generate,))
    @hypothesis.given(family.cases(context))
    def draw(case: OpCase) -> None:
        found.extend(plan_case(case, make_reference(case), mesh, COMBINATIONS, seed).trials)

    draw()
    return found


def measured(pool: Pool, trials: list[Trial]) -> Counter[str]:
    """Return what rank 0 spent on the trials that passed, their number, and the redistributions of their calls."""
    spent: Counter[str] = Counter()
    known = None
    for number, observation in enumerate(pool.run(trials)):
        if known is None or known.case is not observation.trial.case:
            known = make_reference(observation.trial.case)
        report = observation.reports[0]
        if report is None or judge(observation, known).kind is not VerdictKind.PASS or not number:
            continue  # the first one's cycle has the wait for the batch in it
        spent.update({str(name): seconds for name, seconds in report.seconds})  # type: ignore[misc]
        spent["trials"] += 1
        spent["begun"] += sum(step.begins and step.phase in ("forward", "backward") for step in report.redistributions)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default="embedding,redistribution,chains")
    parser.add_argument("--mesh", default="2x2")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each family")
    options = parser.parse_args()
    mesh = MeshSpec.parse(options.mesh)
    print(f"mesh {mesh}, gloo, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print("| family | trials | redistributions each | ms each | recording, CPU time | wall time |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in options.families.split(","):
        pool = Pool(PoolKey.of(mesh), [CLOCK])
        spent: Counter[str] = Counter()
        seed, started = 0, time.perf_counter()
        try:
            while time.perf_counter() - started < options.seconds:
                spent += measured(pool, drawn(installed_families()[name], mesh, seed))
                seed += 1
        finally:
            pool.close()
        trials = spent["trials"]
        shares = [
            f"{100 * spent[part] / spent[whole]:.1f} %"
            for part, whole in (("recording", "cpu"), ("recording wall", "cycle"))
        ]
        begun, each = spent["begun"] / trials, 1000 * spent["cycle"] / trials
        print(f"| {name} | {trials} | {begun:.2f} | {each:.1f} | {' | '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main()
