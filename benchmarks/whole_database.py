"""Trials per second of the pool on torch's whole database of ops, beside threads that do as its test_dtensor_ops.

    python benchmarks/whole_database.py [--ranks 4] [--ops GLOB,GLOB] [--minutes N] [--samples N] [--forward]
                                        [--rest SECONDS] [--json FILE] [--markdown]

Every op that takes float32, every sample of it and every combination that torch's own converter makes. Op by op, the
threads go until a combination fails, as that test does, and then the pool runs what they completed, and by itself what
comes after it; so the machine's load is the same for both. docs/reference/benchmarks.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import random
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from opinfo_ops import Call, calls_of, names
from threaded_ops import OpRun, ThreadedOps, even_combinations
from torch.distributed.tensor import Replicate
from trials_per_second import say, table

from verifier.core.arguments import tensor_arguments
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.torch_internals.names import pytree

CHUNK = 8
"""Trials after which the time for what the threads did not come to is looked at."""
ENOUGH = 10
"""Combinations from which on an op has a ratio of its own."""


@dataclass(frozen=True)
class Turn:
    """Both sides with one op: what the threads completed, and then what only the pool ran.

    ``generator`` is what the generator of samples raised, if it did.
    """

    op: str
    samples: int
    combinations: int
    generator: str
    threads: OpRun
    seconds: float
    verdicts: Mapping[str, int]
    rest_seconds: float
    rest_verdicts: Mapping[str, int]


# ------------------------------------------------------------------------------------------------------------ our side
def trials_of(name: str, place: int, call: Call, mesh: MeshSpec, backward: bool) -> Iterator[Trial]:
    """Yield a trial for each combination of torch's converter, with one backward pass."""
    case = OpCase(name, f"opinfo_ops.op_{place}", call.args, call.kwargs, exact=False)
    reference = make_reference(case)
    backward = backward and bool(reference.wanted) and not reference.no_gradient
    outputs = reference.differentiable if backward else []
    cotangents = (tuple((Replicate(),) for _ in outputs),) if outputs else ()
    for number, choice in enumerate(even_combinations(call, mesh.world_size)):
        yield Trial(case, mesh, tuple((placement,) for placement in choice), cotangents, number)


def run(pool: Pool, trials: Sequence[Trial]) -> tuple[float, dict[str, int]]:
    """Return how long trials and judging them took, and how many had which verdict."""
    started = time.perf_counter()
    verdicts: Counter[str] = Counter()
    reference = None
    for observation in pool.run(trials):
        if reference is None or reference.case is not observation.trial.case:
            reference = make_reference(observation.trial.case)
        verdicts[judge(observation, reference).kind.value] += 1
    return time.perf_counter() - started, dict(verdicts)


def can_be_distributed(call: Call) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(leaf, torch.Tensor)]
    return 0 < len(tensors) == len(tensor_arguments(call.args, call.kwargs))


def take_turns(threads: ThreadedOps, pool: Pool, place: int, options: argparse.Namespace) -> Turn:
    """Test an op on both sides."""
    mesh, name = MeshSpec((options.ranks,)), names()[place]
    calls, generator = calls_of(place, options.samples)
    combinations = sum(len(even_combinations(call, options.ranks)) for call in calls)
    trials: list[Trial] = []
    for call in calls:
        if can_be_distributed(call):  # else the threads fail, so that they complete nothing that is not in this list
            trials.extend(trials_of(name, place, call, mesh, not options.forward))
    done = threads.run(place, options.samples)
    seconds, verdicts = run(pool, trials[: done.done])
    rest = trials[done.done :]
    rest_seconds, rest_verdicts = 0.0, Counter[str]()
    while rest and rest_seconds < options.rest:
        took, found = run(pool, rest[:CHUNK])
        rest_seconds, rest = rest_seconds + took, rest[CHUNK:]
        rest_verdicts.update(found)
    rest_found = dict(rest_verdicts)
    return Turn(name, len(calls), combinations, generator, done, seconds, verdicts, rest_seconds, rest_found)


# -------------------------------------------------------------------------------------------------------------- figures
def summary(turns: Sequence[Turn], markdown: bool) -> str:
    """Return the table of both sides."""
    done = sum(turn.threads.done for turn in turns)
    failed = sum(bool(turn.threads.failure) for turn in turns)
    verdicts, every = Counter[str](), Counter[str]()
    for turn in turns:
        verdicts.update(turn.verdicts)
        every.update(turn.verdicts)
        every.update(turn.rest_verdicts)
    seconds = sum(turn.seconds for turn in turns)
    some = sum(turn.threads.done > 0 for turn in turns)
    theirs = Side(some, done, sum(turn.threads.seconds for turn in turns))
    ours = Side(some, sum(verdicts.values()), seconds)
    all_theirs = Side(len(turns), done + failed, sum(turn.threads.whole for turn in turns))
    tried = sum(bool(turn.verdicts or turn.rest_verdicts) for turn in turns)
    all_ours = Side(tried, sum(every.values()), seconds + sum(turn.rest_seconds for turn in turns))
    header = ("combinations", "by", "ops", "number", "seconds", "a second", "pool / threads", "the pool's verdicts")
    rows = [
        ("that the threads complete", "threads", *theirs.cells(), "", ""),
        ("that the threads complete", "pool", *ours.cells(), ours.over(theirs), counts(verdicts)),
        ("that are begun at all", "threads", *all_theirs.cells(), "", ""),
        ("that are begun at all", "pool", *all_ours.cells(), all_ours.over(all_theirs), counts(every)),
    ]
    return table(header, rows, markdown)


