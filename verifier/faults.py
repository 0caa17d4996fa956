"""Faults on purpose, so that the tests can show what the engine makes of them."""

from __future__ import annotations

import os
import signal
import time

from verifier.cases import Phase

__all__ = ["InjectedFault", "inject"]


class InjectedFault(RuntimeError):  # noqa: N818 - it is a fault
    """The exception of the fault ``raise``."""


def inject(fault: str | None, ranks: tuple[int, ...], phase: Phase) -> None:
    """Do what ``fault`` says if it names one of ``ranks`` and this ``phase``.

    A fault is ``raise:1``, ``hang:1``, ``kill:1`` or ``abort:1``, in the forward phase unless another one is named:
    ``raise:1:gather``.

    Raises
    ------
    InjectedFault
        For the fault ``raise``.
    ValueError
        For a fault that does not exist.
    """
    if fault is None:
        return
    kind, rank, *where = fault.split(":")
    if kind not in ("raise", "hang", "kill", "abort") or not rank.isdigit():
        raise ValueError(f"fault {fault!r} is not raise:RANK, hang:RANK, kill:RANK or abort:RANK")
    if int(rank) not in ranks or phase != (where or [Phase.FORWARD])[0]:
        return
    if kind == "raise":
        raise InjectedFault(f"rank {rank} raises on purpose")
    if kind == "hang":
        while True:
            time.sleep(3600)
    if kind == "abort":
        os.abort()
    os.kill(os.getpid(), signal.SIGKILL)
