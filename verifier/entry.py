"""Where the program starts: the command line in one process, or in each of those that torchrun started."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from verifier.cli import app
from verifier.interrupts import RunInterrupted
from verifier.meshes import Cluster, PoolError, TorchrunRank, keep_place
from verifier.record_files import RunStoreError
from verifier.rules.workers import WorkerError

__all__ = ["main"]

INTERRUPTED = 130
"""Exit status of what a Ctrl-C ended, as shells have it."""


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit status 2.

    Of the processes that torchrun starts the first one does so; the others end with its exit status.
    """
    raise SystemExit(_status_of(_main))


def _main() -> None:
    rank = TorchrunRank.read()
    if rank is None:
        _run_app(None)
    elif rank.rank:
        raise SystemExit(keep_place(rank))
    else:
        with Cluster(rank) as cluster:
            cluster.status = _status_of(lambda: _lead(rank, cluster))
        raise SystemExit(cluster.status)


def _lead(rank: TorchrunRank, cluster: Cluster) -> None:
    if rank.restarts:
        raise ValueError(
            f"torchrun --max-restarts {rank.restarts} would run everything again whenever there are findings; "
            "leave it at 0, lost ranks are replaced without it"
        )
    _run_app(cluster)


def _run_app(cluster: Cluster | None) -> None:
    """Run the command line, on the ranks of ``cluster`` if torchrun started us."""
    try:
        app(obj=cluster)
    except SystemExit as ended:
        if ended.code == INTERRUPTED:  # typer makes that of a KeyboardInterrupt, without a word
            raise KeyboardInterrupt from ended
        raise


def _status_of(work: Callable[[], None]) -> int:
    """Return the exit status of ``work``, and say on stderr why it failed."""
    try:
        work()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        sys.stderr.write(f"{ended.code}\n")  # Python would print it too, and exit with status 1: findings
    except (ValueError, PoolError, WorkerError, RunStoreError) as error:
        sys.stderr.write(f"error: {error}\n")
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
    except RunInterrupted as interrupted:
        sys.stderr.write(f"{interrupted}\n")
        return INTERRUPTED
    except Exception:  # noqa: BLE001 - Python would exit with status 1, which here means findings
        traceback.print_exc()
        sys.stderr.write("error: the verifier itself failed; please report the lines above\n")
    else:
        return 0
    return 2
