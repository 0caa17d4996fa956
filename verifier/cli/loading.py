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

    Parameters
    ----------
    hash_seeds
        The hash seeds of processes that will be needed; they load torch at the same time.
    """

    def __init__(self, hash_seeds: int = 0) -> None:
        self._hash_seeds = hash_seeds

    def __enter__(self) -> None:
        gc.disable()
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        heeded = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
        self._before = {number: signal.signal(number, _end) for number in heeded}
        if self._hash_seeds and "TORCHELASTIC_RUN_ID" not in os.environ:  # torchrun has started the ranks
            from verifier.processes.forks import load_ahead
            from verifier.processes.scripts import TORCH_ALONE

            load_ahead(TORCH_ALONE, self._hash_seeds)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        gc.freeze()
        gc.enable()


def _end(number: int, _frame: object) -> None:
    os.write(2, f"interrupted by {_NAMES[number]}\n".encode() if number in _NAMES else b"interrupted\n")
    os._exit(128 + number if number in _NAMES else 2)
