"""Workers that really crash, hang and run out of memory: that costs one position, and nothing is counted twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_work import PARTS, POSITIONS, loaded, scripted, scripts

from verifier.rules.campaign.work import prepare
from verifier.rules.campaign.worker_process import InFlight, Position, Task
from verifier.rules.campaign.workers import (
    Died,
    Failed,
    Finished,
    GaveUp,
    Outcome,
    Part,
    WorkerError,
    WorkerSet,
)

pytestmark = pytest.mark.processes

WAIT_LIMIT = 60.0


def expected(items: int, without: frozenset[Position] = frozenset()) -> list[tuple[int, int, object]]:
    """Return item, ordinal and result of all parts."""
    return [
        (item, part, [at for at in ((item, part, 0, c) for c in range(POSITIONS)) if at not in without])
        for item in range(items)
        for part in range(PARTS)
    ]


def parts(outcomes: list[Outcome[object]]) -> list[tuple[int, int, object]]:
    return [(outcome.item, outcome.ordinal, outcome.result) for outcome in outcomes if isinstance(outcome, Part)]


def others(outcomes: list[Outcome[object]]) -> list[Outcome[object]]:
    return [outcome for outcome in outcomes if not isinstance(outcome, Part | Finished)]


def finished(outcomes: list[Outcome[object]]) -> list[int]:
    return [outcome.item for outcome in outcomes if outcome == Finished(outcome.item, PARTS)]


def in_order(outcomes: Iterable[Outcome[object]]) -> list[Outcome[object]]:
    """Return outcomes by item and ordinal: the same list for any number of jobs."""
    return sorted(outcomes, key=lambda outcome: (outcome.item, outcome.ordinal))  # those of one item came in order


def run_items(items: Sequence[Any], task: Task[Any, Any], jobs: int, **options: Any) -> Iterator[Outcome[object]]:
    """Run ``task`` on each item in workers that are started for it."""
    with WorkerSet(jobs, **options) as workers:
        yield from workers.run(items, task)


@pytest.fixture(scope="module")
def two() -> Iterator[WorkerSet]:
    """Two workers that all tests with the usual limits share."""
    with WorkerSet(2) as workers:
        workers.start()
        yield workers


# --------------------------------------------------------------------------------------------------- without a crash
@pytest.mark.parametrize("jobs", [0, 1, 2])
def test_the_result_is_the_same_for_any_number_of_jobs(jobs: int) -> None:
    outcomes = in_order(run_items(scripts(), scripted, jobs=jobs))
    assert parts(outcomes) == expected(4)
    assert finished(outcomes) == [0, 1, 2, 3]
    assert [outcome.ordinal for outcome in outcomes] == [0, 1, 2, 3] * 4


def test_workers_are_kept_between_runs(two: WorkerSet) -> None:
    list(two.run(scripts(), scripted))
    pids = two.pids
    assert parts(in_order(two.run(scripts(), scripted))) == expected(4)
    assert two.pids == pids
    assert len(pids) == 2


def test_no_more_workers_are_started_than_there_are_items() -> None:
    with WorkerSet(2) as workers:
        assert list(workers.run([], scripted)) == []
        assert workers.pids == []
        list(workers.run(scripts(items=1), scripted))
        assert len(workers.pids) == 1


def test_a_run_that_is_broken_off_leaves_nothing_to_the_next(two: WorkerSet) -> None:
    outcomes = two.run(scripts(items=20), scripted)
    next(outcomes)
    with pytest.raises(RuntimeError, match="busy"):
        next(two.run(scripts(), scripted))
    outcomes.close()  # type: ignore[attr-defined]
    assert parts(in_order(two.run(scripts(), scripted))) == expected(4)


def test_a_prepared_worker_has_loaded_the_samples_and_nothing_that_they_do_not_need() -> None:
    """The compiler takes more than half a second, SciPy one, checkpoints and pytest a tenth."""
    needed = ["torch", "torch.testing._internal.common_methods_invocations"]
    not_needed = ["torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "pytest", "scipy"]
    outcomes = in_order(run_items([*needed, *not_needed], loaded, jobs=1, prepare=prepare))
    assert [one.result for one in outcomes if isinstance(one, Part)] == [True] * len(needed) + [False] * len(not_needed)


def test_a_negative_number_of_jobs_is_refused() -> None:
    with pytest.raises(ValueError, match="jobs=-1"):
        WorkerSet(-1)


def test_a_note_can_be_read_and_ends() -> None:
    note = InFlight(bytearray(InFlight.SIZE))
    seen = [(note.position, note.snapshot())]
    for _ in range(2):
        note.enter((1, 2, 3, -4))
        seen.append((note.position, note.snapshot()))
        note.leave()
        seen.append((note.position, note.snapshot()))
    assert [position for position, _ in seen] == [None, (1, 2, 3, -4), None, (1, 2, 3, -4), None]
    assert len({snapshot for _, snapshot in seen}) == 5


# ----------------------------------------------------------------------------------------------------------- crashes
@pytest.mark.parametrize("jobs", [1, 2])
def test_crashes_cost_their_positions_and_no_more(jobs: int) -> None:
    """An abort, a segmentation fault, two in one item, two in one part, in the first position and in the last."""
    bad: dict[Position, str] = {
        (0, 0, 0, 0): "abort",
        (1, 1, 0, 1): "segfault",
        (1, 1, 0, 2): "abort",
        (3, 2, 0, 3): "exit",
    }
    with WorkerSet(jobs) as workers:
        outcomes = in_order(workers.run(scripts(*bad.items()), scripted))
    assert others(outcomes) == [
        Died(0, 0, (0, 0, 0, 0), "SIGABRT", "double free or corruption (out)"),
        Died(1, 1, (1, 1, 0, 1), "SIGSEGV", ""),
        Died(1, 1, (1, 1, 0, 2), "SIGABRT", "double free or corruption (out)"),
        Died(3, 2, (3, 2, 0, 3), "exit status 3", ""),
    ]
    assert parts(outcomes) == expected(4, frozenset(bad))
    assert finished(outcomes) == [0, 1, 2, 3]
    assert workers.pids == []


def test_a_worker_that_dies_idle_costs_nothing(two: WorkerSet) -> None:
    two.start()
    for pid in two.pids:
        os.kill(pid, signal.SIGKILL)
    outcomes = in_order(two.run(scripts(), scripted))
    assert parts(outcomes) == expected(4)
    assert others(outcomes) == []


def dies_of_the_past(item: int, in_flight: InFlight, skip: frozenset[Position], resume: int) -> Iterator[object]:
    """Corrupt the process with item 0 and die of it in the next one, as happens with a heap that is overwritten."""
    in_flight.enter((item, 0, 0, 0))
    if item == 0:
        os.environ["CORRUPTED"] = "1"
    elif "CORRUPTED" in os.environ:
        os.abort()
    in_flight.leave()
    if not resume:
        yield f"{item} without {sorted(skip)}"


@pytest.mark.parametrize("confirm", [True, False])
def test_a_death_counts_where_it_happens_in_a_fresh_worker(confirm: bool) -> None:
    with WorkerSet(1, confirm=confirm) as workers:
        outcomes = in_order(workers.run([0, 1, 2], dies_of_the_past))
    assert workers.deaths == 1
    if confirm:
        assert others(outcomes) == []
        assert [result for _, _, result in parts(outcomes)] == ["0 without []", "1 without []", "2 without []"]
    else:
        assert others(outcomes) == [Died(1, 0, (1, 0, 0, 0), "SIGABRT", "")]
        assert [result for _, _, result in parts(outcomes)][:2] == ["0 without []", "1 without [(1, 0, 0, 0)]"]


def test_a_hang_costs_its_position() -> None:
    at: Position = (0, 1, 0, 2)
    outcomes = in_order(run_items(scripts((at, "hang"), items=2), scripted, jobs=1, stall_limit=2.0))
    assert others(outcomes) == [Died(0, 1, at, "no progress for 2 s", "")]
    assert parts(outcomes) == expected(2, frozenset([at]))


LARGE = "more than fits into a pipe " * 100_000


def slow(item: int, in_flight: InFlight, skip: frozenset[Position], resume: int) -> Iterator[object]:
    for step in range(8):
        in_flight.enter((step, 0, 0, 0))
        time.sleep(0.4)
    in_flight.leave()
    yield from [LARGE] * item


def test_progress_is_no_hang_however_long_it_takes_and_however_slow_the_reader_is() -> None:
    outcomes = run_items([3], slow, jobs=1, stall_limit=2.0)
    assert next(outcomes) == Part(0, 0, LARGE)
    time.sleep(3)
    assert list(outcomes) == [Part(0, 1, LARGE), Part(0, 2, LARGE), Finished(0, 3)]


def gets_little(item: int, in_flight: InFlight, skip: frozenset[Position], resume: int) -> Iterator[object]:
    """Compute a fifth of the time, as a worker does that shares its processor with four others; item 1 never ends."""
    if (item, 0, 0, 0) in skip:
        return
    in_flight.enter((item, 0, 0, 0))
    until = time.monotonic() + (1000 if item else 3)
    while time.monotonic() < until:
        busy = time.process_time() + 0.02
        while time.process_time() < busy:
            pass
        time.sleep(0.08)
    in_flight.leave()
    yield "came to its end"


def test_a_worker_that_computes_gets_as_many_seconds_of_its_processor() -> None:
    outcomes = in_order(run_items([0, 1], gets_little, jobs=2, stall_limit=0.8))
    assert parts(outcomes) == [(0, 0, "came to its end")]
    assert others(outcomes) == [Died(1, 0, (1, 0, 0, 0), "no progress for 0.8 s", "")]


def test_a_hang_with_nothing_in_flight_gives_the_item_up() -> None:
    outcomes = in_order(run_items([0, 1], idles, jobs=1, stall_limit=2.0))
    assert outcomes == [GaveUp(0, 0, "no progress for 2 s with nothing in flight", ""), Finished(1, 0)]


def idles(item: int, in_flight: InFlight, skip: frozenset[Position], resume: int) -> Iterator[object]:
    if item == 0:
        time.sleep(1000)
    yield from ()


def test_an_item_that_kills_too_many_workers_is_given_up() -> None:
    bad: dict[Position, str] = {(1, 1, 0, combination): "exit" for combination in range(POSITIONS)}
    outcomes = in_order(run_items(scripts(*bad.items(), items=3), scripted, jobs=2, max_deaths_per_item=2))
    assert others(outcomes) == [
        *(Died(1, 1, (1, 1, 0, combination), "exit status 3", "") for combination in range(3)),
        GaveUp(1, 1, "killed 3 workers", ""),
    ]
    assert finished(outcomes) == [0, 2]
    assert parts(outcomes) == [part for part in expected(3) if part[:2] not in [(1, 1), (1, 2)]]


# ---------------------------------------------------------------------------------------------------- errors of ours
def test_an_exception_of_the_task_fails_its_item_alone(two: WorkerSet) -> None:
    items = scripts(((1, 2, 0, 0), "raise"))
    deaths = two.deaths
    for outcomes in (in_order(run_items(items, scripted, jobs=0)), in_order(two.run(items, scripted))):
        (failed,) = others(outcomes)
        assert isinstance(failed, Failed)
        assert (failed.item, failed.ordinal) == (1, 2)
        assert "in misbehave" in failed.traceback
        assert failed.traceback.endswith("LookupError: a mistake of the task\n")
        assert finished(outcomes) == [0, 2, 3]
    assert two.deaths == deaths


def test_a_runaway_allocation_raises(two: WorkerSet) -> None:
    (failed, *_) = others(list(two.run(scripts(((0, 0, 0, 0), "allocate"), items=1), scripted)))
    assert isinstance(failed, Failed)
    assert "can't allocate memory" in failed.traceback


class Unreadable:
    def __reduce__(self) -> tuple[object, ...]:
        return int, ("not a number",)


def unreadable(item: int, in_flight: InFlight, skip: frozenset[Position], resume: int) -> Iterator[object]:
    yield from [1, Unreadable(), 3][resume:] if item == 0 else []


def test_a_result_that_cannot_be_read_gives_the_item_up(two: WorkerSet) -> None:
    outcomes = in_order(two.run([0, 1], unreadable))
    why = "a result that cannot be read (ValueError: invalid literal for int() with base 10: 'not a number')"
    assert outcomes == [Part(0, 0, 1), GaveUp(0, 1, f"{why} with nothing in flight", ""), Finished(1, 0)]


def test_imports_are_run_in_the_workers(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os; os.environ['IMPORTED'] = 'yes'", encoding="utf-8")
    outcomes = list(run_items(["IMPORTED"], reads, jobs=1, imports=[str(tmp_path / "mine.py")]))
    assert outcomes == [Part(0, 0, ("yes", 1, signal.SIG_IGN)), Finished(0, 1)]


def reads(item: str, in_flight: InFlight, skip: frozenset[Position], resume: int) -> Iterator[object]:
    yield os.environ.get(item), torch.get_num_threads(), signal.getsignal(signal.SIGINT)


def test_a_worker_that_cannot_start_is_an_error_with_its_reason() -> None:
    with pytest.raises(WorkerError, match=r"exit status 1: .*ImportFailedError: --import no_such_module"):
        list(run_items([0], idles, jobs=1, imports=["no_such_module"]))


# ------------------------------------------------------------------------------------------------ end of the controller
def alive(pid: int) -> bool:
    """Return whether a process runs; one that waits for its parent to notice its end does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT], ids=["killed", "ctrl-c"])
