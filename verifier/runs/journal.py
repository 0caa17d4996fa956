"""The journal of a run: one line per event. Each line is written before the run continues, so a kill loses nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec

from verifier.records.commands import resume_text
from verifier.records.files import (
    RunFormatError,
    RunStoreError,
    convert_fields,
    decode_versioned,
    encode_record,
    read_bytes,
    refused,
    write_all,
    write_atomically,
)
from verifier.records.schema import FORMAT_VERSION, RunHeader, RunRecord

__all__ = ["FINDING", "JOURNAL_NAME", "RECORD_NAME", "Journal", "RunWriter", "is_open", "read_journal"]

RECORD_NAME = "run.json"
JOURNAL_NAME = "journal.jsonl"
FINDING = "finding"
"""Name of the lines that hold a whole finding."""


_Position = Annotated[str, msgspec.Meta(pattern=r"^([0-9]{1,9}/[0-9]{1,9}|entry:[^/]*)$")]


class _StepLine(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The fields of a step of a redistribution, in order; last ones that have their defaults are left out."""

    phase: str
    source: str
    target: str
    mesh_dim: int
    collective: str | None
    bytes: int
    first: str
    last: str
    tensor: str = ""
    explicit: bool = False
    begins: bool = True
    mesh: str = ""
    by: str = ""
    repeats: str = ""
    undoes: str = ""
    issued: list[tuple[str, list[int], str, int, int]] = []
    peak: int = 0
    seconds: float = 0.0


class _TrialLine(TypedDict):
    trial: NotRequired[_Position]
    op: str
    mesh: str
    verdict: str
    seconds: float
    message: NotRequired[str]
    judged: NotRequired[dict[str, Any]]
    fate: NotRequired[str]
    detail: NotRequired[str]
    shares: NotRequired[dict[str, float]]
    steps: NotRequired[list[_StepLine]]
    ran: NotRequired[list[str]]
    reports: NotRequired[list[dict[str, Any]]]


class _CaseLine(TypedDict):
    case: int
    op: str
    mesh: str
    trials: int
    digest: str


class _MeshLine(TypedDict):
    mesh: str
    family: str


class _EntryLine(TypedDict):
    fingerprint: str


class _GroupLine(TypedDict):
    key: str


class _SettledLine(TypedDict):
    key: str
    fingerprint: str


class _FindingLine(TypedDict):
    finding: dict[str, Any]
    group: NotRequired[str]
    became: NotRequired[str]


class _RestartLine(TypedDict):
    mesh: str
    reason: str
    seconds: float


class _AnyLine(TypedDict):
    event: NotRequired[str]
    at: NotRequired[float]


_LINES: dict[str, type] = {
    "trial": _TrialLine,
    "case": _CaseLine,
    "mesh started": _MeshLine,
    "entry": _EntryLine,
    "minimising": _GroupLine,
    "settled": _SettledLine,
    "finding": _FindingLine,
    "pool restarted": _RestartLine,
}
"""The types of a journal's lines, by the names of their events."""


@dataclass(frozen=True)
class Journal:
    """The content of a journal: the ``header`` and the ``events`` up to the last complete line.

    ``torn`` is True if the file ends within a line, because the process was killed while it wrote. ``size`` is the
    number of bytes up to the last complete line.
    """

    header: RunHeader
    events: list[dict[str, Any]]
    torn: bool
    size: int = 0


def read_journal(path: Path) -> Journal:
    """Return the journal ``path`` without a torn last line.

    Raises
    ------
    RunFormatError
        If the first line is no header of a known format, or a line other than the last is no JSON object.
    FileNotFoundError
        If there is no such file.
    """
    return _parse(read_bytes(path), path)


def _parse(content: bytes, path: Path) -> Journal:
    """Return the journal in ``content``; ``path`` is for messages."""
    lines = content.split(b"\n")
    # Every complete line ends in a newline, so text after the last newline is torn, even if it is valid JSON.
    torn = bool(lines.pop())
    if not lines:
        raise RunFormatError(f"{path}: has no header line")
    header = convert_fields(decode_versioned(lines[0], f"{path}:1").get("header"), RunHeader, f"{path}:1")
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines[1:], 2):
        try:
            event = msgspec.json.decode(line, type=dict[str, Any])
            msgspec.convert(event, _AnyLine)
            msgspec.convert(event, _LINES.get(event.get("event", ""), _AnyLine))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RunFormatError(f"{path}:{number}: not an event: {error}") from error
        found.append(event)
    return Journal(header, found, torn, content.rfind(b"\n") + 1)


