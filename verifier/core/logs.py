"""Log lines on stderr: from the controller, and from the ranks with the rank before the text."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from logging.handlers import BufferingHandler

from verifier.core.wording import plain_text

__all__ = ["LogLevel", "keeping_lines", "log_again", "log_through", "log_to_stderr", "own_level"]

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_OURS = ("verifier", "strategies")


class LogLevel(StrEnum):
    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    DEBUG = "debug"

    @property
    def number(self) -> int:
        """The level as :mod:`logging` counts it."""
        return logging.getLevelNamesMapping()[self.name]


class _StderrHandler(logging.Handler):
    """Looks up ``sys.stderr`` for every line, because a live display on a terminal replaces it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(plain_text(self.format(record)) + "\n")
            sys.stderr.flush()
        except Exception:  # noqa: BLE001 - as in logging's own handlers, a failed write ends nothing
            self.handleError(record)


class _CallingHandler(logging.Handler):
    """Hands each line to a function."""

    def __init__(self, send: Callable[[int, str, str], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._send(record.levelno, record.name, self.format(record))
        except Exception:  # noqa: BLE001 - see above
            self.handleError(record)


def _install(handler: logging.Handler, level: int) -> None:
    root = logging.getLogger()
    root.addHandler(handler)
    # other packages log from warnings on only: at level debug their lines would bury ours
    root.setLevel(max(level, logging.WARNING))
    for name in _OURS:
        logging.getLogger(name).setLevel(level)


def log_to_stderr(level: LogLevel) -> None:
    """Show our own lines from ``level`` on and others' from warnings on; a second call replaces the first."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _StderrHandler)]:
        root.removeHandler(handler)
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter(FORMAT))
    _install(handler, level.number)


def log_through(send: Callable[[int, str, str], None], level: int) -> None:
    """Pass the log lines of this process to ``send(level, logger, text)``; ranks use it."""
    _install(_CallingHandler(send), level)


@contextmanager
def keeping_lines(kept: list[logging.LogRecord]) -> Iterator[None]:
    """Keep what is logged in the block, for :func:`log_again`."""
    handler = BufferingHandler(sys.maxsize)
    _install(handler, logging.DEBUG)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        kept += handler.buffer


def log_again(kept: Sequence[logging.LogRecord]) -> None:
    """Log lines that were kept, as far as they are shown by now."""
    for record in kept:
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


def own_level() -> int:
    """Return the level from which on our own lines are shown."""
    return logging.getLogger(_OURS[0]).getEffectiveLevel()
