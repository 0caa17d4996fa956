"""Where runs are kept: one directory per run, with a journal that survives a kill and a record of the whole.

::

    reports/runs/20260520T131502-048211-9f3a1c/
        journal.jsonl    one line per event, written as it happens; the first line has the header
        run.json         a RunRecord, written once, at the end; a run without it did not finish
        graph.json       and other files that writers add, see :meth:`RunStore.path`
"""

from __future__ import annotations

import contextlib
import difflib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from verifier import events
from verifier.cases import format_placements
from verifier.record_files import (
    RunFormatError,
    RunStoreError,
    convert_fields,
    decode_versioned,
    encode_record,
    read_finding,
    read_record,
    refused,
    version_first,
    write_all,
    write_atomically,
)
from verifier.records import FORMAT_VERSION, FindingRecord, RunHeader, RunRecord

__all__ = [
    "Journal",
    "RunStore",
    "RunWriter",
    "journal_listener",
    "new_run_id",
    "read_journal",
]

RECORD_NAME = "run.json"
JOURNAL_NAME = "journal.jsonl"


def new_run_id() -> str:
    """Return a new id: UTC time to the microsecond, and six random hex digits. Sorts by time.

    Processes that start in the same microsecond differ in the random part; :meth:`RunStore.open_run` refuses an id
    that exists, should even that coincide.
    """
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S-%f}-{secrets.token_hex(3)}"


# ------------------------------------------------------------------------------------------------------------ journal
@dataclass(frozen=True)
class Journal:
    """What :func:`read_journal` found: the ``header`` and the ``events`` up to the last whole line.

    ``torn`` is True if the file ends within a line, as it does when the process was killed while it wrote.
    """

    header: RunHeader
    events: list[dict[str, Any]]
    torn: bool


def read_journal(path: Path) -> Journal:
    """Return the journal ``path``; a torn last line is left out.

    Raises
    ------
    RunFormatError
        If the first line is no header of a format that we read, or a line other than the last is not a JSON object.
    FileNotFoundError
        If there is no such file.
    """
    lines = path.read_bytes().split(b"\n")
    # Every whole line ends in a newline, so what follows the last one is empty or torn, even if it happens to parse.
    torn = bool(lines.pop())
    if not lines:
        raise RunFormatError(f"{path}: has no header line")
    header = convert_fields(decode_versioned(lines[0], f"{path}:1").get("header"), RunHeader, f"{path}:1")
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines[1:], 2):
        try:
            found.append(msgspec.json.decode(line, type=dict[str, Any]))
        except msgspec.DecodeError as error:
            raise RunFormatError(f"{path}:{number}: not an event: {error}") from error
    return Journal(header, found, torn)