def is_open(path: Path) -> bool:
    """Return whether a process has the journal ``path`` open for writing."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return not _locked(descriptor)
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Try to lock the file and return whether it worked. The lock ends with the process, even if it is killed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class RunWriter:
    """Writes one run: :meth:`append` during the run, :meth:`finish` at its end. The context manager closes the writer.

    While the writer is open, no other process can open the same journal.

    Parameters
    ----------
    directory
        The run's own directory; has to exist.
    header
        The first line of a new journal. None continues the run's journal and removes its torn last line.

    Attributes
    ----------
    past
        The journal that the run had, or None for a new run.

    Raises
    ------
    ValueError
        If another process has the journal open.
    RunFormatError
        If the run's journal cannot be read.
    RunStoreError
        If the file system refuses.
    """

    def __init__(self, directory: Path, header: RunHeader | None) -> None:
        self.directory = directory
        self.journal_path = directory / JOURNAL_NAME
        self.record_path = directory / RECORD_NAME
        self.past: Journal | None = None
        self._written = 0
        self._torn_at: int | None = None
        self._broken = ""
        self._closed = False
        kept = "what the run has is kept" if header is None else "nothing of this run is kept"
        try:
            flags = 0 if header is None else os.O_CREAT | os.O_EXCL
            self._descriptor = os.open(self.journal_path, os.O_RDWR | os.O_APPEND | flags, 0o666)
        except OSError as error:
            raise refused("write", self.journal_path, error, kept) from error
        try:
            if not _locked(self._descriptor):
                run_id = directory.name
                raise ValueError(f"run {run_id} still goes on in another process; resume it when that has ended")
            if header is None:
                self.header = self._take_over().header
            else:
                self.header = header
                self._append({"format_version": FORMAT_VERSION, "header": header}, kept)
        except OSError as error:
            os.close(self._descriptor)
            raise refused("write", self.journal_path, error, kept) from error
        except (RunStoreError, ValueError):
            os.close(self._descriptor)
            raise

    def _take_over(self) -> Journal:
        """Return the journal without a torn last line; only after it is locked, because it may grow until then."""
        with open(self._descriptor, "rb", closefd=False) as file:
            past = _parse(file.read(), self.journal_path)
        self._torn_at = past.size if past.torn else None  # removed when the next line is written
        self.past = past
        self._written = 1 + len(past.events)
        return past

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the journal; the run is finished only if :meth:`finish` was called."""
        if not self._closed:
            self._closed = True
            os.close(self._descriptor)

    def append(self, event: Mapping[str, object]) -> None:
        """Write ``event`` as the next line of the journal; when this returns, the operating system has the line.

        Raises
        ------
        RunStoreError
            If the file system refuses, such as a full disk. The lines written before stay readable.
        """
        resumable = f"; when there is room: {self.resume_command}"
        rest = resumable if self.header.request else ", and the run can go on without a journal"
        self._append(event, f"its {self._lines()} are kept{rest}")

    @property
    def resume_command(self) -> str:
        """The command that resumes the run."""
        return resume_text(self.header.id, self.header.imports, self.directory.parent.parent)

    def _lines(self) -> str:
        return f"first {self._written} lines" if self._written != 1 else "first line"

    def _append(self, event: Mapping[str, object], kept: str) -> None:
        assert not self._closed, "the run is closed"
        if self._broken:
            raise RunStoreError(f"cannot write {self.journal_path}: an earlier line failed ({self._broken}); {kept}")
        line = msgspec.json.encode(event) + b"\n"
        size = 0
        try:
            if self._torn_at is not None:
                os.ftruncate(self._descriptor, self._torn_at)
                self._torn_at = None
            size = os.fstat(self._descriptor).st_size
            write_all(self._descriptor, line)
        except OSError as error:
            try:
                # So that a later line does not continue half of this line.
                os.ftruncate(self._descriptor, size)
            except OSError:
                self._broken = error.strerror or str(error)
            raise refused("write", self.journal_path, error, kept) from error
        self._written += 1

    def finish(self, record: RunRecord) -> Path:
        """Write ``record`` as ``run.json``, atomically, and return its path.

        Raises
        ------
        RunStoreError
            If the file system refuses; the journal is kept.
        """
        assert record.header.id == self.header.id, f"run {record.header.id} is not {self.header.id}"
        kept = f"the events of the run are kept in {self.journal_path}"
        if not self._closed:
            with contextlib.suppress(OSError):
                os.fsync(self._descriptor)
        write_atomically(self.record_path, encode_record(record), kept)
        return self.record_path
