"""``python -m verifier``, and the script ``dtensor-verifier``."""

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn

from verifier.cli.loading import Loading

__all__ = ["main"]


def main() -> None:
    """Load the program and run it."""
    with Loading():
        from verifier.cli import main as entry
    try:
        entry.main()
    except SystemExit as ended:
        if "torch" not in sys.modules or "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's store may still be in use
            raise
        _leave(ended.code)


def _leave(status: object) -> NoReturn:
    """End this process without Python's own end, which takes torch 0.3 s; what is to be run at exit is run.

    :mod:`multiprocessing` ends the processes that it forks likewise.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
