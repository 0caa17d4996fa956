"""``python -m verifier``, and the script ``dtensor-verifier``."""

import _signal as signal  # type: ignore[import-not-found]  # the rest of it takes a tenth of a second to load
import gc
import os

__all__ = ["main"]


def main() -> None:
    """Load the program and run it; a Ctrl-C meanwhile ends it as one before the first trial does."""
    # nothing that is loaded becomes garbage, and looking for some takes a second: a sixth of the time to load it, and
    # as long again when Python ends
    gc.disable()
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # or else it is ignored
    if handled:
        signal.signal(signal.SIGINT, _interrupted)

    from verifier import entry

    if handled:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()
    gc.enable()
    entry.main()


def _interrupted(_number: int, _frame: object) -> None:
    """End at once: a KeyboardInterrupt may become another error on its way through a module that is loaded."""
    os.write(2, b"interrupted\n")
    os._exit(2)


if __name__ == "__main__":
    main()
