"""Many trials of mixed ops with a fault now and then: the others' verdicts must not change, nor memory grow.

    python benchmarks/endurance.py [--trials 10000] [--every 200] [--ranks 4] [--seed 0]

First all trials run without faults, then again with one fault of each kind in turn, every so many trials: a rank that
raises, that is killed, that aborts, that hangs in Python, that leaves out a collective, that runs out of memory, or
that is killed from outside at whatever moment. Every other trial must have the verdict, and the placements of its
results, that it had without faults, and no trial with a fault may pass. The memory of the controller and of the ranks,
and the threads and descriptors of the ranks, are sampled at every batch: once a tenth of the trials are done (1,000 of
10,000) none of them may grow by more than 10 %, in either run. Faults have ranks replaced, which start anew; without
faults the same ranks live throughout, so that what grows slowly shows there. The last line is a row of a Markdown
table. Exit status 1 if anything is violated, 130 if it was interrupted; what was done until then is compared and
printed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Fate, Observation
from verifier.core.verdict import VerdictKind
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool
from verifier.meshes.processes import PoolError, Starter
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.planning.trials import plan_case

FAULTS = ("raise:1", "kill:0", "abort:1", "skip:1", "exhaust:0", "hang:1", "bad_alloc:1", "from outside")
TRIAL_LIMIT = 20.0
RANK_MEMORY = 1 << 30
STARTER = Starter((), RANK_MEMORY, hash_seeds=1)
GROWTH = 1.10
BATCH = 50


def tensor(generator: torch.Generator, *shape: int, grad: bool = True) -> torch.Tensor:
    """Return small integers as float64, on which the ops here are exact."""
    return torch.randint(-4, 5, shape, generator=generator).double().requires_grad_(grad)


def draw_case(number: int, seed: int) -> OpCase:
    """Return case ``number``: one op after the other, in ever other shapes, values and uneven shards."""
    g = torch.Generator().manual_seed(seed * 100_003 + number)
    rows, columns, inner = (int(n) for n in torch.randint(1, 12, (3,), generator=g))
    makers: tuple[Callable[[], OpCase], ...] = (
        lambda: lookup(g, rows, columns, {}),
        lambda: lookup(g, rows, columns, {"padding_idx": 0}),
        lambda: aten("mm.default", tensor(g, rows, inner), tensor(g, inner, columns)),
        lambda: aten("add.Tensor", tensor(g, rows, columns), tensor(g, rows, columns)),
        lambda: aten("mul.Tensor", tensor(g, rows, columns), tensor(g, 1, columns)),
        lambda: aten("sum.dim_IntList", tensor(g, rows, columns), [number % 2], bool(number % 3)),
        lambda: aten("relu.default", tensor(g, rows, columns)),
        lambda: aten("t.default", tensor(g, rows, columns)),
        lambda: aten("amax.default", tensor(g, rows, columns, grad=False), [0]),
        lambda: aten("cat.default", [tensor(g, rows, columns), tensor(g, inner, columns)], 0),
    )
    return makers[number % len(makers)]()


def aten(name: str, *args: object) -> OpCase:
    return OpCase(f"aten.{name}", f"torch.ops.aten.{name}", args)


def lookup(generator: torch.Generator, rows: int, columns: int, options: dict[str, object]) -> OpCase:
    ids = torch.randint(0, rows, (5,), generator=generator)
    arguments = {"input": ids, "weight": tensor(generator, rows, columns), **options}
    return OpCase("aten.embedding.default", "torch.nn.functional.embedding", (), arguments, "embedding")


def draw_trials(mesh: MeshSpec, count: int, seed: int) -> list[Trial]:
    """Return ``count`` trials, at most eight combinations of each case."""
    trials: list[Trial] = []
    number = 0
    while len(trials) < count:
        case = draw_case(number, seed)
        trials += plan_case(case, make_reference(case), mesh, 8, seed + number).trials
        number += 1
    return trials[:count]


# --------------------------------------------------------------------------------------------------------------- memory
@dataclass(frozen=True)
class Sample:
    """What the processes have taken of the machine once so many trials are done.

    Bytes, resident set and proportional set size, of the controller and of the largest rank; threads, and open
    descriptors, of the rank with the most.
    """

    done: int
    controller_rss: int
    controller_pss: int
    rank_rss: int = 0
    rank_pss: int = 0
    rank_threads: int = 0
    rank_descriptors: int = 0

    def texts(self) -> list[str]:
        """Return each figure as a column shows it, memory in MiB."""
        return [str(getattr(self, name) >> (20 if name.endswith("ss") else 0)) for name in COLUMNS]


COLUMNS = {
    "controller_rss": "c.RSS", "controller_pss": "c.PSS", "rank_rss": "r.RSS", "rank_pss": "r.PSS",
    "rank_threads": "r.thr", "rank_descriptors": "r.fds",
}  # fmt: skip


def rollup(pid: int) -> tuple[int, int]:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    found = dict(re.findall(r"^(Rss|Pss):\s+(\d+) kB", text, re.MULTILINE))
    return int(found["Rss"]) << 10, int(found["Pss"]) << 10


def sample(done: int, pool: Pool, before: Sample | None) -> Sample:
    own = rollup(os.getpid())
    ranks = []
    for pid in pool.pids:
        with contextlib.suppress(OSError, KeyError):  # killed from outside a moment ago
            ranks.append((*rollup(pid), *(len(os.listdir(f"/proc/{pid}/{kind}")) for kind in ("task", "fd"))))
    if not ranks:
        return Sample(done, *own) if before is None else replace(
            before, done=done, controller_rss=own[0], controller_pss=own[1])  # fmt: skip
    return Sample(done, *own, *map(max, zip(*ranks, strict=True)))


def growth(samples: Sequence[Sample], settled: int) -> dict[str, float]:
    """Return by what factor each of the :data:`COLUMNS` grew: the median of the last tenth over that of the first.

    Medians, because a batch with larger tensors is no leak, and a rank that has just been replaced no saving.
    """
    later = [each for each in samples if each.done >= settled and each.rank_rss]
    if len(later) < 2:
        return {}
    tenth = max(1, len(later) // 10)

    def typical(part: Sequence[Sample], name: str) -> float:
        values = sorted(getattr(each, name) for each in part)
        return float(values[len(values) // 2])

    return {name: typical(later[-tenth:], name) / typical(later[:tenth], name) for name in COLUMNS}


# ------------------------------------------------------------------------------------------------------------- the runs
Outcome = tuple[str, str, tuple[tuple[str, str], ...]]


def outcome(observation: Observation, fault: bool) -> Outcome:
    """Return what must be the same with and without faults: verdict, message, and the placements of the results."""
    kind = judge(observation, make_reference(observation.trial.case))
    report = next((report for report in observation.reports if report is not None), None)
    placements = report.placements if report is not None and not fault else ()
    return kind.kind.value, "" if fault else kind.message, placements


@dataclass
class Progress:
    """What has been done of a run; complete in itself at every moment, since the run may be interrupted."""

    name: str
    outcomes: list[Outcome]
    samples: list[Sample]
    restarts: int = 0
    replaced: int = 0
    seconds: float = 0.0

    def line(self, total: int) -> str:
        sizes = "  ".join(f"{text:>5}" for text in self.samples[-1].texts())
        done = len(self.outcomes)
        return f"{self.name:9} {done:6} of {total}  {done / self.seconds:8.1f}  {self.restarts:8}  {sizes}"


def run(pool: Pool, trials: Sequence[Trial], chance: random.Random | None, progress: Progress) -> None:
    """Run ``trials`` in batches; with ``chance``, kill a rank in the batches that have the mark ``from outside``."""
    started = shown = time.monotonic()
    for first in range(0, len(trials), BATCH):
        batch = list(trials[first : first + BATCH])
        strike = next((n for n, each in enumerate(batch) if each.fault == "from outside"), None)
        batch = [replace(each, fault=None) if each.fault == "from outside" else each for each in batch]
        for number, observation in enumerate(pool.run(batch)):
            progress.outcomes.append(outcome(observation, batch[number].fault is not None))
            if number == strike and chance is not None and pool.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(pool.pids), signal.SIGKILL)  # the trials that follow are under way already
        last = progress.samples[-1] if progress.samples else None
        progress.samples.append(sample(len(progress.outcomes), pool, last))
        progress.restarts, progress.replaced = pool.restarts, pool.replaced
        progress.seconds = time.monotonic() - started
        if time.monotonic() - shown > 5 or len(progress.outcomes) == len(trials):
            shown = time.monotonic()
            print(progress.line(len(trials)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=200, help="trials from one fault to the next")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.trials < 2 * BATCH or arguments.every < 2 or arguments.ranks < 2:
        parser.error(f"at least {2 * BATCH} trials, 2 trials from fault to fault, and 2 ranks are needed")
    mesh = MeshSpec((arguments.ranks,))
    trials = draw_trials(mesh, arguments.trials, arguments.seed)
    faulty = list(trials)
    # not at the end of a batch, where a rank that is killed from outside has nothing to do any more
    for number, at in enumerate(range(2 * arguments.every // 3, len(trials), arguments.every)):
        faulty[at] = replace(trials[at], fault=FAULTS[number % len(FAULTS)])
    faults = [each.fault for each in faulty if each.fault is not None]
    print(f"{len(trials)} trials on mesh {mesh}, {len(faults)} faults, seed {arguments.seed}; memory in MiB")
    print(f"{'run':9} {'trials':>6}    {'':{len(str(len(trials)))}}  {'trials/s':>8}  {'restarts':>8}  " + "  ".join(
        COLUMNS.values()), flush=True)  # fmt: skip
    faultless, faults_run = Progress("faultless", [], []), Progress("faults", [], [])
    ended = ""
    try:
        for progress, todo, chance in (
            (faultless, trials, None),
            (faults_run, faulty, random.Random(arguments.seed)),
        ):
            with (
                # between rules that cost the same DTensor chooses by the hash seed
                Pool(PoolKey.of(mesh), trial_limit=TRIAL_LIMIT, memory_limit=RANK_MEMORY, starter=STARTER) as pool,
            ):
                run(pool, todo, chance, progress)
    except KeyboardInterrupt:
        ended = "interrupted"
    except PoolError as error:
        ended = f"the ranks were lost: {error}"
    if ended:
        print(
            f"{ended}; what follows is of the {len(faults_run.outcomes)} trials that were done in both runs", flush=True
        )
    failed = compare_runs(trials, faulty, faultless, faults_run, ended)
    sys.exit(130 if ended == "interrupted" else 1 if failed or ended else 0)


def compare_runs(
    trials: Sequence[Trial], faulty: Sequence[Trial], faultless: Progress, faults: Progress, ended: str
) -> bool:
    """Print how the run with faults compares with the one without, as far as both went; return whether it fails."""
    got, expected = faults.outcomes, faultless.outcomes
    done = min(len(got), len(expected))
    injected = [each.fault for each in faulty[:done] if each.fault is not None]
    hit = [n for n in range(done) if faulty[n].fault not in (None, "from outside")]
    others = sorted(set(range(done)) - set(hit))
    outside = injected.count("from outside")
    differ = [n for n in others if got[n] != expected[n]]
    killed = [n for n in differ if got[n][0] == Fate.DIED.name and "SIGKILL" in got[n][1]]
    wrong = [n for n in differ if n not in killed] + killed[outside:]  # each kill from outside may end one trial
    unseen = [n for n in hit if got[n][0] == VerdictKind.PASS.value]
    verdicts = Counter(verdict for verdict, _, _ in expected)
    print(f"without faults: {', '.join(f'{count} {kind}' for kind, count in verdicts.most_common()) or 'nothing'}")
    seen = Counter(f"{faulty[n].fault} {got[n][0]}" for n in hit)
    print(f"faults: {', '.join(f'{text} ({count})' for text, count in sorted(seen.items())) or 'none'}")
    print(f"{faults.restarts} restarts, {faults.replaced} processes replaced; "
          f"{len(killed)} trials ended by {outside} outside kills")  # fmt: skip
    same = len(others) - len(differ)
    print(f"{same} of {len(others)} other trials have the same verdict")
    for number in wrong[:5]:
        print(f"  trial {number}, {trials[number].case.op}: got {got[number]}, expected {expected[number]}")
    for number in unseen[:5]:
        print(f"  trial {number}, {trials[number].case.op}: passed in spite of {faulty[number].fault}")
    settled = max(BATCH, len(trials) // 10)
    grown = {each.name: growth(each.samples, settled) for each in (faultless, faults)}
    for name, factors in grown.items():
        for kind, factor in factors.items():
            much = ", too much" if factor > GROWTH else ""
            print(f"{name}, {kind.replace('_', ' ')}: {factor - 1:+.1%} since {settled} trials{much}")
    leaks = any(factor > GROWTH for factors in grown.values() for factor in factors.values())
    failed = bool(wrong or unseen) or leaks
    memory = " | ".join(
        ", ".join(f"{factor - 1:+.1%}" for factor in factors.values()) or "too few trials" for factors in grown.values()
    )
    rate = f"{len(got) / faults.seconds:.0f}" if faults.seconds else "-"
    verdict = "fails" if failed else ended or "holds"
    print("\n| trials | ranks | faults | the same verdict | ended by kills from outside | restarts | replaced "
          "| growth without faults: controller RSS, PSS, rank RSS, PSS, threads, descriptors | growth with faults "
          "| trials/s | outcome |")  # fmt: skip
    print("| --- " * 11 + "|")
    print(f"| {done} of {len(trials)} | {trials[0].mesh} | {len(injected)} | {same} of {len(others)} | {len(killed)} "
          f"| {faults.restarts} | {faults.replaced} | {memory} | {rate} | {verdict} |")  # fmt: skip
    return failed


if __name__ == "__main__":
    main()
