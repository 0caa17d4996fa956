"""Whatever happens to a rank is the verdict of one trial; the others are as if it had not happened."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from command_processes import wait_until
from fault_trials import BATCH, CASE, FAULTY, MESH, kinds, running, trial, wait_for_end
from forked_commands import Command
from leftovers import nothing_left_behind

from verifier.core.case import MeshSpec, Trial
from verifier.core.observation import Fate, ProcessReport, Raised
from verifier.core.verdict import Phase, VerdictKind
from verifier.meshes.crew import PoolKey
from verifier.meshes.flight import Flight, Hangs, Terms
from verifier.meshes.pool import Pool
from verifier.meshes.processes import PoolError
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.placements.parsing import parse_placements

pytestmark = pytest.mark.ranks

TRIAL_LIMIT = 3.0


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(PoolKey.of(MESH), trial_limit=TRIAL_LIMIT, grace=0.5) as pool:
        yield pool


def test_without_a_fault_all_pass(pool: Pool) -> None:
    before = pool.restarts
    assert kinds(list(pool.run(BATCH))) == [VerdictKind.PASS] * len(BATCH)
    assert pool.restarts == before


@pytest.mark.parametrize(
    ("fault", "kind", "fate", "detail"),
    [
        ("raise:1", VerdictKind.CRASH, Fate.STUCK, "after 0.5 s: rank 0 in forward, rank 1 raised InjectedFault"),
        ("hang:1", VerdictKind.HANG, Fate.HANG, "after 3 s: ranks 0, 1 in forward"),
        ("kill:1", VerdictKind.DIED, Fate.DIED, "rank 1 ended with signal SIGKILL in forward"),
        ("abort:1", VerdictKind.DIED, Fate.DIED, "rank 1 ended with signal SIGABRT in forward"),
    ],
)
def test_a_fault_is_the_verdict_of_its_trial(
    pool: Pool, fault: str, kind: VerdictKind, fate: Fate, detail: str
) -> None:
    batch = [*BATCH]
    batch[FAULTY] = trial("P(sum)", fault)
    list(pool.run(BATCH[:1]))  # the ranks run
    restarts, pids = pool.restarts, pool.pids

    observations = list(pool.run(batch))

    expected = [VerdictKind.PASS] * len(BATCH)
    expected[FAULTY] = kind
    assert kinds(observations) == expected
    assert [observation.trial for observation in observations] == batch
    assert observations[FAULTY].fate is fate
    assert detail in observations[FAULTY].detail
    assert pool.restarts == restarts + 1
    assert len(pool.pids) == MESH.world_size
    assert wait_for_end(list(set(pids) - set(pool.pids)), 0) == []


def test_an_op_that_has_hung_is_not_waited_for_as_long_if_it_hangs_in_the_same_way() -> None:
    """The first hang takes the whole limit. Verdicts are the same; a trial that hangs elsewhere gets its whole time.

    A rank that computes gets its whole time, too, which on a busy machine is what one that waits may seem to do.
    """
    hangs, more = Hangs(), 3
    with Pool(PoolKey.of(MESH), trial_limit=TRIAL_LIMIT, grace=0.5, hangs=hangs) as pool:
        hanging = trial("P(sum)", "hang:1")
        first, *again = pool.run([hanging] * (1 + more))
        *after, elsewhere = pool.run([*BATCH, trial("S(1)", "hang:1")])
    assert {one.fate for one in (first, *again, elsewhere)} == {Fate.HANG}
    assert {*kinds([first, *again, elsewhere])} == {VerdictKind.HANG}
    assert kinds(after) == [VerdictKind.PASS] * len(BATCH)
    assert first.detail == "after 3 s: ranks 0, 1 in forward"
    assert first.seconds > TRIAL_LIMIT
    early = [one for one in again if one.detail == "after 0.6 s: ranks 0, 1 in forward"]
    assert early
    assert all(one.seconds < TRIAL_LIMIT for one in early)
    assert {one.detail for one in again} <= {first.detail, early[0].detail}
    assert elsewhere.detail.startswith("after 3 s: rank 0 in ")  # no collective keeps rank 0 in the forward call
    assert elsewhere.seconds > TRIAL_LIMIT


@pytest.mark.parametrize(
    ("op", "states", "used", "waits"),
    [
        (CASE.op, ("in forward", "in exchange"), 0.0, True),
        ("another", ("in forward", "in exchange"), 0.0, False),
        (CASE.op, ("in backward", "in exchange"), 0.0, False),
        (CASE.op, ("in forward", "in exchange"), 0.5, False),
    ],
)
def test_what_hangs_as_before(op: str, states: tuple[str, ...], used: float, waits: bool) -> None:
    """Only ranks that are idle where they hung before are given up early: one that computes may yet come through."""
    hangs, clock = Hangs(), [0.0]
    hangs.note(op, ["in exchange", "in forward"])

    def computed() -> list[float]:
        clock[0] += used
        return [clock[0], 0.0]

    flight = Flight(trial("S(0)"), Terms(2, 10.0, 0.25, True, computed, hangs, lambda: states))
    flight.begin()
    limits = []
    for _ in range(2):
        limits.append(flight.limit)
        fate = flight.fate((), silent=True)
    assert (fate is Fate.HANG and limits[-1] < 5.0) == waits
    if op == CASE.op:
        assert limits == pytest.approx([1.0, 2.0])
        assert flight.waited == pytest.approx(2.0) if waits else flight.limit == pytest.approx(5.0)
    else:
        assert limits == [5.0, 10.0]


def test_all_ranks_are_new_after_one_found_its_memory_broken() -> None:
    """What broke it has run in all of them: another one would die in a later trial."""
    with Pool(PoolKey.of(MESH), trial_limit=TRIAL_LIMIT, grace=0.5) as pool:
        list(pool.run([trial("S(1)")]))
        before = pool.pids
        observations = list(pool.run([trial("S(1)", "abort:1"), trial("S(1)")]))
        assert kinds(observations) == [VerdictKind.DIED, VerdictKind.PASS]
        assert not {*before} & {*pool.pids}


def test_a_rank_that_raises_alone_costs_no_restart(pool: Pool) -> None:
    """Where no other rank waits for it, they agree to go on to the next trial."""
    restarts = pool.restarts
    observations = list(pool.run([trial("S(1)"), trial("S(1)", "raise:1"), trial("S(1)")]))
    assert kinds(observations) == [VerdictKind.PASS, VerdictKind.CRASH, VerdictKind.PASS]
    assert observations[1].fate is Fate.COMPLETED
    assert pool.restarts == restarts


def test_a_collective_that_one_rank_has_begun_leaves_the_next_trials_alone(pool: Pool) -> None:
    """Else it would pair up with the next trial's, which would hang or get wrong values. No rank waited for another."""
    restarts = pool.restarts
    crashed = trial("S(1)", "leave:1")
    observations = list(pool.run([crashed, trial("P(sum)"), crashed, trial("S(0)")]))
    assert kinds(observations) == [VerdictKind.CRASH, VerdictKind.PASS] * 2
    assert {one.fate for one in observations} == {Fate.COMPLETED}
    assert pool.restarts == restarts
    first, second = (report.issued for report in observations[0].reports if report is not None)
    assert sum(second) == sum(first) + 1


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.GATHER, Phase.BACKWARD, Phase.GATHER_GRADIENT])
@pytest.mark.parametrize("weight", ["R", "S(0)", "S(1)", "P(sum)"])
def test_a_rank_that_raises_in_any_phase_leaves_the_next_trials_alone(pool: Pool, phase: Phase, weight: str) -> None:
    """Ranks that are one exchange apart would spoil every trial that follows."""
    faulty = trial(weight, f"raise:1:{phase}")
    observations = list(
        pool.run([trial(weight), faulty, trial("S(1)"), faulty, faulty, trial("S(0)"), trial("P(sum)")])
    )
    passed, crashed = VerdictKind.PASS, VerdictKind.CRASH
    assert kinds(observations) == [passed, crashed, passed, crashed, crashed, passed, passed]
    assert judge(observations[1], make_reference(CASE)).phase is phase


