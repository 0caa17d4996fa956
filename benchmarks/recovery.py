"""Seconds from the end of a trial that broke the ranks to the end of the next trial, by the way of mending them.

    python benchmarks/recovery.py [--ranks 2,4,8] [--repeat 3]

========================  =============================================================================================
rebuild in place          a rank raised and the others wait for it: connections are broken, all meet in a new world
rebuild after a skip      two collectives that never meet, found out by the time limit; then as above
full respawn              all processes are ended and started anew
new process               a process that is forked takes the place of the rank that died
new process after a hang  likewise of a rank that hangs in Python; the others are given up on after 1 s
all died                  new processes take all seats
========================  =============================================================================================

The time limit itself is not counted. Beside the times is what a rank costs: its proportional set size.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import Partial, Replicate

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Fate
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool

TRIAL_LIMIT = 3.0


@dataclass(frozen=True)
class Way:
    """How the ranks are broken, with what fate, and whether all processes are ended.

    In the fault ``all`` stands for all ranks.
    """

    name: str
    fault: str
    fate: Fate
    all_anew: bool = False

    def fault_of(self, ranks: int) -> str:
        return self.fault.replace("all", ",".join(map(str, range(ranks))))


WAYS = (
    Way("rebuild in place", "raise:1", Fate.STUCK),
    Way("rebuild after a skip", "skip:1", Fate.HANG),
    Way("full respawn", "raise:1", Fate.STUCK, all_anew=True),
    Way("new process", "kill:1", Fate.DIED),
    Way("new process after a hang", "hang:1", Fate.HANG),
    Way("all died", "kill:all", Fate.DIED),
)


def make_trial(ranks: int, fault: str | None = None) -> Trial:
    """Return a lookup in a table of Partial values, for which the ranks meet in the forward call."""
    weight = torch.arange(34.0, dtype=torch.float64).reshape(17, 2).requires_grad_()
    arguments = {"weight": weight, "input": torch.tensor([0, 3, 16, 1])}
    case = OpCase("aten.embedding.default", "torch.nn.functional.embedding", (), arguments)
    return Trial(case, MeshSpec((ranks,)), ((Partial(),), (Replicate(),)), (((Replicate(),),),), fault=fault)


def proportional_set_size(pid: int) -> int:
    """Return the bytes of memory of a process, shared ones divided by who shares them."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    match = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    assert match is not None, text
    return int(match[1]) << 10


@contextmanager
def ended_anew(pool: Pool, active: bool) -> Iterator[None]:
    """Have every fault end all processes, as was done before single ones could be replaced."""
    mend = pool._crew.mend

    def close_and_start(_lost: object = ()) -> None:
        pool._crew.close()
        pool._crew.start()

    if active:
        pool._crew.mend = close_and_start  # type: ignore[method-assign]
    yield
    pool._crew.mend = mend  # type: ignore[method-assign]


def measure(ranks: int, way: Way, repeat: int, say: Callable[[str], None]) -> list[float]:
    """Return the seconds that the ranks took to be of use again, ``repeat`` times."""
    seconds = []
    with Pool(PoolKey(ranks, "gloo", "cpu"), trial_limit=TRIAL_LIMIT) as pool:
        for number in range(repeat):
            list(pool.run([make_trial(ranks)]))
            if number == 0 and way is WAYS[0]:
                say(f"  a rank takes {proportional_set_size(pool.pids[0]) >> 20} MiB")
            with ended_anew(pool, way.all_anew):
                observations = pool.run([make_trial(ranks, way.fault_of(ranks)), make_trial(ranks)])
                began = time.perf_counter()
                broken = next(observations)  # comes once the ranks have been mended
                following = next(observations)
                whole = time.perf_counter() - began
                list(observations)
            assert broken.fate is way.fate, broken.detail
            assert following.fate is Fate.COMPLETED, following.detail
            seconds.append(whole - broken.seconds)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, seconds: median (smallest to largest)")
    for ranks in map(int, arguments.ranks.split(",")):
        print(f"{ranks} ranks", flush=True)
        for way in WAYS:
            seconds = measure(ranks, way, arguments.repeat, print)
            spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
            print(f"  {way.name:24} {statistics.median(seconds):6.2f}  ({spread})", flush=True)


if __name__ == "__main__":
    main()
