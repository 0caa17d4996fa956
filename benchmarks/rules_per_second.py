"""Combinations per second of ``python -m verifier rules``, beside those of the validator that comes with torch.

    python benchmarks/rules_per_second.py [--ops nn.functional.embedding add mul mm] [--repeat 3] [--jobs 0 1 2]

Both run as a user runs them, one after the other on each op, so that the ratios hold whatever the machine does
meanwhile: ``python -m torch.distributed.tensor._ops.strategy_validation --device cpu --world-size 2 --op OP`` and
``python -m verifier rules OP --world-size 2``.

What a combination is
    The validator's is one choice of input placements and of one output placement, tried on one sample; results of an
    op with several have the same placement. It leaves out inputs that are all replicated. Ours is one choice of input
    placements and of the placement of one result, with a verdict, for one sample at one size; all that are replicated
    are among them, and so is ``Partial(product)``, which the validator does not know. Values do not count: the
    validator tries a combination on one to three sets of values, we on up to seven at each size, and a combination
    that the first one refutes costs either side less than one that holds.

What is in the seconds
    Neither has the start of Python and imports. The validator's are those in the summary that it prints, to 0.1 s: from
    the call of ``compare_operator`` on, that is torch's generation of the samples, the capture of what they dispatch
    to, DTensor's rules and all comparisons. Ours come on two clocks. ``checks`` sums over samples the time to draw
    values, to read DTensor's claims, to run, to classify and to look for missing rules. ``wall`` is what the command
    states as ``seconds``: the above, and generating and capturing the samples, and sending the results. With 0 jobs it
    is the same span as the validator's. With more it begins when the workers are ready, and they share the samples of
    an op: the validator has one process, we have as many as the user gives us. Not in it is the time in which wrong
    rules are tried on real ranks, which the validator does not do. The column ``command`` is the whole command by the
    clock on the wall, of which ours also writes a report, and ``cpu`` the share of that which it spent on a core: much
    less than 100 % means that other programs were in the way.

The row ``all together`` is one command of ours on all ops beside the sum of the validator's seconds: it is serial. With
``--repeat`` the two sides alternate, round by round. On a busy machine trust the ratios, and those only with repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

VALIDATOR = "torch.distributed.tensor._ops.strategy_validation"
TARGETS = {"nn.functional.embedding": 300, "add": 100, "mul": 100, "mm": 100}
TOGETHER = "all together"


@dataclass(frozen=True)
class Measurement:
    """What one command did.

    Parameters
    ----------
    combinations
        Number of combinations that it gave a verdict on.
    seconds
        Time by each clock, in seconds.
    command
        Wall time of the whole command, in seconds.
    cpu
        CPU time of the whole command, that of its workers included, in seconds.
    """

    combinations: int
    seconds: Mapping[str, float]
    command: float
    cpu: float


def run(command: Sequence[str], statuses: Sequence[int]) -> tuple[str, float, float]:
    """Return the stdout of a command, its wall time and its CPU time.

    Ends the benchmark if the exit status is none of ``statuses``. Both sides get one thread: our workers have one
    anyway, and tensors of a few elements are no faster with more.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, OMP_NUM_THREADS="1"))
    seconds = time.perf_counter() - started
    if done.returncode not in statuses:
        raise SystemExit(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, seconds, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measure_validator(op: str) -> Measurement:
    """Return what torch's validator did on ``op``, as its own output says."""
    text, command, cpu = run(
        [sys.executable, "-m", VALIDATOR, "--device", "cpu", "--world-size", "2", "--op", op], statuses=(0,)
    )
    combinations = re.search(r"Combinations: (\d+)$", text, re.MULTILINE)
    seconds = re.search(r"^Total +\d+ +\d+ +\d+ +([\d.]+)s$", text, re.MULTILINE)
    if combinations is None or seconds is None:
        raise SystemExit(f"torch's validator tests nothing of {op}:\n{text}")
    return Measurement(int(combinations[1]), {"validator": float(seconds[1])}, command, cpu)


def measure_ours(ops: Sequence[str], jobs: int, out: Path) -> Measurement:
    """Return what ``python -m verifier rules`` did on ``ops``, as its JSON says."""
    options = ["--world-size", "2", "--jobs", str(jobs), "--format", "json", "--out", str(out)]
    # 1 is findings: verdicts on the op, no failure
    text, command, cpu = run([sys.executable, "-m", "verifier", "rules", *ops, *options], statuses=(0, 1))
    found = json.loads(text)
    if not found["complete"] or found["tool_errors"]:
        raise SystemExit(f"the rule check of {', '.join(ops)} failed: {found['tool_errors'] or 'incomplete'}")
    checks = sum(op["seconds"] for op in found["ops"].values())
    return Measurement(found["combinations"], {"checks": checks, "wall": found["seconds"]}, command, cpu)


def rates(measured: Sequence[Measurement], clock: str) -> list[float]:
    """Return combinations per second by ``clock``, run by run; 0 where the time was too short to be told."""
    return [one.combinations / one.seconds[clock] if one.seconds[clock] else 0.0 for one in measured]


def span(values: Sequence[float], digits: int = 0) -> str:
    """Return the median of ``values``, and the range if there is more than one.

    >>> span([3.0, 1.0, 2.0])
    '2 (1..3)'
    """
    middle = f"{statistics.median(values):,.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):,.{digits}f}..{max(values):,.{digits}f})"


def line(op: str, who: str, measured: Sequence[Measurement], clock: str, ratio: str = "", target: str = "") -> str:
    combinations = statistics.median(one.combinations for one in measured)
    seconds = span([one.seconds[clock] for one in measured], 2)
    command = span([one.command for one in measured], 1)
    rate = span(rates(measured, clock))
    share = sum(one.cpu for one in measured) / sum(one.command for one in measured)
    figures = f"{combinations:12,.0f} {seconds:>20} {rate:>26} {ratio:>18} {target:>7} {command:>19} {share:>5.0%}"
    return f"{op:26} {who:18} {figures}"


def show(op: str, theirs: Sequence[Measurement], ours: Mapping[int, Sequence[Measurement]]) -> None:
    """Print the lines of one op: the validator's, then ours by number of jobs and clock."""
    print(line(op, "validator", theirs, "validator"))
    target = TARGETS.get(op)
    for jobs, measured in ours.items():
        for clock in ("checks", "wall"):
            if clock == "checks" and jobs > 1:
                continue  # a sum over workers that run side by side is no time to divide by
            pairs = zip(rates(measured, clock), rates(theirs, "validator"), strict=True)
            ratios = [mine / other if other else float("inf") for mine, other in pairs]
            stated = "" if target is None else f"{target}x"
            print(line("", f"{jobs} jobs, {clock}", measured, clock, span(ratios) + "x", stated))


def measure_all(ops: Sequence[str], jobs: Sequence[int], rounds: int, out: Path) -> None:
    """Measure in rounds and print: each op by itself, then all of them in one command of ours."""
    theirs: dict[str, list[Measurement]] = defaultdict(list)
    ours: dict[str, dict[int, list[Measurement]]] = defaultdict(lambda: defaultdict(list))
    for done in range(rounds):
        for op in ops:
            theirs[op].append(measure_validator(op))
            for number in jobs:
                ours[op][number].append(measure_ours([op], number, out))
            print(f"round {done + 1} of {rounds}: {op} is measured", file=sys.stderr)
        if len(ops) > 1:
            theirs[TOGETHER].append(total([theirs[op][-1] for op in ops]))
            for number in jobs:
                ours[TOGETHER][number].append(measure_ours(ops, number, out))
    for op in theirs:
        show(op, theirs[op], ours[op])


def total(parts: Sequence[Measurement]) -> Measurement:
    """Return what serial commands did together."""
    return Measurement(
        sum(one.combinations for one in parts),
        {clock: sum(one.seconds[clock] for one in parts) for clock in parts[0].seconds},
        sum(one.command for one in parts),
        sum(one.cpu for one in parts),
    )


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", default=list(TARGETS), help="as OpInfo names them")
    parser.add_argument("--repeat", type=int, default=1, help="rounds; the median and the range are shown")
    parser.add_argument("--jobs", type=int, nargs="+", default=sorted({0, 1, len(os.sched_getaffinity(0))}))
    arguments = parser.parse_args()
    if arguments.repeat < 1 or min(arguments.jobs) < 0:
        parser.error("--repeat must be at least 1 and --jobs at least 0")
    cores = len(os.sched_getaffinity(0))
    print(f"torch {torch.__version__}, {cores} cores, load {os.getloadavg()[0]:.1f}, rounds: {arguments.repeat}")
    print(
        f"{'op':26} {'who, clock':18} {'combinations':>12} {'seconds':>20} {'combinations/s':>26} {'ratio':>18} "
        f"{'target':>7} {'command':>19} {'cpu':>5}"
    )
    with tempfile.TemporaryDirectory() as out:
        measure_all(arguments.ops, arguments.jobs, arguments.repeat, Path(out))
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
