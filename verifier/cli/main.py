"""The start of the program: runs the command line in one process, or in each process that torchrun started."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO, cast

from typer.core import TyperGroup
from typer.main import get_command

import verifier
from verifier.cli.app import app
from verifier.cli.config import configured
from verifier.cli.loading import Loading
from verifier.core.errors import ReportedError
from verifier.core.interrupts import (
    ENDING_SIGNALS,
    Interrupts,
    ReportInterrupted,
    RunInterrupted,
    one_interrupt_at_a_time,
)
from verifier.core.wording import plain_text

if TYPE_CHECKING:
    from verifier.meshes.torchrun.controller import Cluster
    from verifier.meshes.torchrun.environment import TorchrunRank

__all__ = ["main"]

_FROM_CPP = "(Triggered internally at"
INTERRUPTED = 130
"""The exit status that shells expect after a Ctrl-C."""


class OutputError(Exception):
    """Standard output cannot be written; ``__cause__`` is the OSError."""


class _Stdout:
    """Standard output that raises :class:`OutputError`, to distinguish its errors from those of other files.

    A closed pipe still raises BrokenPipeError, because typer and rich then end silently.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _output_errors():
            return self._stream.write(text)

    def flush(self) -> None:
        with _output_errors():
            self._stream.flush()


@contextmanager
def _output_errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write to standard output: {error.strerror or error}") from error


@contextmanager
def _whole_output() -> Iterator[None]:
    """Flush standard output at the end of the block, or raise :class:`OutputError`."""
    stream = sys.stdout
    if stream is None:  # it was closed when Python started, as by `>&-`
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield
        return
    sys.stdout = output = cast(TextIO, _Stdout(stream))
    try:
        yield
    finally:
        sys.stdout = stream
        try:
            output.flush()
        except (OutputError, BrokenPipeError) as error:
            with suppress(OSError):  # otherwise Python would try again at its end, and print an error
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if isinstance(error, OutputError):
                raise


@contextmanager
def _plain_notices() -> Iterator[None]:
    """Show a warning at a line of our code without this line, which means nothing to a user.

    Warnings from torch's C++ are about calls that the verifier made up, as those that ``TORCH_CPP_LOG_LEVEL`` hides.
    """
    shown, ours = warnings.showwarning, os.path.dirname(os.path.abspath(verifier.__file__)) + os.sep

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
        line: str | None = None,
    ) -> None:  # fmt: skip
        if _FROM_CPP in str(message):
            return
        if os.path.abspath(filename).startswith(ours):
            _say(f"warning: {message}")
        else:
            shown(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shown


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit status 2.

    SIGTERM and SIGHUP end it as a Ctrl-C does, with the exit status that shells expect. Under torchrun, the first
    process runs the command line; the others end with its exit status.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # warnings about calls that the verifier made up help nobody
    with one_interrupt_at_a_time(signals=ENDING_SIGNALS) as interrupts:
        status = _status_of(lambda: _main(interrupts), interrupts)
    raise SystemExit(status)


def _main(interrupts: Interrupts) -> None:
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # not under torchrun; its store needs torch
        _run_app(None)
        return
    with Loading():
        from verifier.meshes.torchrun.controller import Cluster
        from verifier.meshes.torchrun.environment import TorchrunRank
        from verifier.meshes.torchrun.keeper import keep_place

    rank = TorchrunRank.read()
    if rank is None:
        _run_app(None)
    elif rank.rank:
        raise SystemExit(keep_place(rank))
    else:
        with Cluster(rank) as cluster:
            cluster.status = _status_of(lambda: _lead(rank, cluster), interrupts)
        raise SystemExit(cluster.status)


def _lead(rank: TorchrunRank, cluster: Cluster) -> None:
    if rank.restarts:
        raise ValueError(
            f"torchrun --max-restarts {rank.restarts} would run everything again whenever there are findings; "
            "leave it at 0, lost ranks are replaced without it"
        )
    _run_app(cluster)


@cache
def _commands() -> TyperGroup:
    command = get_command(app)
    assert isinstance(command, TyperGroup)
    return command


def _run_app(cluster: Cluster | None) -> None:
    """Run the command line, on the ranks of ``cluster`` if torchrun started us."""
    try:
        with _whole_output(), _plain_notices():
            command = _commands()
            command(obj=cluster, default_map=configured(command).values)
    except SystemExit as ended:
        if ended.code == INTERRUPTED:  # typer turns a KeyboardInterrupt into this status
            raise KeyboardInterrupt from ended
        raise


def _status_of(work: Callable[[], None], interrupts: Interrupts) -> int:
    """Return the exit status of ``work``, and say on stderr why it failed. After a signal, its status wins."""
    status = _ended(work, interrupts)
    return status if interrupts.status is None else interrupts.status


def _ended(work: Callable[[], None], interrupts: Interrupts) -> int:
    try:
        work()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        _say(f"{ended.code}")  # Python would print it too, and exit with status 1: findings
    except (ValueError, ReportedError, OutputError) as error:
        _say(f"error: {error}")
    except KeyboardInterrupt:
        _say(f"{interrupts}")
    except ReportInterrupted as interrupted:
        _say(f"{interrupted}")
    except RunInterrupted as interrupted:
        _say(f"{interrupted}")
        return INTERRUPTED
    except Exception:  # noqa: BLE001 - Python would exit with status 1, which here means findings
        _say(f"{traceback.format_exc()}error: the verifier itself failed; please report the lines above")
    else:
        return 0
    return 2


def _say(text: str) -> None:
    with suppress(OSError):  # the exit status still tells
        sys.stderr.write(f"{plain_text(text)}\n")
