"""Loads modules that take seconds, such as torch; a signal in this time ends the program at once."""

import _signal as signal  # type: ignore[import-not-found]  # the rest of it takes a tenth of a second to load
import gc
import os
import sys

__all__ = ["OF_IMPORTS", "WORKER", "WORKER_STEP", "Loading", "start_servers"]

WORKER = "verifier.rules.campaign.worker_process"
WORKER_STEP = "verifier.rules.campaign.work:prepare"
"""The module of level 1's workers and what their server does first, by name: to import them takes seconds."""
OF_IMPORTS = "verifier.rules.campaign.work:prepare_for_imports"
"""What the server of workers with imports does first."""

_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


class Loading:
    """A ``with`` block in which SIGINT, SIGTERM and SIGHUP end the process with a line and their status.

    A KeyboardInterrupt could become another error in a module that is loading. Garbage is not collected in the block,
    because loaded modules stay, and looking through them takes a second.

    Parameters
    ----------
    hash_seeds, workers
        As for :func:`start_servers`: processes that load torch at the same time.
    """

    def __init__(self, hash_seeds: int = 0, workers: str = "") -> None:
        self._hash_seeds, self._workers = hash_seeds, workers

    def __enter__(self) -> None:
        gc.disable()
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        heeded = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
        self._before = {number: signal.signal(number, _end) for number in heeded}
        if self._hash_seeds and "torch" not in sys.modules:  # otherwise there is nothing to wait for
            start_servers(self._hash_seeds, self._workers)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        gc.freeze()
        gc.enable()
        if torch := sys.modules.get("torch"):  # several threads gain nothing on small tensors, and wait for busy cores
            torch.set_num_threads(1)


def start_servers(hash_seeds: int, workers: str) -> None:
    """Start the fork servers of ranks with so many hash seeds, and that of level 1's workers, if it has a step."""
    from verifier.processes.forks import load_ahead
    from verifier.processes.scripts import TORCH_ALONE

    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has started the ranks
        return
    path = [folder for folder in sys.path if folder]
    for seed in range(hash_seeds):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": str(seed)}
        load_ahead(TORCH_ALONE, (), environment, path)
        if workers and seed == 0:
            load_ahead(WORKER, [(workers,)], environment, path, TORCH_ALONE)


def _end(number: int, _frame: object) -> None:
    os.write(2, f"interrupted by {_NAMES[number]}\n".encode() if number in _NAMES else b"interrupted\n")
    os._exit(128 + number if number in _NAMES else 2)
