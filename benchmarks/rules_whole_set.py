"""Time and memory of the rule check of everything that DTensor has a rule for.

    python benchmarks/rules_whole_set.py [OP_GLOB ...] [--jobs 2] [--give-up 30]

Runs ``python -m verifier rules --world-size 2,3 --sizes 3 --format json`` and looks at its processes twice a second,
the workers and those on which wrong rules are confirmed. Memory is given twice. PSS counts a page that n processes
share as 1/n in each, so that its sum is what the machine has to have; RSS counts it in each, and so does a tool that
adds up what ``ps`` shows. The limit is held against the first. A peak shorter than half a second can be missed.

Exit status: 0 if the limits on time and memory are met, 1 if not, 2 if the check failed or was given up.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

INTERVAL = 0.5
LIMIT_MINUTES = 10.0
LIMIT_GIB = 4.0
GIB = 1 << 30


@dataclass
class Peaks:
    """The most that all processes had at one moment, in bytes, and how many there were."""

    pss: int = 0
    rss: int = 0
    processes: int = 0
    samples: int = 0

    def sample(self, root: int) -> None:
        """Look once at the process ``root`` and its descendants."""
        sizes = [size for pid in tree(root) if (size := memory(pid)) is not None]
        self.samples += 1
        self.pss = max(self.pss, sum(pss for pss, _ in sizes))
        self.rss = max(self.rss, sum(rss for _, rss in sizes))
        self.processes = max(self.processes, len(sizes))


def tree(root: int) -> Iterator[int]:
    """Yield ``root`` and the processes that descend from it."""
    children: dict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            status = Path("/proc", name, "stat").read_text()
        except OSError:  # it has ended since the listing
            continue
        # the name of the program, in parentheses, may hold blanks and parentheses
        children[int(status.rpartition(")")[2].split()[1])].append(int(name))
    todo = [root]
    while todo:
        pid = todo.pop()
        yield pid
        todo.extend(children[pid])


def memory(pid: int) -> tuple[int, int] | None:
    """Return PSS and RSS of a process in bytes; None if it has ended."""
    try:
        lines = Path("/proc", str(pid), "smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return None
    sizes = {key: int(rest.split()[0]) * 1024 for key, _, rest in (line.partition(":") for line in lines)}
    return (sizes["Pss"], sizes["Rss"]) if "Pss" in sizes else None


@dataclass(frozen=True)
class Finished:
    """What came of the command."""

    status: int
    seconds: float
    peaks: Peaks
    stdout: str
    stderr: str
    given_up: bool


def watch(command: Sequence[str], give_up: float) -> Finished:
    """Run ``command`` and watch its memory; interrupt it after ``give_up`` seconds, as Ctrl-C does."""
    peaks = Peaks()
    given_up = False
    # files, since nobody reads a pipe meanwhile
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr)
        try:
            while True:
                try:
                    status = process.wait(timeout=INTERVAL)
                    break
                except subprocess.TimeoutExpired:
                    peaks.sample(process.pid)
                if not given_up and time.perf_counter() - started > give_up:
                    given_up = True
                    process.send_signal(signal.SIGINT)  # what has been checked by then is stored and printed
        finally:
            process.kill()
        seconds = time.perf_counter() - started
        for file in (stdout, stderr):
            file.seek(0)
        return Finished(status, seconds, peaks, stdout.read(), stderr.read(), given_up)


def rows(found: Mapping[str, Any], finished: Finished) -> Iterator[tuple[str, str]]:
    """Yield the lines of the table: what, and how much."""
    ops: Sequence[Mapping[str, Any]] = list(found["ops"].values())
    untested: Counter[str] = Counter()
    for op in ops:
        untested.update(op["untested"])

    def total(name: str) -> str:
        return f"{sum(len(op[name]) for op in ops):,}"

    yield "ops", f"{len(ops):,}"
    yield "overloads", f"{len({overload for op in ops for overload in op['overloads']}):,}"
    yield "overloads not testable", f"{len({overload for op in ops for overload in op['not_testable']}):,}"
    yield "samples", f"{sum(op['samples'] for op in ops):,}"
    yield "combinations", f"{found['combinations']:,}"
    yield "runs of input placements", f"{sum(op['runs'] for op in ops):,}"
    yield "rules that hold", total("confirmed")
    yield "rules wrong", total("wrong")
    yield "rules wrong, unconfirmed", total("unconfirmed")
    yield "rules missing", total("missing")
    yield "rules that fail special values", total("special")
    yield "rules inconclusive", total("inconclusive")
    yield "combinations that died", total("died")
    yield "combinations untested", f"{sum(untested.values()):,}"
    yield "errors of the verifier", f"{len(found['tool_errors']):,}"
    yield "seconds, starting workers", f"{found['seconds_starting']:,.1f}"
    yield "seconds, checking", f"{found['seconds']:,.1f}"
    yield "seconds, confirming", f"{found['seconds_confirming']:,.1f}"
    other = finished.seconds - found["seconds_starting"] - found["seconds"] - found["seconds_confirming"]
    yield "seconds, imports, plan, report", f"{other:,.1f}"
    yield "seconds of all workers", f"{sum(op['seconds'] for op in ops):,.1f}"
    yield "combinations/s while checking", f"{found['combinations'] / max(found['seconds'], 1e-9):,.0f}"
    yield "processes at most", f"{finished.peaks.processes}"
    yield "peak of summed RSS", f"{finished.peaks.rss / GIB:.2f} GiB"


def verdict(met: bool) -> str:
    return "met" if met else "NOT MET"


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", metavar="OP_GLOB", help="ops; everything if none is given")
    parser.add_argument("--world-size", default="2,3")
    parser.add_argument("--sizes", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--give-up", type=float, default=30.0, metavar="MINUTES", help="interrupt it after these")
    parser.add_argument("--slowest", type=int, default=10, metavar="N", help="list the N ops that took longest")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep the JSON of the check here")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "verifier", "rules", *arguments.patterns, "--world-size", arguments.world_size]
    command += ["--sizes", str(arguments.sizes), "--jobs", str(arguments.jobs), "--format", "json"]
    what = " ".join(arguments.patterns) or "everything"
    cores = len(os.sched_getaffinity(0))
    print(
        f"torch {torch.__version__}, {cores} cores, load {os.getloadavg()[0]:.1f}: {what}, "
        f"meshes {arguments.world_size}, {arguments.sizes} sizes, {arguments.jobs} jobs",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as out:
        finished = watch([*command, "--out", out], arguments.give_up * 60)
    try:
        found = json.loads(finished.stdout)
    except json.JSONDecodeError:
        print(f"no result after {finished.seconds:.0f} s, status {finished.status}:\n{finished.stderr[-2000:]}")
        return 2
    if arguments.keep is not None:
        arguments.keep.write_text(finished.stdout)
    for name, value in rows(found, finished):
        print(f"{name:32} {value:>14}")
    in_time = finished.seconds <= LIMIT_MINUTES * 60
    in_memory = finished.peaks.pss <= LIMIT_GIB * GIB
    minutes = f"{finished.seconds / 60:.1f} min"
    print(f"{'wall time of the command':32} {minutes:>14}   limit {LIMIT_MINUTES:g} min: {verdict(in_time)}")
    memory_text = f"{finished.peaks.pss / GIB:.2f} GiB"
    print(f"{'peak of summed PSS':32} {memory_text:>14}   limit {LIMIT_GIB:g} GiB: {verdict(in_memory)}")
    slowest = sorted(found["ops"].items(), key=lambda item: -item[1]["seconds"])[: arguments.slowest]
    if slowest:
        print("slowest: " + ", ".join(f"{name} {op['seconds']:.1f} s" for name, op in slowest))
    print(f"load at the end {os.getloadavg()[0]:.1f}, {finished.peaks.samples} looks at the memory")
    if not found["complete"] or found["tool_errors"] or finished.status not in (0, 1):
        why = "given up" if finished.given_up else f"status {finished.status}"
        print("\n".join([f"NOT COMPLETE: {why}", *found["tool_errors"]]))
        return 2
    return 0 if in_time and in_memory else 1


if __name__ == "__main__":
    sys.exit(main())
