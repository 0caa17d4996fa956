"""Ranks that ``torchrun`` started, on any number of machines.

Each process that torchrun starts reads its rank here. The first one is the controller: it runs the command line as
without torchrun. The others are *keepers*: each holds the place of its rank, and starts, interrupts and ends worker
processes there when the controller asks. So a rank that dies or hangs costs one trial. Torchrun does not notice,
although it ends the whole job when one of its own processes ends.

A worker talks to the controller directly, over a TCP connection that its keeper has opened and passed to it. Facts that
only the worker's machine knows (its phase, how it ended) go through the keeper. A keeper ends when its connection to
the controller ends. Its workers end with the keeper, as every worker ends with the process that started it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from verifier import __version__
from verifier.meshes.hosts import Place
from verifier.meshes.torchrun.connections import interface_of, own_address

__all__ = ["GATHERING_LIMIT", "VERSIONS", "Hello", "KeeperFailure", "TorchrunRank", "WorkerHello", "gloo_interface"]

GATHERING_LIMIT = 300
"""Seconds that the processes of torchrun get to find each other: some load torch from a slow disk."""
VERSIONS = (__version__, str(torch.__version__))


@dataclass(frozen=True)
class TorchrunRank:
    """What torchrun tells each process that it starts; see :meth:`read` for the source."""

    rank: int
    world_size: int
    local_rank: int
    node: int
    host: str
    restarts: int
    attempt: int

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> TorchrunRank | None:
        """Return the variables in the environment of a process of torchrun, or None for any other process.

        The variables are those that https://docs.pytorch.org/docs/stable/elastic/run.html lists.
        """
        if "TORCHELASTIC_RUN_ID" not in environment or "RANK" not in environment:
            return None
        return cls(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment["LOCAL_RANK"]),
            node=int(environment["GROUP_RANK"]),
            host=environment["MASTER_ADDR"],
            restarts=int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")),
            attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )

    def store(self) -> Store:
        """Return torchrun's store, under a prefix of our own."""
        shared, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=GATHERING_LIMIT)))
        return PrefixStore(f"dtensor-verifier/{self.attempt}", shared)


@dataclass(frozen=True)
class Hello:
    """The first message of a keeper after it has connected."""

    rank: int
    place: Place
    versions: tuple[str, str]


@dataclass(frozen=True)
class WorkerHello:
    """The first message on a connection that a worker will use."""

    rank: int
    number: int


@dataclass(frozen=True)
class KeeperFailure:
    """A keeper's answer if a request failed."""

    text: str


def gloo_interface(connection: Connection) -> str | None:
    """Return the interface on which gloo meets other machines: the user's choice, or that of ``connection``.

    By default gloo takes the interface to which the machine's name resolves, which on many systems is the loopback.
    """
    return os.environ.get("GLOO_SOCKET_IFNAME") or interface_of(own_address(connection))
