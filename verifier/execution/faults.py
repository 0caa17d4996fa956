"""Faults on purpose, so that the tests can show what the engine makes of them."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable
from typing import NoReturn

import torch
import torch.distributed as dist

from verifier.core.verdict import Phase

__all__ = ["FAULTS", "InjectedFault", "inject"]

_CHUNK = 64 << 20


class InjectedFault(RuntimeError):  # noqa: N818 - it is a fault
    """The exception of the fault ``raise``."""


def _raise() -> NoReturn:
    raise InjectedFault("raises on purpose")


def _hang() -> NoReturn:
    while True:
        time.sleep(3600)


def _nap() -> None:
    time.sleep(1.0)


def _labour() -> None:
    """Compute for a second, as a rank does that gets a sixth of a busy processor."""
    for _ in range(20):
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass
        time.sleep(0.25)


def _spin() -> NoReturn:
    while True:
        pass


def _freeze() -> None:
    """Hang in native code that does not let go of the interpreter, so that no thread of the process runs."""
    ctypes.PyDLL(None).sleep(3600)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _enter() -> None:
    """Enter a collective of the mesh that the others do not enter."""
    dist.all_reduce(torch.ones(3))


def _leave() -> NoReturn:
    """Begin a collective that the others do not enter, and raise without waiting for its end."""
    dist.all_reduce(torch.ones(3), async_op=True)
    _raise()


def _check_limited() -> None:
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        raise ValueError("this fault needs ranks with a memory limit")


def _exhaust() -> None:
    """Allocate tensors until that fails."""
    _check_limited()
    held = []
    while True:
        held.append(torch.empty(_CHUNK, dtype=torch.uint8))


def _bad_alloc() -> None:
    """Have C++ throw ``std::bad_alloc`` where nobody catches it."""
    _check_limited()
    operator_new = ctypes.CDLL("libstdc++.so.6")._Znwm
    operator_new.argtypes = [ctypes.c_size_t]
    operator_new(1 << 46)


FAULTS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "nap": _nap,
    "labour": _labour,
    "spin": _spin,
    "hang": _hang,
    "freeze": _freeze,
    "stop": _stop,
    "kill": _kill,
    "abort": os.abort,
    "enter": _enter,
    "leave": _leave,
    "exhaust": _exhaust,
    "bad_alloc": _bad_alloc,
}
"""What a rank may do, besides ``skip``: leave out the collectives of the phase and go on to what comes after it."""


def inject(fault: str | None, ranks: tuple[int, ...], phase: Phase, agree: Callable[[bool, int], bool]) -> None:
    """Do what ``fault`` says if it names one of ``ranks`` and this ``phase``.

    A fault is ``raise:1``, ``hang:1`` and so on, with the rank or ranks, as ``kill:0,2``; it comes in the forward phase
    unless another one is named: ``raise:1:gather``.

    Parameters
    ----------
    agree
        How the ranks agree after the phase, see :class:`verifier.execution.runner.Exchange`.

    Raises
    ------
    InjectedFault
        For the faults ``raise`` and ``leave``.
    ValueError
        For a fault that does not exist.
    """
    if fault is None:
        return
    kind, listing, *where = fault.split(":")
    named = listing.split(",")
    if kind not in (*FAULTS, "skip") or not all(rank.isdigit() for rank in named):
        raise ValueError(f"fault {fault!r} is none of {', '.join(f'{name}:RANK' for name in (*FAULTS, 'skip'))}")
    if not set(map(int, named)).intersection(ranks) or phase != (where or [Phase.FORWARD])[0]:
        return
    if kind == "skip":
        agree(False, 0)
    else:
        FAULTS[kind]()
