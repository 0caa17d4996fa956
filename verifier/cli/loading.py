"""Loads modules that take seconds, such as torch; a signal in this time ends the program at once."""

import _signal as signal  # type: ignore[import-not-found]  # the rest of it takes a tenth of a second to load
import gc
import os

__all__ = ["Loading"]

_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


class Loading:
    """A ``with`` block in which SIGINT, SIGTERM and SIGHUP end the process with a line and their status.

    A KeyboardInterrupt could become another error in a module that is loading. Garbage is not collected in the block,
    because loaded modules stay, and looking through them takes a second.
    """

    def __enter__(self) -> None:
        gc.disable()
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        heeded = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
        self._before = {number: signal.signal(number, _end) for number in heeded}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        gc.freeze()
        gc.enable()


def _end(number: int, _frame: object) -> None:
    os.write(2, f"interrupted by {_NAMES[number]}\n".encode() if number in _NAMES else b"interrupted\n")
    os._exit(128 + number if number in _NAMES else 2)