class RunWriter:
    """Writes one run: :meth:`append` as it goes, :meth:`finish` at its end. Leaving it as a context manager closes it.

    Parameters
    ----------
    directory
        The run's own directory; has to exist.
    """

    def __init__(self, directory: Path, header: RunHeader) -> None:
        self.directory = directory
        self.header = header
        self.journal_path = directory / JOURNAL_NAME
        self.record_path = directory / RECORD_NAME
        self._written = 0
        self._broken = ""
        self._closed = False
        try:
            self._descriptor = os.open(self.journal_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        except OSError as error:
            raise refused("write", self.journal_path, error, "nothing of this run is kept") from error
        try:
            self._append({"format_version": FORMAT_VERSION, "header": header}, "nothing of this run is kept")
        except RunStoreError:
            os.close(self._descriptor)
            raise

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
        """Write ``event`` as the next line of the journal; it has reached the operating system when this returns.

        Raises
        ------
        RunStoreError
            If the file system refuses, such as a full disk. The lines written before stay readable.
        """
        self._append(event, f"its {self._lines()} are kept, and the run can go on without a journal")

    def _lines(self) -> str:
        return f"first {self._written} lines" if self._written != 1 else "first line"

    def _append(self, event: Mapping[str, object], kept: str) -> None:
        assert not self._closed, "the run is closed"
        if self._broken:
            raise RunStoreError(f"cannot write {self.journal_path}: an earlier line failed ({self._broken}); {kept}")
        line = msgspec.json.encode(event) + b"\n"
        size = 0
        try:
            size = os.fstat(self._descriptor).st_size
            write_all(self._descriptor, line)
        except OSError as error:
            try:
                # So that a later line, when there is room again, does not continue half of this one.
                os.ftruncate(self._descriptor, size)
            except OSError:
                self._broken = error.strerror or str(error)
            raise refused("write", self.journal_path, error, kept) from error
        self._written += 1

    def finish(self, record: RunRecord) -> Path:
        """Write ``record`` as ``run.json``, whole or not at all, and return its path.

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


def journal_listener(writer: RunWriter, clock: Callable[[], float] = time.monotonic) -> events.Listener:
    """Return a listener that writes each event to ``writer``: trials in a few words, findings whole.

    Every line has ``event`` and ``at``, the seconds since this function was called. Tensors occur only in findings, by
    value.
    """
    start = clock()

    def listen(event: events.Event) -> None:
        writer.append({"event": _NAMES[type(event)], "at": round(clock() - start, 4), **_describe(event)})

    return listen


_NAMES: dict[type, str] = {
    events.RunStarted: "run started",
    events.MeshStarted: "mesh started",
    events.RulesClaimed: "rules claimed",
    events.TrialFinished: "trial",
    events.CaseSkipped: "skipped",
    events.PoolRestarted: "pool restarted",
    events.FindingReported: "finding",
    events.RunFinished: "run finished",
}


def _describe(event: events.Event) -> dict[str, object]:
    match event:
        case events.RunStarted(header):
            return {"id": header.id}
        case events.MeshStarted(mesh, family, examples):
            return {"mesh": str(mesh), "family": family, "examples": examples}
        case events.RulesClaimed(op, rules):
            return {"op": op, "rules": list(rules)}
        case events.TrialFinished(observation, verdict, rows):
            trial = observation.trial
            named = ", ".join(f"{name}={placements}" for name, placements in rows)
            return {
                "op": trial.case.op,
                "mesh": str(trial.mesh),
                "combination": named or ", ".join(map(format_placements, trial.combination)),
                "verdict": verdict.kind.value,
                "seconds": round(observation.seconds, 6),
                **({"message": verdict.message} if verdict.message else {}),
            }
        case events.CaseSkipped(what, reason, count):
            return {"what": what, "reason": reason, "count": count}
        case events.PoolRestarted(mesh, reason, seconds):
            return {"mesh": str(mesh), "reason": reason, "seconds": seconds}
        case events.FindingReported(finding):
            return {"finding": version_first(finding)}
        case events.RunFinished(seconds, complete):
            return {"seconds": seconds, "complete": complete}


# -------------------------------------------------------------------------------------------------------------- store
class RunStore:
    """The runs under ``root``.

    Parameters
    ----------
    root
        Directory of the reports; it is made when the first run is opened.
    """

    def __init__(self, root: Path = Path("reports")) -> None:
        self.root = root

    @property
    def directory(self) -> Path:
        """The directory that holds one directory per run."""
        return self.root / "runs"

    def path(self, run_id: str, name: str = RECORD_NAME) -> Path:
        """Return the path of the file ``name`` of a run, such as ``graph.json``; neither has to exist."""
        return self.directory / run_id / name

    def open_run(self, header: RunHeader) -> RunWriter:
        """Start the run ``header.id``: make its directory, and its journal with the header as the first line.

        Raises
        ------
        ValueError
            If a run of this id exists already.
        RunStoreError
            If the file system refuses.
        """
        directory = self.directory / header.id
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            directory.mkdir()
        except FileExistsError as error:
            raise ValueError(f"run {header.id} exists already in {self.directory}; take new_run_id()") from error
        except OSError as error:
            raise refused("make", directory, error, "nothing of this run is kept") from error
        return RunWriter(directory, header)

    def ids(self) -> list[str]:
        """Return the ids of all runs, finished or not, newest first."""
        if not self.directory.is_dir():
            return []
        return sorted((entry.name for entry in self.directory.iterdir() if entry.is_dir()), reverse=True)

    def unfinished(self) -> list[str]:
        """Return the ids of the runs without ``run.json``, newest first: killed ones, and those that still go on."""
        return [run_id for run_id in self.ids() if not self.path(run_id).is_file()]

    def newest(self) -> RunRecord | None:
        """Return the newest finished run, or None if there is none.

        Raises
        ------
        RunFormatError
            If its file cannot be read; an older run is never passed off as the newest.
        """
        for run_id in self.ids():
            with contextlib.suppress(FileNotFoundError):
                return read_record(self.path(run_id))
        return None

    def newest_of_each_level(self) -> tuple[RunRecord | None, RunRecord | None]:
        """Return the newest finished run on meshes and the newest finished rule check; None where there is none.

        Raises
        ------
        RunFormatError
            If a file that is newer than what is returned cannot be read.
        """
        meshes: RunRecord | None = None
        rules: RunRecord | None = None
        for run_id in self.ids():
            if meshes is not None and rules is not None:
                break
            with contextlib.suppress(FileNotFoundError):
                run = read_record(self.path(run_id))
                if run.rules is not None:
                    rules = rules or run
                else:
                    meshes = meshes or run
        return meshes, rules

    def load(self, id_or_path: str | Path) -> RunRecord:
        """Return the run of an id, of a directory, or of a file.

        Raises
        ------
        ValueError
            If there is no such run, or it did not finish; the message has the nearest id.
        RunFormatError
            If its file cannot be read.
        """
        text = str(id_or_path)
        path = self.path(text) if text in self.ids() else Path(id_or_path)
        if path.is_dir():
            path = path / RECORD_NAME
        try:
            return read_record(path)
        except FileNotFoundError:
            pass
        if (journal := path.with_name(JOURNAL_NAME)).is_file():
            raise ValueError(f"run {text} did not finish: it has no {RECORD_NAME}; what it did is in {journal}")
        near = difflib.get_close_matches(text, self.ids(), 1, 0.3)
        hint = f"; did you mean {near[0]!r}?" if near else f"; {self.directory} has {len(self.ids())} runs"
        raise ValueError(f"no run {text!r}{hint}")

    def find_finding(self, fingerprint_prefix: str | Path) -> FindingRecord:
        """Return the finding that a prefix of its fingerprint, or the path of its JSON file, names.

        Runs are searched from the newest on, unfinished ones by their journals; the first run that has a match decides.

        Raises
        ------
        ValueError
            If no run has such a finding (the message has the nearest one), or the deciding run has several.
        RunFormatError
            If a path was given and the file cannot be read.
        """
        text = str(fingerprint_prefix)
        if Path(fingerprint_prefix).is_file():
            return read_finding(Path(fingerprint_prefix))
        if not text.strip():
            raise ValueError("a finding is named by the first characters of its fingerprint; got none")
        known: dict[str, None] = {}
        unread: list[str] = []
        for run_id in self.ids():
            try:
                findings = {finding.fingerprint: finding for finding in self._findings(run_id)}
            except RunFormatError:
                unread.append(run_id)
                continue
            matches = [name for name in findings if name.startswith(text)]
            if text in matches or len(matches) == 1:
                return findings[text if text in matches else matches[0]]
            if matches:
                raise ValueError(f"{text!r} names {len(matches)} findings of run {run_id}: {', '.join(matches)}")
            known.update(dict.fromkeys(findings))
        near = difflib.get_close_matches(text, known, 1, 0.0)
        hint = f"; did you mean {near[0]!r}?" if near else f"; no run in {self.directory} has a finding"
        skipped = f" (could not read {', '.join(unread)})" if unread else ""
        raise ValueError(f"no finding {text!r}{hint}{skipped}")

    def _findings(self, run_id: str) -> Iterator[FindingRecord]:
        with contextlib.suppress(FileNotFoundError):
            yield from read_record(self.path(run_id)).findings
            return
        with contextlib.suppress(FileNotFoundError):
            journal = self.path(run_id, JOURNAL_NAME)
            for event in read_journal(journal).events:
                if event.get("event") == _NAMES[events.FindingReported]:
                    yield convert_fields(event.get("finding"), FindingRecord, str(journal))
