"""What ends a run from outside, Ctrl-C, SIGTERM and SIGHUP: once in order, and once more at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["ENDING_SIGNALS", "Interrupts", "ReportInterrupted", "RunInterrupted", "one_interrupt_at_a_time"]

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What asks a program to end and gives it time for that: a terminal, a launcher or the system, a closed connection."""


class RunInterrupted(Exception):  # noqa: N818 - the user's wish, not an error
    """A run was interrupted once more while it ended; the message says what is kept."""


class ReportInterrupted(Exception):  # noqa: N818 - likewise
    """What follows a run was interrupted, whose record is kept; the message says where, and how to see it."""


@dataclass
class Interrupts:
    """Which signal came last, if any did."""

    number: int = 0

    @property
    def status(self) -> int | None:
        """The exit status that shells expect of a program that a signal has ended; None of a Ctrl-C, or without any.

        A Ctrl-C ends a run as a time limit does, with what it has found by then.
        """
        return 128 + self.number if self.number not in (0, signal.SIGINT) else None

    def __str__(self) -> str:
        return f"interrupted by {signal.Signals(self.number).name}" if self.status else "interrupted"


@contextmanager
def one_interrupt_at_a_time(
    seconds: float = 1.0, signals: Sequence[signal.Signals] = (signal.SIGINT,)
) -> Iterator[Interrupts]:
    """Raise KeyboardInterrupt for each of ``signals``, and take those within ``seconds`` of one another for one.

    Launchers send what they get to the process and to its group, and some systems SIGHUP right after SIGTERM, so that
    one wish comes two or three times; the second would break off the orderly end that the first has asked for.
    Elsewhere than in the main thread, or where a signal is ignored or handled otherwise already, nothing changes.
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
            raise KeyboardInterrupt

    kept = {number: handler for number in signals if (handler := signal.getsignal(number)) is _default(number)}
    for number in kept:
        signal.signal(number, interrupted)
    try:
        yield interrupts
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _default(number: signal.Signals) -> object:
    return signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
