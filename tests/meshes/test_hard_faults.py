"""Hangs inside collectives, ranks out of memory, native hangs, and kills at any moment: one trial's fate, no leaks."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import spinning_program
import torch
from fault_trials import CASE, MESH, kinds, trial, wait_for_end
from leftovers import children, nothing_left_behind

from verifier.calls.result import NothingVerified
from verifier.calls.verifier import Verifier
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Fate
from verifier.core.verdict import Phase, VerdictKind
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool, PoolSet
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.placements.parsing import parse_placements

pytestmark = pytest.mark.ranks

MIB = 1 << 20
NUMBERS = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)
PHASES = [Phase.SETUP, Phase.FORWARD, Phase.GATHER, Phase.BACKWARD, Phase.GATHER_GRADIENT]


@pytest.fixture(scope="module")
def warmed_up() -> None:
    """Have torch open what it opens once in a process, such as the pipe of its first store, before that is counted."""
    with Pool(PoolKey.of(MESH)) as pool:
        list(pool.run([trial("S(1)")]))


@pytest.fixture
def nothing_left(warmed_up: None) -> Iterator[None]:
    """Fail if there are processes, ports, shared memory or files after the test that were not there before it."""
    with nothing_left_behind():
        yield


# -------------------------------------------------------------------------------------------------------- single faults
@pytest.mark.parametrize(
    ("fault", "weight", "kind", "detail"),
    [
        ("skip:1", "P(sum)", VerdictKind.HANG, "rank 0 in forward, rank 1 in exchange"),
        ("enter:1", "S(1)", VerdictKind.HANG, "rank 0 in exchange, rank 1 in forward"),
        ("skip:0:gather", "S(1)", VerdictKind.HANG, "rank 0 in exchange, rank 1 in gather"),
        ("freeze:1", "P(sum)", VerdictKind.HANG, "ranks 0, 1 in forward"),
        ("stop:1", "P(sum)", VerdictKind.HANG, "ranks 0, 1 in forward"),
    ],
)
def test_a_hang_inside_a_collective_or_native_code(
    fault: str, weight: str, kind: VerdictKind, detail: str, nothing_left: None
) -> None:
    with Pool(PoolKey.of(MESH), trial_limit=3.0) as pool:
        observations = list(pool.run([trial("S(1)"), trial(weight, fault), trial("P(sum)"), trial("S(0)")]))
        assert kinds(observations) == [VerdictKind.PASS, kind, VerdictKind.PASS, VerdictKind.PASS]
        assert detail in observations[1].detail
        assert pool.restarts == 1
        in_a_collective = fault.startswith(("skip", "enter"))
        # who waits in a collective comes out of it; who hangs elsewhere has to be replaced
        assert pool.replaced == 0 if in_a_collective else pool.replaced >= 1


def test_a_rank_that_gets_little_of_a_processor_is_no_hang(nothing_left: None) -> None:
    """It computes for a second in six; ranks that wait for it do nothing, as in a hang."""
    with Pool(PoolKey.of(MESH), trial_limit=2.0) as pool:
        observations = list(pool.run([trial("S(1)"), trial("P(sum)", "labour:1"), trial("P(sum)")]))
        assert kinds(observations) == [VerdictKind.PASS] * 3
        assert observations[1].seconds > 2 * pool.trial_limit
        assert pool.restarts == 0


def test_a_rank_that_computes_without_end_is_inconclusive(nothing_left: None) -> None:
    """Whether it would have come to an end nobody knows."""
    with Pool(PoolKey.of(MESH), trial_limit=2.0) as pool:
        observations = list(pool.run([trial("S(1)"), trial("P(sum)", "spin:1"), trial("P(sum)")]))
        assert kinds(observations) == [VerdictKind.PASS, VerdictKind.INCONCLUSIVE, VerdictKind.PASS]
        assert observations[1].fate is Fate.SLOW
        assert "ranks 0, 1 in forward" in observations[1].detail
        assert observations[1].seconds > pool.trial_limit
        assert pool.restarts == 1


@pytest.mark.parametrize("fault", ["enter:1", "skip:0"])
def test_ranks_in_different_collectives_of_one_group(fault: str, nothing_left: None) -> None:
    """Gloo pairs them up and may hang, raise or end the process; either way it is that trial's verdict."""
    with Pool(PoolKey.of(MESH), trial_limit=3.0) as pool:
        observations = list(pool.run([trial("P(sum)"), trial("P(sum)", fault), trial("P(sum)"), trial("S(0)")]))
    first, faulty, *rest = kinds(observations)
    assert [first, *rest] == [VerdictKind.PASS] * 3
    assert faulty.bad


LIMIT = 512 * MIB
OUT = "out of memory under the limit of 512 MiB a rank: "


