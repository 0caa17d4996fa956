"""How ranks of one machine agree: all or nobody, and nobody is left waiting once it is broken off."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from fault_trials import BATCH, MESH, kinds, trial

from verifier.core.observation import Fate
from verifier.core.verdict import VerdictKind
from verifier.meshes.agreement import Datagrams
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool
from verifier.meshes.processes import Starter

SIZE = 4


@pytest.fixture
def ranks() -> Iterator[list[Datagrams]]:
    meeting = f"test-{secrets.token_hex(8)}"
    opened = [Datagrams(meeting, rank, SIZE) for rank in range(SIZE)]
    yield opened
    for one in opened:
        one.close()


def together(ranks: list[Datagrams], said: Callable[[int], tuple[bool, int]]) -> list[bool]:
    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(lambda rank: ranks[rank].agree(*said(rank)), range(len(ranks))))


@pytest.mark.parametrize("odd", range(SIZE))
def test_a_rank_that_failed_or_holds_something_else_stops_all_ranks(ranks: list[Datagrams], odd: int) -> None:
    assert together(ranks, lambda rank: (False, 7)) == [True] * SIZE
    assert together(ranks, lambda rank: (rank == odd, 7)) == [False] * SIZE
    assert together(ranks, lambda rank: (False, 0xFFFFFFFF if rank == odd else 0)) == [False] * SIZE
    assert together(ranks, lambda rank: (False, 0)) == [True] * SIZE


def broken_off(ranks: list[Datagrams], waiting: int) -> float:
    """Return how long rank ``waiting`` takes to notice that nobody else comes."""
    raised: list[Exception] = []

    def wait() -> None:
        try:
            ranks[waiting].agree(False, 0)
        except ConnectionAbortedError as error:
            raised.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    started = time.monotonic()
    ranks[waiting].break_off()
    ranks[waiting].break_off()  # as often as the breaker likes
    thread.join(5.0)
    assert len(raised) == 1, "still waiting"
    return time.monotonic() - started


@pytest.mark.parametrize("waiting", [0, 2])
def test_who_waits_for_the_others_can_be_broken_off(ranks: list[Datagrams], waiting: int) -> None:
    assert broken_off(ranks, waiting) < 1.0
    with pytest.raises(ConnectionAbortedError):  # and from then on
        ranks[waiting].agree(False, 0)


def test_ranks_that_are_gone_are_waited_for_until_somebody_breaks_it_off(ranks: list[Datagrams]) -> None:
    for one in ranks[:1] + ranks[2:]:
        one.close()
    assert broken_off(ranks, 1) < 1.0
    ranks[1].close()
    ranks[1].break_off()


def test_ranks_of_different_worlds_do_not_agree() -> None:
    one, other = (Datagrams(f"test-{secrets.token_hex(8)}", 0, 1) for _ in range(2))
    assert one.agree(False, 1)
    assert not other.agree(True, 1)
    one.close()
    other.close()


def test_a_rank_that_is_a_round_behind_is_a_mistake_of_ours(ranks: list[Datagrams]) -> None:
    two = ranks[:1] + ranks[3:]
    two[0]._addresses = two[0]._addresses[:2]
    two[1]._round = 5
    two[1]._send(0, 7, False)
    with pytest.raises(AssertionError, match="round 5 of another rank meets round 1"):
        two[0].agree(False, 7)


def meetings(pool: Pool) -> list[str]:
    """Return the addresses at which the ranks of a pool wait for datagrams."""
    named = dict(line.split()[6:8] for line in Path("/proc/net/unix").read_text().splitlines() if "@verifier-" in line)
    held = {os.readlink(link) for pid in pool.pids for link in Path(f"/proc/{pid}/fd").iterdir()}
    return [name for inode, name in named.items() if f"socket:[{inode}]" in held]


@pytest.mark.ranks
@pytest.mark.parametrize("machines", [1, 2])
def test_ranks_of_several_machines_agree_through_gloo(monkeypatch: pytest.MonkeyPatch, machines: int) -> None:
    own = Starter.places
    if machines > 1:
        apart = lambda self, size: tuple(replace(p, machine=f"number {p.number}") for p in own(self, size))  # noqa: E731
        monkeypatch.setattr(Starter, "places", apart)
    faulty = trial("P(sum)", "raise:1")
    with Pool(PoolKey.of(MESH), trial_limit=20.0, grace=0.5) as pool:
        observations = list(pool.run([BATCH[0], faulty, BATCH[0]]))
        assert kinds(observations) == [VerdictKind.PASS, VerdictKind.CRASH, VerdictKind.PASS]
        assert observations[1].fate is Fate.STUCK
        assert len(meetings(pool)) == (MESH.world_size if machines == 1 else 0)  # one world, none of before the fault