@dataclass(frozen=True)
class Side:
    ops: int
    combinations: int
    seconds: float

    def cells(self) -> tuple[str, str, str, str]:
        rate = f"{self.combinations / self.seconds:.1f}" if self.seconds else ""
        return f"{self.ops:,}", f"{self.combinations:,}", f"{self.seconds:.1f}", rate

    def over(self, other: Side) -> str:
        if not (self.seconds and other.seconds and other.combinations):
            return ""
        return f"{self.combinations / self.seconds / (other.combinations / other.seconds):.2f}"


def counts(verdicts: Mapping[str, int]) -> str:
    ordered = sorted(verdicts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {kind}" for kind, count in ordered)


def remarks(turns: Sequence[Turn]) -> Iterator[str]:
    """Yield what the table does not have: the ratio by op, and the ops that did not come to their end."""
    ratios = [turn.threads.seconds / turn.seconds for turn in turns if turn.threads.done >= ENOUGH]
    if len(ratios) > 1:
        low, middle, high = statistics.quantiles(ratios, n=4)
        yield f"pool / threads, by op: median {middle:.2f}, quartiles {low:.2f} and {high:.2f}, of {len(ratios)} ops"
    failures = {turn.op: turn.threads.failure for turn in turns if turn.threads.failure}
    kinds = Counter(failure.partition(":")[0] for failure in failures.values())
    at_once = sum(turn.threads.done == 0 for turn in turns if turn.threads.failure)
    yield f"{len(failures)} of {len(turns)} ops fail on the threads, {at_once} at once: {counts(kinds) or 'none'}"
    for kind in ("crash", "hang"):
        named = [f"{op} ({failure})" for op, failure in failures.items() if failure.startswith(f"{kind}: ")]
        if named:
            yield f"{kind} of the threads: {'; '.join(named)}"
    ended = [f"{turn.op} ({turn.samples} samples)" for turn in turns if turn.generator]
    if ended:
        yield f"ops whose generator of samples fails at these sizes: {', '.join(ended)}"
    there_are = sum(turn.combinations for turn in turns)
    left = there_are - sum(sum([*turn.verdicts.values(), *turn.rest_verdicts.values()]) for turn in turns)
    yield f"{left:,} of {there_are:,} combinations not run by the pool: what is no DTensor, or no time left"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="of both sides [default: 4]")
    parser.add_argument("--ops", default="*", metavar="GLOB,GLOB", help="only ops of such names")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="N", help="begin no op after N minutes")
    parser.add_argument("--samples", type=int, metavar="N", help="the first N samples of each op only")
    parser.add_argument("--forward", action="store_true", help="no backward pass on either side")
    parser.add_argument("--rest", type=float, default=5.0, metavar="SECONDS",
                        help="of an op, for what comes after a failure of the threads [default: 5]")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of each op there as well")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options = parser.parse_args()
    if options.ranks < 2 or (options.samples is not None and options.samples < 1):
        parser.error("--ranks has to be at least 2, --samples at least 1")
    globs = options.ops.split(",")
    places = [place for place, name in names().items() if any(fnmatch.fnmatchcase(name, glob) for glob in globs)]
    if not places:
        parser.error(f"--ops {options.ops}: no op that takes float32 is called so")
    random.Random(0).shuffle(places)  # what is done when time is over is a fair sample
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch has many for unusual calls
    machine = f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    backward = "without backward passes" if options.forward else "with a backward pass"
    print(f"{machine}, {options.ranks} ranks, {len(places)} ops, {backward}\n", flush=True)
    threads = ThreadedOps(options.ranks, not options.forward)
    pool = Pool(PoolKey.of(MeshSpec((options.ranks,))), ["opinfo_ops"])
    turns: list[Turn] = []
    status = 0
    try:
        take_turns(threads, pool, next(p for p, name in names().items() if name == "sigmoid"), options)  # warms up
        until = time.monotonic() + 60 * options.minutes
        for number, place in enumerate(places, 1):
            if time.monotonic() > until:
                break
            turn = take_turns(threads, pool, place, options)
            turns.append(turn)
            ended = f", then {turn.threads.failure.splitlines()[0][:80]}" if turn.threads.failure else ""
            say(f"{number}/{len(places)} {turn.op}: {turn.threads.done} of {turn.combinations} combinations, threads "
                f"{turn.threads.seconds:.2f} s{ended}; pool {turn.seconds:.2f} s, {counts(turn.verdicts)}; "
                f"rest {turn.rest_seconds:.2f} s, {counts(turn.rest_verdicts)}")  # fmt: skip
    except KeyboardInterrupt:
        say("interrupted: what there is until now")
        status = 130
    finally:
        threads.close()
        pool.close()
    print(summary(turns, options.markdown), *remarks(turns), f"load at the end {os.getloadavg()[0]:.1f}", sep="\n\n")
    if options.json:
        figures = {"machine": machine, "complete": status == 0, "ops": [asdict(turn) for turn in turns]}
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    sys.exit(status)


if __name__ == "__main__":
    main()