@pytest.mark.parametrize(
    ("fault", "weight", "kind", "says"),
    [
        ("exhaust:1", "P(sum)", VerdictKind.CRASH, f"rank 1 raised RuntimeError: {OUT}"),
        ("exhaust:1", "S(1)", VerdictKind.CRASH, f"rank 1 raised RuntimeError: {OUT}"),
        ("exhaust:0:backward", "S(1)", VerdictKind.CRASH, f"rank 0 raised RuntimeError: {OUT}"),
        ("bad_alloc:1", "P(sum)", VerdictKind.DIED, f"{OUT}rank 1 ended with signal SIGABRT"),
    ],
)
def test_a_rank_out_of_memory(fault: str, weight: str, kind: VerdictKind, says: str, nothing_left: None) -> None:
    with Pool(PoolKey.of(MESH), memory_limit=LIMIT) as pool:
        observations = list(pool.run([trial("P(sum)"), trial(weight, fault), trial("P(sum)"), trial("S(0)")]))
    assert kinds(observations) == [VerdictKind.PASS, kind, VerdictKind.PASS, VerdictKind.PASS]
    assert says in judge(observations[1], make_reference(CASE)).message


def test_memory_is_not_exhausted_without_a_limit() -> None:
    with Pool(PoolKey.of(MESH)) as pool:
        (observation,) = pool.run([trial("R", "exhaust:1")])
    verdict = judge(observation, make_reference(CASE))
    assert "needs ranks with a memory limit" in verdict.message


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_killed_in_each_phase(phase: Phase, nothing_left: None) -> None:
    with Pool(PoolKey.of(MESH)) as pool:
        observations = list(pool.run([trial("S(1)"), trial("S(1)", f"kill:1:{phase}"), trial("P(sum)")]))
        assert pool.replaced == 1
    assert kinds(observations) == [VerdictKind.PASS, VerdictKind.DIED, VerdictKind.PASS]
    assert f"in {phase}" in observations[1].detail


def test_the_death_is_that_of_the_trial_the_rank_was_in(nothing_left: None) -> None:
    """Rank 1 is through with the first trial and dies in the second, while rank 0 has not finished the first."""
    slow = OpCase("aten.mm.default", "torch.ops.aten.mm.default", (torch.ones(4, 4), torch.ones(4, 4)))
    both = tuple((p,) for p in (parse_placements("R")[0], parse_placements("R")[0]))
    innocent = Trial(slow, MESH, both, fault="nap:0:inputs")
    with Pool(PoolKey.of(MESH)) as pool:
        observations = list(pool.run([innocent, trial("P(sum)", "kill:1:setup"), trial("S(1)")]))
    assert [observation.fate for observation in observations] == [Fate.COMPLETED, Fate.DIED, Fate.COMPLETED]


def test_leaving_the_iterator_early_spoils_nothing(nothing_left: None) -> None:
    with Pool(PoolKey.of(MESH)) as pool:
        batch = [trial(weight) for weight in ("S(1)", "P(sum)", "S(0)", "R") for _ in range(10)]
        for _ in pool.run([trial("P(sum)", "raise:1"), *batch]):
            break
        assert kinds(list(pool.run(batch))) == [VerdictKind.PASS] * len(batch)


# ---------------------------------------------------------------------------------------------------- at any moment
RANKS = 3
WIDE = MeshSpec((RANKS,))


WEIGHTS = ["S(1)", "R", "P(sum)", "S(0)"]


def wide(weight: str) -> Trial:
    return replace(trial(weight), mesh=WIDE)


@pytest.fixture(scope="module")
def faultless() -> dict[str, VerdictKind]:
    """The verdict by placements of the weight: not all PASS, since two ranks have all four rows and one has none."""
    with Pool(PoolKey.of(WIDE)) as pool:
        return dict(zip(WEIGHTS, kinds(list(pool.run([wide(weight) for weight in WEIGHTS]))), strict=True))


class Killer(threading.Thread):
    """Kills a random rank now and then, at whatever it is: loading, meeting the others, trying, being mended."""

    def __init__(self, pool: Pool, seed: int, pauses: tuple[float, float], kills: int) -> None:
        super().__init__(daemon=True)
        self.pool, self.random, self.pauses, self.kills = pool, random.Random(seed), pauses, kills
        self.killed: list[int] = []
        self.done = threading.Event()

    def run(self) -> None:
        while len(self.killed) < self.kills and not self.done.wait(self.random.uniform(*self.pauses)):
            candidates = sorted(set(self.pool.pids or children()) - set(self.killed))
            if candidates:
                victim = self.random.choice(candidates)
                try:
                    os.kill(victim, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                self.killed.append(victim)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2, 3))])
