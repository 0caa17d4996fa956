"""Ctrl-C: once ends a run in order, and once more at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ReportInterrupted", "RunInterrupted", "one_interrupt_at_a_time"]


class RunInterrupted(Exception):  # noqa: N818 - the user's wish, not an error
    """A run was interrupted once more while it ended; the message says what is kept."""


class ReportInterrupted(Exception):  # noqa: N818 - likewise
    """What follows a run was interrupted, whose record is kept; the message says where, and how to see it."""


@contextmanager
def one_interrupt_at_a_time(seconds: float = 1.0) -> Iterator[None]:
    """Take interrupts that come within ``seconds`` of one another for one.

    Launchers send what they get to the process and to its group, so that one Ctrl-C comes two or three times; the
    second would break off the orderly end that the first has asked for. Elsewhere than in the main thread, or where
    interrupts are ignored or handled otherwise already, nothing changes.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    last = float("-inf")

    def interrupted(_number: int, _frame: object) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= seconds:
            last = now
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
