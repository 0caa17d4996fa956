"""``python -m verifier``, and the script ``dtensor-verifier``."""

import _signal as signal  # type: ignore[import-not-found]  # the rest of it takes a tenth of a second to load
import gc
import os

__all__ = ["main"]


def main() -> None:
    """Load the program and run it; a signal meanwhile ends it as one before the first trial does."""
    # nothing that is loaded becomes garbage, and looking for some takes a second: a sixth of the time to load it, and
    # as long again when Python ends
    gc.disable()
    defaults = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    handled = [number for number, default in defaults.items() if signal.getsignal(number) == default]  # not if ignored
    for number in handled:
        signal.signal(number, _interrupted)

    from verifier.cli import main as entry

    for number in handled:
        signal.signal(number, defaults[number])
    gc.freeze()
    gc.enable()
    entry.main()


def _interrupted(number: int, _frame: object) -> None:
    """End at once: a KeyboardInterrupt may become another error on its way through a module that is loaded."""
    names = {signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
    os.write(2, f"interrupted by {names[number]}\n".encode() if number in names else b"interrupted\n")
    os._exit(128 + number if number in names else 2)


if __name__ == "__main__":
    main()
