"""How the ranks of a world agree, several times in each trial, on whether they continue.

If all ranks are on one machine, each sends a datagram to the first rank and gets one back. An all-reduce of gloo has
the same result. It takes several times as long, because a second thread in each process does it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from typing import Protocol

import torch
import torch.distributed as dist

__all__ = ["Agreement", "AllReduces", "Datagrams"]


class Agreement(Protocol):
    """A way for ranks to agree; every rank calls it the same number of times."""

    def agree(self, failed: bool, digest: int) -> bool:
        """Return whether no rank has ``failed`` and all have the same ``digest``, a number of 32 bits."""

    def break_off(self) -> None:
        """Interrupt :meth:`agree` in the main thread, and every later call of it. Another thread calls this."""

    def close(self) -> None:
        """Release the system's resources."""


class AllReduces:
    """Agreement by all-reduces in a separate process group, whose collectives never pair up with those of a mesh.

    Dropping the group's connections breaks an agreement off.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._maximum = dist.AllreduceOptions()
        self._maximum.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]

    def agree(self, failed: bool, digest: int) -> bool:
        flags = torch.tensor([int(failed), digest, -digest])
        # the group itself: dist.all_reduce does the same with checks and logging around it
        self._group.allreduce([flags], self._maximum).wait()
        anyone_failed, highest, minus_lowest = flags.tolist()
        return not anyone_failed and highest == -minus_lowest

    def break_off(self) -> None:
        pass

    def close(self) -> None:
        pass


class Datagrams:
    """Agreement by datagrams on this machine: all ranks send to the first rank, which answers all.

    Ranks wait for a rank that is gone until the agreement is broken off: only the controller knows that a rank is gone.

    Parameters
    ----------
    meeting
        A name that no other world has. It is an abstract address of Linux, so it leaves no file behind.
    rank, size
        Of this process, and of the world.
    """

    _MESSAGE = struct.Struct("!QI?")

    def __init__(self, meeting: str, rank: int, size: int) -> None:
        self._addresses = [f"\0{meeting}/{each}" for each in range(size)]
        self._rank = rank
        self._round = 0
        self._broken = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._addresses[rank])

    def agree(self, failed: bool, digest: int) -> bool:
        self._round += 1
        if self._rank:
            self._send(0, digest, failed)
            _, failed = self._receive()
            return not failed
        everyone = [(digest, failed), *(self._receive() for _ in self._addresses[1:])]
        go_on = not any(failed for _, failed in everyone) and len({digest for digest, _ in everyone}) == 1
        for rank in range(1, len(self._addresses)):
            self._send(rank, digest, not go_on)
        return go_on

    def _send(self, rank: int, digest: int, failed: bool) -> None:
        message = self._MESSAGE.pack(self._round, digest, failed)
        while not self._broken.is_set():
            try:
                self._socket.sendto(message, socket.MSG_DONTWAIT, self._addresses[rank])
            except BlockingIOError:  # the receiver's queue is full
                time.sleep(0.001)
            except ConnectionRefusedError:  # gone
                return
            else:
                return

    def _receive(self) -> tuple[int, bool]:
        message = self._socket.recv(self._MESSAGE.size)
        if self._broken.is_set():
            raise ConnectionAbortedError("the ranks were told to stop waiting for each other")
        number, digest, failed = self._MESSAGE.unpack(message)
        assert number == self._round, f"round {number} of another rank meets round {self._round}"
        return digest, failed

    def break_off(self) -> None:
        self._broken.set()
        with contextlib.suppress(OSError):  # closed meanwhile
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