def test_every_fault_of_a_batch_has_its_own_restart(pool: Pool) -> None:
    restarts = pool.restarts
    batch = [trial("P(sum)", "kill:0"), trial("S(1)"), trial("P(sum)", "kill:1")]
    assert kinds(list(pool.run(batch))) == [VerdictKind.DIED, VerdictKind.PASS, VerdictKind.DIED]
    assert pool.restarts == restarts + 2


def test_mending_in_place_leaves_no_threads_and_no_connections_behind() -> None:
    """Each world has threads of its own for each of its groups, which caches of DTensor's had kept alive."""
    mesh, replicated = MeshSpec((2, 1)), parse_placements("(R, R)")

    def placed(weight: str, fault: str | None = None) -> Trial:
        places = (parse_placements(weight), replicated)
        return Trial(CASE, mesh, places, cotangents=((replicated,),), fault=fault)

    masked, reduced = placed("(S(0), S(1))"), placed("(P(sum), R)")  # masks differ from world to world
    counted = []
    with Pool(PoolKey.of(mesh), trial_limit=TRIAL_LIMIT, grace=0.5) as pool:
        for _ in range(3):
            fates = [one.fate for one in pool.run([masked, placed("(P(sum), R)", "raise:1"), reduced])]
            assert fates == [Fate.COMPLETED, Fate.STUCK, Fate.COMPLETED]
            counted.append([len(os.listdir(f"/proc/{pid}/{kind}")) for pid in pool.pids for kind in ("task", "fd")])
        assert pool.replaced == 0
    assert counted[0] == counted[1] == counted[2]


