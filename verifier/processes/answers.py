"""Answers that take long, kept so that no process of a check works out the same one again.

Level 1's workers and level 2 draw calls by what the user's rules claim of them, and so ask about the same calls.
Nothing is kept unless a check says so, because the rules of one process may change.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["ANSWERS", "Answers"]

_LOOK = 0.02
"""Seconds between two looks at whether another process is done."""


class Answers:
    """Answers, each by the text of its question: in this process, and in a folder for the processes that share it."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._known: dict[str, tuple[str, ...]] = {}
        self._new: dict[str, tuple[str, ...]] = {}
        self._read: set[str] = set()
        self.here: dict[Hashable, Any] = {}
        """What else this process has worked out, as long as answers are kept."""

    def share(self, folder: str) -> None:
        """Keep answers from now on, and those of the processes that share ``folder``; keep none if it is empty."""
        if folder != self.folder:
            self._folder = Path(folder) if folder else None
            self._known, self._new, self._read, self.here = {}, {}, set(), {}

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Keep answers in this block, in a folder of its own, unless they are kept already."""
        if self.kept:
            yield
            return
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a worker may write at the very end
            self.share(folder)
            try:
                yield
            finally:
                self.share("")

    @property
    def folder(self) -> str:
        """Where answers are kept; empty if they are not."""
        return str(self._folder or "")

    @property
    def kept(self) -> bool:
        """Whether answers are kept."""
        return self._folder is not None

    def of(self, question: str, work_out: Callable[[], frozenset[str]]) -> frozenset[str]:
        """Return what ``work_out`` returns, or has returned for the same question."""
        if not self.kept:
            return work_out()
        key = hashlib.sha256(question.encode()).hexdigest()
        if key not in self._known:
            self._known[key] = self._new[key] = tuple(sorted(work_out()))
        return frozenset(self._known[key])

    @contextmanager
    def first(self, subject: str, waiting: Callable[[], None] = lambda: None) -> Iterator[bool]:
        """Work out answers about ``subject`` in this block, after another process that is just doing that.

        The answers of that process are known then. ``waiting`` is called again and again until it is done, or has died.
        Yields whether none has died so.
        """
        if self._folder is None:
            yield True
            return
        with open(self._folder / f"{hashlib.sha256(subject.encode()).hexdigest()}.lock", "ab") as lock:
            while not _locked(lock.fileno()):
                waiting()
                time.sleep(_LOOK)
            survived = not os.fstat(lock.fileno()).st_size
            os.write(lock.fileno(), b".")
            self.read()
            yield survived
            self._write()
            if survived:
                os.ftruncate(lock.fileno(), 0)

    def read(self) -> None:
        """Take in the answers of other processes."""
        for path in sorted(self._folder.glob("*.json")) if self._folder is not None else ():
            if path.name not in self._read:
                self._read.add(path.name)
                self._known |= msgspec.json.decode(path.read_bytes(), type=dict[str, tuple[str, ...]])

    def _write(self) -> None:
        if not self._new or self._folder is None:
            return
        name = f"{os.getpid()}-{time.monotonic_ns()}"
        half = self._folder / f"{name}.part"
        half.write_bytes(msgspec.json.encode(self._new))
        half.rename(self._folder / f"{name}.json")
        self._read.add(f"{name}.json")
        self._new = {}


ANSWERS = Answers()
"""Those of this process."""


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