def test_a_rank_killed_at_any_moment_of_a_batch(
    seed: int, faultless: dict[str, VerdictKind], nothing_left: None
) -> None:
    """All trials but those that a kill ended have the verdict that they have without faults, in the same order."""
    weights = WEIGHTS * 60
    batch = [wide(weight) for weight in weights]
    with Pool(PoolKey.of(WIDE)) as pool:
        list(pool.run(batch[:4]))
        # a trial takes milliseconds, mending tenths of a second: kills hit both, and often hit twice
        killer = Killer(pool, seed, (0.0, 0.25), kills=6)
        killer.start()
        observations = list(pool.run(batch))
        while killer.is_alive():
            observations += list(pool.run(batch))
        rounds = len(observations) // len(batch)
        assert [o.trial for o in observations] == batch * rounds
        died = [observation for observation in observations if observation.fate is Fate.DIED]
        assert len(died) <= len(killer.killed)
        assert all("SIGKILL" in observation.detail for observation in died)
        for observation, kind, weight in zip(observations, kinds(observations), weights * rounds, strict=True):
            assert observation.fate is Fate.DIED or kind is faultless[weight], observation
        assert wait_for_end(killer.killed, 0) == []
        assert kinds(list(pool.run(batch[:4]))) == list(faultless.values())


@pytest.mark.parametrize(
    "delay", [0.05, *(pytest.param(delay, marks=pytest.mark.nightly) for delay in (0.02, 0.1, 0.2))]
)
def test_a_rank_killed_while_the_ranks_start(
    delay: float, faultless: dict[str, VerdictKind], nothing_left: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The others do not wait for it, and meet its successor at the next attempt."""
    before = children()

    def kill() -> None:
        time.sleep(delay)
        for pid in sorted(children() - before)[:1]:
            os.kill(pid, signal.SIGKILL)

    with Pool(PoolKey.of(WIDE)) as pool:
        killer = threading.Thread(target=kill)
        killer.start()
        pool.start()
        killer.join()
        assert kinds(list(pool.run([wide(weight) for weight in WEIGHTS]))) == list(faultless.values())
    assert "no answer" not in caplog.text


def test_a_new_process_takes_the_seat() -> None:
    """On a mesh of two dims, whose groups it has to make with ranks that have made some before."""
    mesh = MeshSpec((2, 2))

    def nested(weight: str, fault: str | None = None) -> Trial:
        return replace(
            trial("R", fault), mesh=mesh, combination=(parse_placements(weight), parse_placements("(R, R)")),
            cotangents=((parse_placements("(R, R)"),),),
        )  # fmt: skip

    with Pool(PoolKey.of(mesh)) as pool:
        observations = list(pool.run([nested("(S(0), S(1))"), nested("(P(sum), R)", "kill:2"), nested("(R, P(sum))")]))
        before = pool.pids
        observations += list(pool.run([nested("(R, P(sum))", "kill:1"), nested("(S(1), S(0))")]))
        assert pool.pids[1] not in before  # a rank that is late on a busy machine may be replaced as well
        assert pool.pids[0] == before[0]
    passed, died = VerdictKind.PASS, VerdictKind.DIED
    assert kinds(observations) == [passed, died, passed, died, passed]


LOGGING_FILE = """
import logging
logging.getLogger("strategies.mine").warning("my rules are loaded")
"""


def test_log_lines_of_ranks_come_with_the_rank(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those of the user's files, too, and none is lost when the rank dies."""
    path = tmp_path / "mine.py"
    path.write_text(LOGGING_FILE, encoding="utf-8")
    with caplog.at_level("INFO", logger="verifier"), Pool(PoolKey.of(MESH), imports=[str(path)]) as pool:
        list(pool.run([trial("P(sum)", "kill:1"), trial("S(1)")]))
    texts = [record.getMessage() for record in caplog.records]
    assert [text for text in texts if text.startswith("rank 1: is rank 1 of 2 since ")]
    assert texts.count("rank 0: my rules are loaded") == 1
    assert texts.count("rank 1: my rules are loaded") == 2  # the one that died, and the one that took its place
    assert [text for text in texts if "rank 1 is lost: process" in text]
    assert [text for text in texts if text.startswith("ranks mended in ") and "SIGKILL in forward" in text]


def test_verify_proves_nothing_where_a_call_may_have_no_end(nothing_left: None) -> None:
    """It passes under some placements, and does not try others once one has taken so long."""
    program = Path(spinning_program.__file__)
    pools = PoolSet(lambda key: Pool(key, [str(program)], trial_limit=1.0))
    verify = Verifier(pools, MESH)
    try:
        with pytest.raises(NothingVerified, match=r"x=S\(\d\): ranks still computed .*ranks 0, 1 in forward"):
            verify(spinning_program.spins, NUMBERS, cap=None, record=False)
        result = verify(spinning_program.spins, NUMBERS, placements=["R"], record=False)
        assert set(result.counts) == {VerdictKind.PASS}
    finally:
        pools.close()
