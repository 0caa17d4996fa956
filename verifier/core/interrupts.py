"""Ctrl-C, SIGTERM and SIGHUP: the first ends a run in order, the second ends it immediately."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ENDING_SIGNALS",
    "Interrupts",
    "ReportInterrupted",
    "RunInterrupted",
    "note_arrival",
    "one_interrupt_at_a_time",
    "raise_lost_interrupt",
]

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a program to end: from a terminal, from a launcher or the system, and after a closed connection."""


class RunInterrupted(Exception):  # noqa: N818 - the user's wish, not an error
    """A run was interrupted a second time while it ended; the message says what is kept."""


class ReportInterrupted(Exception):  # noqa: N818 - likewise
    """The report after a run was interrupted. The record is kept; the message says where, and how to show it."""


@dataclass
class Interrupts:
    """The last signal; 0 if there was none."""

    number: int = 0

    @property
    def status(self) -> int | None:
        """The exit status that shells expect of a program that a signal ended; None after Ctrl-C or without a signal.

        A Ctrl-C ends a run as a time limit does: the findings up to then are reported.
        """
        return 128 + self.number if self.number not in (0, signal.SIGINT) else None

    def __str__(self) -> str:
        return f"interrupted by {signal.Signals(self.number).name}" if self.status else "interrupted"


class _Arrivals:
    """``due`` is true from when a signal's KeyboardInterrupt was raised until :func:`note_arrival`."""

    due = False


def note_arrival() -> None:
    """Say that the KeyboardInterrupt of the last signal was caught where it ends a run."""
    _Arrivals.due = False


def raise_lost_interrupt() -> None:
    """Raise KeyboardInterrupt if that of a signal was lost on its way.

    Python drops what is raised in a destructor, in a callback of a weak reference or of the garbage collector. A run
    that calls this after each step ends all the same.
    """
    if _Arrivals.due:
        raise KeyboardInterrupt


@contextmanager
def one_interrupt_at_a_time(
    seconds: float = 1.0, signals: Sequence[signal.Signals] = (signal.SIGINT,)
) -> Iterator[Interrupts]:
    """Raise KeyboardInterrupt for each of ``signals``, but only once for signals within ``seconds`` of one another.

    One request can arrive two or three times: launchers pass a signal to the process and to its group, and some systems
    send SIGHUP right after SIGTERM. The repeated signal would break off the orderly end that the first asked for.
    Nothing changes outside the main thread, or for a signal that is ignored or already has another handler.

    A KeyboardInterrupt that Python drops on its way is not printed; see :func:`raise_lost_interrupt`.
    """
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    last = float("-inf")

    def interrupted(number: int, _frame: object) -> None:
        nonlocal last
        now = time.monotonic()
        interrupts.number = number
        if now - last >= seconds:
            last = now
            _Arrivals.due = True
            raise KeyboardInterrupt

    kept = {number: handler for number in signals if (handler := signal.getsignal(number)) is _default(number)}
    for number in kept:
        signal.signal(number, interrupted)
    try:
        with _lost_interrupts_unprinted():
            yield interrupts
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        if kept:
            _Arrivals.due = False


@contextmanager
def _lost_interrupts_unprinted() -> Iterator[None]:
    """Print no traceback of a signal's KeyboardInterrupt that Python drops, and all else that it drops as before."""
    printed = sys.unraisablehook

    def dropped(unraisable: Any, /) -> None:
        if not (_Arrivals.due and unraisable.exc_type is KeyboardInterrupt):
            printed(unraisable)

    sys.unraisablehook = dropped
    try:
        yield
    finally:
        sys.unraisablehook = printed


def _default(number: signal.Signals) -> object:
    return signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
