"""The store of runs: one directory per run, with a journal that survives a kill, and a record of the whole run.

::

    reports/runs/20260520T131502-048211-9f3a1c/
        journal.jsonl    one line per event, written as it happens; the first line has the header
        run.json         a RunRecord, written once at the end; a run without it did not finish
        graph.json       and other files of writers, see :meth:`RunStore.path`
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from verifier.core.wording import did_you_mean, plural
from verifier.records.files import (
    DEFAULT_REPORTS,
    RunFormatError,
    convert_fields,
    out_option,
    read_finding,
    read_record,
    refused,
)
from verifier.records.schema import FindingRecord, RunHeader, RunRecord
from verifier.runs.journal import FINDING, JOURNAL_NAME, RECORD_NAME, Journal, RunWriter, read_journal

__all__ = [
    "RunStore",
]


class RunStore:
    """The runs under ``root``.

    Parameters
    ----------
    root
        Directory of the reports; created when the first run is opened.
    """

    def __init__(self, root: Path = DEFAULT_REPORTS) -> None:
        self.root = root

    @property
    def directory(self) -> Path:
        """The directory that holds one directory per run."""
        return self.root / "runs"

    def path(self, run_id: str, name: str = RECORD_NAME) -> Path:
        """Return the path of the file ``name`` of a run, such as ``graph.json``; run and file need not exist."""
        return self.directory / run_id / name

    def where_kept(self, run_id: str) -> str:
        """Return a sentence with the directory of a recorded run, and the command that shows the run."""
        command = f"python -m verifier report{out_option(self.root)}"
        return f"run {run_id} is kept in {self.directory / run_id}; to see it: {command}"

    def open_run(self, header: RunHeader) -> RunWriter:
        """Start the run ``header.id``: make its directory, and its journal with the header as the first line.

        Raises
        ------
        ValueError
            If a run with this id exists already.
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

    def reopen_run(self, run_id: str) -> tuple[RunWriter, Journal]:
        """Reopen the run ``run_id``: return the writer of its journal, and the journal.

        Raises
        ------
        ValueError
            If another process writes to the journal, or there is no such run.
        RunFormatError
            If its journal cannot be read.
        RunStoreError
            If the file system refuses.
        """
        path = self.path(run_id, JOURNAL_NAME)
        if not path.is_file():
            raise ValueError(f"no run {run_id!r}{self._hint(run_id)}")
        writer = RunWriter(path.parent, None)
        assert writer.past is not None
        return writer, writer.past

    def ids(self) -> list[str]:
        """Return the ids of all runs, finished or not, newest first."""
        if not self.directory.is_dir():
            return []
        return sorted((entry.name for entry in self.directory.iterdir() if entry.is_dir()), reverse=True)

    def newest(self) -> RunRecord | None:
        """Return the newest finished run, or None if there is none.

        Raises
        ------
        RunFormatError
            If its file cannot be read; an older run is never returned instead.
        """
        for run_id in self.ids():
            with contextlib.suppress(FileNotFoundError):
                return read_record(self.path(run_id))
        return None

    def newest_of_each_level(self) -> tuple[RunRecord | None, RunRecord | None]:
        """Return the newest finished run on meshes, or None, and the newest finished rule check, or None.

        Raises
        ------
        RunFormatError
            If a file that is newer than a returned run cannot be read.
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
        """Return the run with an id, or in a directory or file.

        Raises
        ------
        ValueError
            If there is no such run (the message has the nearest id), or if the run did not finish.
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
            raise ValueError(f"run {text} did not finish: it has no {RECORD_NAME}; its events are in {journal}")
        raise ValueError(f"no run {text!r}{self._hint(text)}")

    def _hint(self, run_id: str) -> str:
        """Return the end of the message that there is no such run."""
        ids = self.ids()
        return did_you_mean(run_id, ids, 0.3) or f"; {self.directory} has {plural(len(ids), 'run')}"

    def find_finding(self, fingerprint_prefix: str | Path) -> FindingRecord:
        """Return the finding with a prefix of its fingerprint, or in the JSON file at a path.

        The newest run with a match decides. Unfinished runs are searched by their journals.

        Raises
        ------
        ValueError
            If no run has such a finding (the message has the nearest), or if the deciding run has several.
        RunFormatError
            If the file at a path cannot be read.
        """
        text = str(fingerprint_prefix)
        if Path(fingerprint_prefix).is_file():
            return read_finding(Path(fingerprint_prefix))
        if not text.strip():
            raise ValueError("a finding is named by the first characters of its fingerprint; got none")
        known: dict[str, None] = {}
        unread: dict[str, RunFormatError] = {}
        for run_id in self.ids():
            try:
                findings = {finding.fingerprint: finding for finding in self._findings(run_id)}
            except RunFormatError as error:
                unread[run_id] = error
                continue
            matches = [name for name in findings if name.startswith(text)]
            if text in matches or len(matches) == 1:
                return findings[text if text in matches else matches[0]]
            if matches:
                raise ValueError(f"{text!r} names {len(matches)} findings of run {run_id}: {', '.join(matches)}")
            known.update(dict.fromkeys(findings))
        if known:
            several = f"; {plural(len(known), 'finding')} in {self.directory}, the newest is {next(iter(known))}"
            hint = did_you_mean(text, known) or several
        else:
            hint = f"; no run in {self.directory} has a finding"
        skipped = f" (could not read {', '.join(unread)}); {next(iter(unread.values()))}" if unread else ""
        raise ValueError(f"no finding {text!r}{hint}{skipped}")

    def _findings(self, run_id: str) -> Iterator[FindingRecord]:
        with contextlib.suppress(FileNotFoundError):
            yield from read_record(self.path(run_id)).findings
            return
        with contextlib.suppress(FileNotFoundError):
            journal = self.path(run_id, JOURNAL_NAME)
            for event in read_journal(journal).events:
                if event.get("event") == FINDING:
                    yield convert_fields(event.get("finding"), FindingRecord, str(journal))
