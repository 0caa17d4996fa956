"""Trials per second of the pool, beside the same checks in the ways that torch offers, and where a trial's time goes.

    python benchmarks/trials_per_second.py [--ranks 2,4,8] [--jobs N] [--seconds 3] [--repeats 3] [--spawned 1]
                                           [--no-shares] [--json FILE] [--markdown]

One run measures all of them in turn, so that the ratios hold whatever the machine does meanwhile: each figure is the
median of the repeats, with the smallest and the largest, and a ratio is taken within a repeat. A trial is one row-,
column- or batch-wise embedding with one backward pass, every comparison included. Repeated shapes are in the cache of
DTensor's sharding propagation, new ones never are. ``--jobs`` pools work side by side, as those of a run do, each fed
by a thread; one pool alone is measured, too. ``--markdown`` prints the tables as
docs/reference/benchmarks.md has them, which also says what the columns mean.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import hypothesis
import torch
from hypothesis import Phase, settings
from other_ways import PLACEMENTS, ROWS, WAYS, Peer, draw_lookup, rate_of_spawned
from torch.distributed.tensor import Replicate

from strategies.embedding import FAMILY
from strategies.embedding.inputs import EMBEDDING
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.verdict import VerdictKind
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool
from verifier.oracle.reference import Reference, make_reference
from verifier.oracle.verdicts import judge
from verifier.planning.families import DrawContext
from verifier.planning.trials import plan_case

BATCH = 32
BATCHES = 4
"""Batches that each of several pools runs in a round; a round ends with the slowest."""
CLOCK = str(Path(__file__).with_name("rank_clock.py"))
SHAPES = {True: "repeated", False: "new"}
DRAWN = "drawn"
CASES = 12
COMBINATIONS = 16


# ------------------------------------------------------------------------------------------------------------ our side
def lookup_case(rows: int) -> OpCase:
    weight, indices = draw_lookup(rows)
    arguments = {"weight": weight.requires_grad_(), "input": indices}
    return OpCase("aten.embedding.default", "torch.nn.functional.embedding", (), arguments)


SAME = lookup_case(ROWS)


class Ours:
    """The pool on a mesh of so many ranks."""

    def __init__(self, ranks: int, imports: Sequence[str] = ()) -> None:
        self.mesh = MeshSpec((ranks,))
        self.pool = Pool(PoolKey.of(self.mesh), imports)
        self._number = 0

    def batch(self, repeated: bool) -> list[Trial]:
        """Return trials whose shapes are always the same, or have not been before."""
        made = []
        for _ in range(BATCH):
            self._number += 1
            case = SAME if repeated else lookup_case(ROWS + self._number)
            weight, indices = PLACEMENTS[self._number % len(PLACEMENTS)]
            made.append(Trial(case, self.mesh, ((weight,), (indices,)), (((Replicate(),),),), self._number))
        return made

    def drawn(self, seed: int) -> list[Trial]:
        """Return trials as a run of embeddings has them: all backward passes of the combinations of drawn cases."""
        context = DrawContext(self.mesh, (torch.float64,), (EMBEDDING,))
        found: list[Trial] = []

        @hypothesis.seed(seed)
        @settings(max_examples=CASES, database=None, deadline=None, phases=(Phase.generate,))
        @hypothesis.given(FAMILY.cases(context))
        def draw(case: OpCase) -> None:
            found.extend(plan_case(case, make_reference(case), self.mesh, COMBINATIONS, seed).trials)

        draw()
        return found

    def run(self, trials: Sequence[Trial], passing: bool = True) -> Iterator[dict[str, float]]:
        """Run trials, judge them, and yield of each but the first what the ranks spent their time on, on average.

        Those that do not come to their end, among drawn ones, are left out.
        """
        reference: Reference | None = None
        for number, observation in enumerate(self.pool.run(trials)):
            case = observation.trial.case
            if reference is None or reference.case is not case:
                reference = make_reference(case)
            verdict = judge(observation, reference)
            assert verdict.kind is not VerdictKind.TOOL_ERROR, verdict
            assert not passing or verdict.kind is VerdictKind.PASS, f"{observation.trial.combination}: {verdict}"
            if verdict.kind is not VerdictKind.PASS:
                continue
            spent: Counter[str] = Counter()
            for report in observation.reports:
                assert report is not None
                spent.update({str(name): seconds / len(observation.reports) for name, seconds in report.seconds})  # type: ignore[misc]
            if number:  # the first one's cycle has the wait for the batch in it
                yield dict(spent)

    def rate(self, repeated: bool, seconds: float) -> float:
        """Return trials per second."""
        done, spent = 0, 0.0
        while done == 0 or spent < seconds:
            trials = self.batch(repeated)  # drawing is not measured, as with the others
            started = time.perf_counter()
            for _ in self.run(trials):
                pass
            spent += time.perf_counter() - started
            done += len(trials)
        return done / spent

    def close(self) -> None:
        self.pool.close()


class SideBySide:
    """So many pools that work at the same time."""

    def __init__(self, ranks: int, jobs: int) -> None:
        self.pools = [Ours(ranks) for _ in range(jobs)]

    def rate(self, repeated: bool, seconds: float) -> float:
        """Return trials per second of all pools together."""
        done, spent = 0, 0.0
        with ThreadPoolExecutor(len(self.pools)) as threads:
            while done == 0 or spent < seconds:
                rounds = [[pool.batch(repeated) for _ in range(BATCHES)] for pool in self.pools]
                started = time.perf_counter()
                done += sum(threads.map(self._run, self.pools, rounds))
                spent += time.perf_counter() - started
        return done / spent

    @staticmethod
    def _run(pool: Ours, batches: Sequence[Sequence[Trial]]) -> int:
        for trials in batches:
            for _ in pool.run(trials):
                pass
        return sum(map(len, batches))

    def close(self) -> None:
        for pool in self.pools:
            pool.close()


# -------------------------------------------------------------------------------------------------------------- figures
@dataclass(frozen=True)
class Figure:
    """A median with its spread over the repeats."""

    median: float
    smallest: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        digits = 0 if self.median >= 100 else 1 if self.median >= 10 else 2
        return f"{self.median:.{digits}f} ({self.smallest:.{digits}f}-{self.largest:.{digits}f})"


@dataclass(frozen=True)
class Speed:
    """How fast so many pools side by side are, and how many times as fast as another way."""

    ranks: int
    shapes: str
    pools: int
    way: str
    ours: Figure
    theirs: Figure
    ratio: Figure


@dataclass(frozen=True)
class Share:
    """Per cent of a trial, as one rank spends it. ``own`` is setup, exchange, comparing and other: not waiting."""

    ranks: int
    shapes: str
    clock: str
    milliseconds: Figure
    dispatch: Figure
    propagation: Figure
    collectives: Figure
    waiting: Figure
    setup: Figure
    exchange: Figure
    comparing: Figure
    other: Figure
    own: Figure


def compare_speed(ranks: int, jobs: int, seconds: float, repeats: int, spawned: int) -> list[Speed]:
    """Measure one pool, ``jobs`` pools side by side, and the other ways in turn."""
    ours: dict[str, Ours | SideBySide] = {_name(1): Ours(ranks)}
    if jobs > 1:
        ours[_name(jobs)] = SideBySide(ranks, jobs)
    sides = {**ours, **{way: Peer(way, ranks) for way in WAYS}}
    rates: dict[tuple[str, bool], list[float]] = {}
    try:
        for repeated in SHAPES:
            for side in sides.values():
                side.rate(repeated, 0.0)  # fills caches, loads what is loaded when it is first used
        for _ in range(repeats):
            for repeated in SHAPES:
                for way, side in sides.items():
                    rates.setdefault((way, repeated), []).append(side.rate(repeated, seconds))
            for _ in range(spawned):
                rates.setdefault(("spawned", True), []).append(rate_of_spawned(ranks))
    finally:
        for side in sides.values():
            side.close()
    found = []
    for pools in dict.fromkeys((1, jobs)):
        for (way, repeated), theirs in rates.items():
            if way not in (_name(pools), _name(max(jobs, 2))):
                own = rates[_name(pools), repeated]
                each = len(theirs) // len(own)  # several spawned checks beside one turn of the pool
                ratios = Figure.of([own[number // each] / rate for number, rate in enumerate(theirs)])
                speed = Speed(ranks, SHAPES[repeated], pools, way, Figure.of(own), Figure.of(theirs), ratios)
                found.append(speed)
    return sorted(found, key=lambda speed: list(SHAPES.values()).index(speed.shapes))


def _name(pools: int) -> str:
    return "1 pool" if pools == 1 else f"{pools} pools"


def share_time(ranks: int, seconds: float, repeats: int, clock: str) -> list[Share]:
    """Measure what the ranks of a pool spend their time on, by the ``wall`` clock or in ``cpu`` time."""
    os.environ["RANK_CLOCK"] = clock
    ours = Ours(ranks, [CLOCK])
    found = []
    try:
        for repeated in SHAPES:
            ours.rate(repeated, 0.0)
        seeds = itertools.count()
        sources: dict[str, Callable[[], list[Trial]]] = {
            **{shapes: functools.partial(ours.batch, repeated) for repeated, shapes in SHAPES.items()},
            DRAWN: lambda: ours.drawn(next(seeds)),
        }
        for shapes, source in sources.items():
            rounds: list[dict[str, float]] = []
            for _ in range(repeats):
                spent: Counter[str] = Counter()
                trials, started = 0, time.perf_counter()
                while not trials or time.perf_counter() - started < seconds:
                    for each in ours.run(source(), passing=shapes != DRAWN):
                        spent.update(each)  # type: ignore[arg-type]
                        trials += 1
                rounds.append({**in_per_cent(spent), "milliseconds": 1000 * spent["cycle"] / trials})
            figures = {name: Figure.of([each[name] for each in rounds]) for name in rounds[0]}
            found.append(Share(ranks, shapes, clock, **figures))
    finally:
        del os.environ["RANK_CLOCK"]
        ours.close()
    return found


def in_per_cent(spent: Counter[str]) -> dict[str, float]:
    """Return the shares of a trial's time; they add up to 100 without ``own``."""
    torchs = sum(spent[phase] for phase in ("forward", "backward", "gather", "gather gradient"))
    parts = {
        "dispatch": torchs - spent["propagation"] - spent["collectives"],
        "propagation": spent["propagation"],
        "collectives": spent["collectives"],
        "waiting": spent["waiting"],
        "setup": spent["setup"],
        "exchange": spent["exchange"] - spent["waiting"],
        "comparing": spent["compare"],
    }
    parts["other"] = spent["cycle"] - sum(parts.values())
    parts["own"] = parts["setup"] + parts["exchange"] + parts["comparing"] + parts["other"]
    return {name: 100 * part / spent["cycle"] for name, part in parts.items()}