def test_no_worker_and_no_file_outlives_the_controller(ending: signal.Signals, tmp_path: Path) -> None:
    """Also not workers that hang in a native call which holds the interpreter lock."""
    program = textwrap.dedent("""
        import signal
        import sys
        from verifier.rules.campaign.workers import WorkerSet
        from scripted_work import scripted, scripts

        signal.signal(signal.SIGINT, signal.default_int_handler)  # which tests that run in the background ignore

        with WorkerSet(2) as workers:
            workers.start()
            print(*workers.pids, flush=True)
            run = workers.run(scripts(((0, 1, 0, 0), "hang"), ((1, 1, 0, 0), "hang"), items=2), scripted)
            for number, _ in enumerate(run):
                print(number, flush=True)
    """)
    path = os.pathsep.join(path for path in sys.path if path)
    controller = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ, PYTHONPATH=path, TMPDIR=str(tmp_path)),
    )
    with controller:
        assert controller.stdout is not None
        pids = [int(word) for word in controller.stdout.readline().split()]
        assert len(pids) == 2
        assert [controller.stdout.readline() for _ in range(2)] == ["0\n", "1\n"]  # both are in part 1 now, or soon
        assert all(alive(pid) for pid in pids)
        controller.send_signal(ending)
        _, errors = controller.communicate(timeout=WAIT_LIMIT)
    assert controller.returncode == -ending
    assert ("KeyboardInterrupt" in errors) == (ending is signal.SIGINT)
    deadline = time.monotonic() + WAIT_LIMIT
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if alive(pid)] == []
    assert list(tmp_path.iterdir()) == []
