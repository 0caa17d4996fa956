"""Loading what takes seconds, such as torch: a signal meanwhile ends the program at once."""

import _signal as signal  # type: ignore[import-not-found]  # the rest of it takes a tenth of a second to load
import gc
import os

__all__ = ["Loading"]

_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


class Loading:
    """A ``with`` block in which SIGINT, SIGTERM and SIGHUP end the process with a line and their status.

    A KeyboardInterrupt may become another error on its way through a module that is loaded. No garbage is collected in
    the block: what is loaded stays, and to look through it takes a second.
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