# -------------------------------------------------------------------------------------------------------------- tables
def table(header: Sequence[str], rows: Sequence[Sequence[object]], markdown: bool) -> str:
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *texts, strict=True)]
    lines = [[name.ljust(width) for name, width in zip(header, widths, strict=True)]]
    if markdown:
        lines.append(["-" * width for width in widths])
    lines += [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in texts]
    return "\n".join(f"| {' | '.join(line)} |" if markdown else "  ".join(line).rstrip() for line in lines)


def speed_table(speeds: Sequence[Speed], markdown: bool) -> str:
    header = ("ranks", "shapes", "pools", "trials/s", "against", "its checks/s", "pools / it")
    return table(header, [(s.ranks, s.shapes, s.pools, s.ours, s.way, s.theirs, s.ratio) for s in speeds], markdown)


def share_table(shares: Sequence[Share], markdown: bool) -> str:
    names = ("dispatch", "propagation", "collectives", "waiting", "setup", "exchange", "comparing", "other", "own")
    header = ("ranks", "shapes", "clock", "ms a trial", *(f"{name} %" for name in names))
    rows = [
        (s.ranks, s.shapes, s.clock, s.milliseconds, *(f"{getattr(s, name).median:.0f}" for name in names[:-1]), s.own)
        for s in shares
    ]
    return table(header, rows, markdown)


