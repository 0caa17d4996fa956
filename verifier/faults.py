"""Faults on purpose, so that the tests can show what the engine makes of them."""

from __future__ import annotations

import os
import signal
import time

__all__ = ["InjectedFault", "inject"]


class InjectedFault(RuntimeError):  # noqa: N818 - it is a fault
    """The exception of the fault ``raise``."""


def inject(fault: str | None, ranks: tuple[int, ...]) -> None:
    """Do what ``fault`` says if it names one of ``ranks``: ``raise:1``, ``hang:1``, ``kill:1`` or ``abort:1``.

    Raises
    ------
    InjectedFault
        For the fault ``raise``.
    ValueError
        For a fault that does not exist.
    """
    if fault is None:
        return
    kind, _, rank = fault.partition(":")
    if kind not in ("raise", "hang", "kill", "abort") or not rank.isdigit():
        raise ValueError(f"fault {fault!r} is not raise:RANK, hang:RANK, kill:RANK or abort:RANK")
    if int(rank) not in ranks:
        return
    if kind == "raise":
        raise InjectedFault(f"rank {rank} raises on purpose")
    if kind == "hang":
        while True:
            time.sleep(3600)
    if kind == "abort":
        os.abort()
    os.kill(os.getpid(), signal.SIGKILL)
