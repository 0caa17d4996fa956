"""Threads that are ranks of a mesh: they communicate, end together, and leave nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from verifier.torch_internals.simulation import ThreadedRanks


@pytest.fixture
def ranks() -> Iterator[ThreadedRanks]:
    made, before = ThreadedRanks((3,), 5.0), threading.active_count()
    yield made
    made.close()
    assert threading.active_count() == before


def from_left(rank: int, mesh: DeviceMesh) -> float:
    """Return the number of the left neighbour, which has sent it."""
    got = torch.zeros(1)
    size = mesh.size()
    sent = dist.P2POp(dist.isend, torch.full((1,), float(rank)), (rank + 1) % size)
    received = dist.P2POp(dist.irecv, got, (rank - 1) % size)
    for work in dist.batch_isend_irecv([sent, received]):
        work.wait()
    return got.item()


def total(rank: int, mesh: DeviceMesh) -> float:
    value = torch.full((1,), float(rank))
    dist.all_reduce(value)
    return value.item()


def waiting_in_vain(rank: int, mesh: DeviceMesh) -> None:
    dist.irecv(torch.zeros(1), (rank + 1) % mesh.size()).wait()


def failing_on_one_rank(rank: int, mesh: DeviceMesh) -> None:
    if rank == 1:
        raise ValueError("one rank alone")
    waiting_in_vain(rank, mesh)


def test_ranks_communicate_call_after_call(ranks: ThreadedRanks) -> None:
    assert ranks.run(from_left) == [2.0, 0.0, 1.0]
    assert ranks.run(total) == [3.0, 3.0, 3.0]
    assert ranks.run(from_left) == [2.0, 0.0, 1.0]


def test_what_one_rank_raises_ends_the_others(ranks: ThreadedRanks) -> None:
    with pytest.raises(ValueError, match="one rank alone"):
        ranks.run(failing_on_one_rank)
    assert ranks.run(total) == [3.0, 3.0, 3.0]


def test_ranks_that_wait_in_vain_are_ended() -> None:
    ranks, before = ThreadedRanks((2,), 0.5), threading.active_count()
    with pytest.raises(TimeoutError, match=r"no end within 0\.5 s"):
        ranks.run(waiting_in_vain)
    assert threading.active_count() == before