def numbers(text: str) -> list[int]:
    ranks = [int(part) for part in text.split(",")]
    if not ranks or min(ranks) < 2 or max(ranks) > 9:
        raise ValueError
    return ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=numbers, default=[2, 4, 8], metavar="N,N", help="2 to 9 each [default: 2,4,8]")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cores, help="pools side by side [default: one for each core]")
    parser.add_argument("--no-shares", action="store_true", help="leave out where a trial's time goes")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each turn [default: 3]")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each side [default: 3]")
    parser.add_argument("--spawned", type=int, default=1, help="checks a turn that spawn their processes [default: 1]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there as well")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    arguments = parser.parse_args()
    if arguments.seconds <= 0 or arguments.repeats < 1 or arguments.spawned < 0 or arguments.jobs < 1:
        parser.error("--seconds has to be positive, --repeats and --jobs at least 1, --spawned at least 0")
    torch.set_num_threads(1)
    machine = f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    turns = f"{arguments.repeats} turns of {arguments.seconds:g} s; median (smallest-largest)"
    print(f"{machine}, {turns}\n", flush=True)
    speeds: list[Speed] = []
    shares: list[Share] = []
    status = 0
    try:
        for ranks in arguments.ranks:
            say(f"{ranks} ranks")
            speeds += compare_speed(ranks, arguments.jobs, arguments.seconds, arguments.repeats, arguments.spawned)
            for clock in () if arguments.no_shares else ("wall", "cpu"):
                shares += share_time(ranks, arguments.seconds, arguments.repeats, clock)
    except KeyboardInterrupt:
        say("interrupted: what there is until now")
        status = 130
    print(speed_table(speeds, arguments.markdown), end="\n\n")
    if shares:
        print(share_table(shares, arguments.markdown), end="\n\n")
    print(f"load at the end {os.getloadavg()[0]:.1f}")
    if arguments.json:
        parts = {"speeds": speeds, "shares": shares}
        figures = {name: [asdict(each) for each in part] for name, part in parts.items()}
        text = json.dumps({"machine": machine, "turns": turns, "complete": status == 0, **figures}, indent=1)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    sys.exit(status)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
