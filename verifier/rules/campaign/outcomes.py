"""Outcomes of trials on real processes, which a later rule check takes over instead of running the trials again.

Level 1 refutes a rule anew in every check. What ranks then make of its counterexample is decided by the trial, with all
its values, and by the sources that the header of a run has digests of. The journal of a rule check has the outcomes.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from verifier.core.case import Trial
from verifier.core.observation import Fate, Observation
from verifier.core.verdict import Verdict, VerdictKind
from verifier.records.files import RunFormatError, convert_fields, decode_versioned
from verifier.records.schema import FAILS, RunHeader
from verifier.records.values import trial_record
from verifier.runs.journal import JOURNAL_NAME
from verifier.runs.journal_lines import describe_outcome, load_observation
from verifier.runs.revision import BASELINE
from verifier.runs.store import RunStore

__all__ = ["Outcomes", "earlier_outcomes"]

Outcome = tuple[Observation, Verdict]
EVENT = "outcome"
_PREFIX = f'{{"event":"{EVENT}"'.encode()
_MOST_READ = 8
"""Journals of earlier rule checks with the same sources that are read, the newest first."""
_STEADY = (Fate.COMPLETED, Fate.STUCK)
"""How a trial ends that ends so again; time limits and lost processes depend on the machine."""


class Outcomes:
    """Makes outcomes of trials, or takes them from ``earlier``, and notes all of them.

    Parameters
    ----------
    earlier
        The lines of journals by key, as :func:`earlier_outcomes` returns them.
    note
        Writes a line to the journal of this run; threads call it one at a time.
    run_id
        The id of this run.
    """

    def __init__(
        self,
        earlier: Mapping[str, Mapping[str, Any]] | None = None,
        note: Callable[[Mapping[str, object]], None] = lambda _: None,
        run_id: str = "",
    ) -> None:
        self._earlier = earlier or {}
        self._note, self._run_id = note, run_id
        self._noting = threading.Lock()

    def of_trial(self, trial: Trial, remedies: tuple[str, ...], make: Callable[[], Outcome]) -> Outcome:
        """Return the outcome of ``trial`` with ``remedies`` in force: an earlier one, or else what ``make`` returns."""
        key = _key(trial, remedies)
        if (line := self._earlier.get(key)) is not None:
            try:
                found = load_observation(line, trial)
            except RunFormatError:  # of a damaged file: run it again
                pass
            else:
                self._write({**line})
                return found
        observation, verdict = make()
        if key and observation.fate in _STEADY and verdict.kind is not VerdictKind.TOOL_ERROR:
            told = describe_outcome(observation, verdict, every_rank=verdict.kind is not VerdictKind.PASS)
            self._write({"event": EVENT, "key": key, "run": self._run_id, **told})
        return observation, verdict

    def of_script(self, source: str, run: Callable[[], str]) -> str:
        """Return the status of a finding's script, which ends in the same way if it has failed as described before."""
        key = hashlib.sha256(source.encode()).hexdigest()
        if (line := self._earlier.get(key)) is not None and line.get("script") == FAILS:
            self._write({**line})
            return FAILS
        if (status := run()) == FAILS:
            self._write({"event": EVENT, "key": key, "run": self._run_id, "script": status})
        return status

    def run_of(self, trial: Trial) -> str:
        """Return the id of the earlier run whose outcome of ``trial`` is taken over; empty for this run."""
        return str(self._earlier.get(_key(trial, ()), {}).get("run", ""))

    def _write(self, line: Mapping[str, object]) -> None:
        with self._noting:
            self._note(line)


def earlier_outcomes(store: RunStore, header: RunHeader) -> dict[str, dict[str, Any]]:
    """Return the outcomes that rule checks with the same sources, imports and versions have noted, by key."""
    found: dict[str, dict[str, Any]] = {}
    read = 0
    for run_id in store.ids():
        if run_id == header.id:
            continue
        lines = _outcomes_of(store.path(run_id, JOURNAL_NAME), header)
        for count, line in enumerate(lines):
            read += not count
            found.setdefault(str(line.get("key", "")), line)
        if read >= _MOST_READ:
            break
    return found


def _outcomes_of(path: Path, header: RunHeader) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            first = convert_fields(decode_versioned(file.readline(), f"{path}:1").get("header"), RunHeader, f"{path}:1")
            if not _same_sources(first, header):
                return
            for text in file:
                if text.startswith(_PREFIX) and text.endswith(b"\n"):
                    yield msgspec.json.decode(text, type=dict[str, Any])
    except (OSError, RunFormatError, msgspec.DecodeError, UnicodeDecodeError):
        return  # the gate says so of a damaged file; here its trials are run again


def _same_sources(one: RunHeader, other: RunHeader) -> bool:
    """Return whether the same torch, verifier, rules and user's code decide what trials of two runs do."""
    ours, theirs = ({**header.digests, BASELINE: ""} for header in (one, other))
    same = (ours, one.versions, one.imports, one.own_rules) == (theirs, other.versions, other.imports, other.own_rules)
    return same and one.profile == other.profile and all(ours[name] for name in ours if name != BASELINE)


def _key(trial: Trial, remedies: tuple[str, ...]) -> str:
    """Return a digest of a trial with all its values and of the remedies; empty for a trial that no file can hold."""
    try:
        content = msgspec.json.encode((trial_record(trial), remedies))
    except (TypeError, ValueError):
        return ""
    return hashlib.sha256(content).hexdigest()[:32]