def test_a_rank_killed_from_outside_between_trials(pool: Pool) -> None:
    list(pool.run(BATCH[:1]))
    restarts, pids = pool.restarts, pool.pids
    os.kill(pids[1], signal.SIGKILL)
    observations = list(pool.run(BATCH))
    assert kinds(observations) == [VerdictKind.PASS] * len(BATCH)  # no trial is to blame
    assert pool.restarts == restarts + 1
    assert pool.pids[0] == pids[0]
    assert wait_for_end(pids[1:], 0) == []


def test_closing_leaves_no_process(pool: Pool) -> None:
    list(pool.run(BATCH[:1]))
    pids = pool.pids
    assert len(pids) == MESH.world_size
    assert all(running(pid) for pid in pids)
    pool.close()
    assert wait_for_end(pids, 0) == []
    assert pool.pids == []


def test_an_unknown_fault_is_an_error_of_ours(pool: Pool) -> None:
    observation = next(iter(pool.run([trial("R", "trip:1")])))
    report = observation.reports[0]
    assert report is not None
    assert report.raised is not None
    assert report.raised.type == "ValueError"
    assert "raise:RANK" in report.raised.message
    assert report.raised.ours


def test_a_trial_of_another_mesh_is_refused(pool: Pool) -> None:
    other = replace(BATCH[0], mesh=MeshSpec((4,)))
    with pytest.raises(ValueError, match="mesh 4 does not fit"):
        list(pool.run([other]))


def test_ranks_that_cannot_start_are_an_error() -> None:
    with Pool(PoolKey.of(MESH), imports=["no_such_module_here"]) as pool:
        with pytest.raises(PoolError, match="no_such_module_here"):
            list(pool.run(BATCH[:1]))
        assert pool.pids == []


CONTROLLER = """
import signal
from fault_trials import MESH, trial
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool

pool = Pool(PoolKey.of(MESH), trial_limit=300.0)
pool.start()
print(*pool.pids, flush=True)
list(pool.run([trial("P(sum)", {fault!r})]))
print("done", flush=True)
signal.pause()
"""


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fail if there are processes, ports, shared memory or files after the test that were not there before it."""
    with nothing_left_behind():
        yield


@pytest.mark.parametrize("fault", [None, "hang:1"], ids=["idle", "inside a collective"])
def test_ranks_end_with_their_controller(fault: str | None, nothing_left: None) -> None:
    source = CONTROLLER.format(fault=fault)
    with Command(["-c", source], errors_apart=True) as controller:
        wait_until(lambda: "\n" in controller.printed()[0], "the start of the ranks")
        pids = [int(pid) for pid in controller.printed()[0].splitlines()[0].split()]
        assert len(pids) == MESH.world_size
        if fault is None:
            wait_until(lambda: controller.printed()[0].endswith("\ndone\n"), "the end of the trial")
        else:
            time.sleep(1.0)  # rank 0 waits in a collective for rank 1
        assert all(running(pid) for pid in pids)
        controller.kill()
        controller.wait()
    assert wait_for_end(pids, 5.0) == []


def test_ranks_get_longer_to_refuse_than_to_raise() -> None:
    """A refusal of some ranks is a crash, so that a rank which is only late must not be given up."""

    def raised(refusal: bool) -> ProcessReport:
        return ProcessReport((0,), Phase.BACKWARD, Raised(Phase.BACKWARD, "RuntimeError", "", refusal=refusal))

    def patience(*refusals: bool) -> float:
        reports = {rank: raised(refusal) for rank, refusal in enumerate(refusals)}
        return Flight(trial("S(0)"), Terms(4, 20.0, 0.25, True, list), raised=reports).patience

    assert patience(False) == 0.25
    assert patience(True, True) == 2.5
    assert patience(True, False) == 0.25
