"""What has been done of a plan already, by the journal of a run that was cut short or by those of the shards of a run.

Drawing is deterministic, so a trial has the same position in every run of a plan: ``12/7`` is the seventh trial of the
twelfth case, ``entry:45c5f5c71f01`` is the trial of an entry of the baseline. A campaign that is given a past draws
all cases again and takes from the past the outcome of each trial that is in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Observation
from verifier.core.placement_text import format_placements
from verifier.core.verdict import Verdict
from verifier.events import CaseStarted, Event, FindingReported, GroupSettled, PoolRestarted, RunResumed, RunStarted
from verifier.records.files import RunFormatError, convert_fields
from verifier.records.schema import OUT_OF_TIME, FindingRecord, RunHeader
from verifier.records.values import case_record
from verifier.runs.journal import FINDING, Journal
from verifier.runs.journal_lines import load_observation

__all__ = ["Answer", "Past", "PastError", "case_digest", "case_position", "entry_position"]


class PastError(ValueError):
    """What is drawn now is not what the run drew whose journal is being taken over."""


def case_position(number: int, trial: int) -> str:
    """Return the position of the trial ``trial`` of the case ``number``, both counted from 1."""
    return f"{number}/{trial}"


def entry_position(fingerprint: str) -> str:
    """Return the position of the trial of an entry of the baseline."""
    return f"entry:{fingerprint}"


def case_digest(case: OpCase, trials: Sequence[Trial], choices: bytes) -> str:
    """Return sixteen hex digits that stand for a case with all its values, and for its trials."""
    digest = hashlib.sha256(f"{case.op} {case.call} {len(trials)}".encode() + choices)
    try:
        digest.update(msgspec.json.encode(case_record(case)))
    except (TypeError, ValueError):  # some tensors cannot be stored; the choices behind them still tell cases apart
        digest.update(b"not stored")
    for trial in trials:
        placements = (*trial.combination, *(one for cotangents in trial.cotangents for one in cotangents))
        digest.update(f"{trial.seed} {' '.join(map(format_placements, placements))}\n".encode())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Answer:
    """The outcome of the trial at ``position``; a ``verdict`` is from the past, other observations are to be judged."""

    position: str
    observation: Observation
    verdict: Verdict | None = None


@dataclass
class Past:
    """What journals have; an empty one knows nothing.

    Parameters
    ----------
    seconds
        How long it took.
    complete
        False if a run that is merged did not reach everything.
    explored
        True where what is not in the journals is not to be tried, as when shards are merged.
    resumed
        True if a run goes on, with the journal that it has.
    torn
        Whether the journal ends within a line, which is left out.
    """

    seconds: float = 0.0
    complete: bool = True
    explored: bool = False
    resumed: bool = False
    torn: bool = False
    trials: dict[str, dict[str, Any]] = field(default_factory=dict)
    cases: dict[int, str] = field(default_factory=dict)
    groups: dict[str, FindingReported | GroupSettled] = field(default_factory=dict)
    restarts: list[PoolRestarted] = field(default_factory=list)
    _begun: list[tuple[str, str]] = field(default_factory=list)
    _over: set[tuple[str, str]] = field(default_factory=set)
    _timed: bool = False
    _sent: dict[str, Any] | None = None
    _arrived: int = 0

    @classmethod
    def of_run(cls, journal: Journal) -> Past:
        """Return what a run did that is to go on."""
        past = cls(resumed=True, torn=journal.torn, _timed=journal.header.time_limit is not None)
        past._read(journal, groups=True)
        return past

    @classmethod
    def of_shards(cls, journals: Sequence[Journal], complete: bool) -> Past:
        """Return what the shards of a run did.

        What they made of their failures is left out: a group of failures that has members in several shards is
        minimised from its smallest member, as one run would do it.
        """
        past = cls(explored=True, complete=complete)
        for journal in journals:
            past._read(journal, groups=False)
        return past

    def _read(self, journal: Journal, groups: bool) -> None:
        last = 0.0
        for line in journal.events:
            last = float(line.get("at", last))
            match line.get("event"):
                case "trial" if "trial" in line:
                    self.trials.setdefault(line["trial"], line)
                    _, _, trial = line["trial"].partition("/")
                    self._sent = self._sent if trial else None
                    self._arrived = int(trial or 0)
                case "case":
                    self.cases.setdefault(line["case"], line["digest"])
                    self._sent, self._arrived = line, 0
                case "mesh started":
                    self._over.update(self._begun)
                    self._begun.append((line["mesh"], line["family"]))
                    self._sent = None
                case "minimising":
                    self._over.update(self._begun)
                    self._sent = line
                case "settled":
                    self._sent = None
                    if groups:
                        self.groups[line["key"]] = GroupSettled(line["key"], line["fingerprint"])
                case name if name == FINDING and "group" in line:
                    self._sent = None
                    if groups:
                        finding = convert_fields(line["finding"], FindingRecord, f"journal of run {journal.header.id}")
                        self.groups[line["group"]] = FindingReported(finding, line["group"], line.get("became", ""))
                case "pool restarted":
                    try:
                        mesh = MeshSpec.parse(line["mesh"], device=journal.header.device)
                    except ValueError as error:
                        raise RunFormatError(f"journal of run {journal.header.id}: {error}") from error
                    self.restarts.append(PoolRestarted(mesh, line["reason"], line["seconds"]))
                case "entry":
                    self._sent = line
        self.seconds = max(self.seconds, last)

    # ----------------------------------------------------------------------------------------------------- questions
    @property
    def in_flight(self) -> str:
        """What was being done when the journal ended, as text; empty if that was nothing."""
        line = self._sent
        if line is None:
            return ""
        if line["event"] == "entry":
            return f"entry {line['fingerprint']} of the baseline"
        if line["event"] == "minimising":
            return f"minimising of {line['key']}"
        if self._arrived == line["trials"]:
            return ""
        return (
            f"trial {self._arrived + 1} of {line['trials']} of case {line['case']}, {line['op']} on mesh {line['mesh']}"
        )

    def opening(self, header: RunHeader) -> Iterator[Event]:
        """Yield the events with which a campaign begins."""
        yield RunStarted(header, recalled=self.resumed)
        if self.resumed:
            yield RunResumed(len(self.trials), self.in_flight, self.torn)
        for restart in self.restarts:
            yield replace(restart, recalled=True)

    def begun(self, mesh: MeshSpec, family: str) -> bool:
        """Return whether the run had started to draw for ``mesh``."""
        return (str(mesh), family) in self._begun

    def over(self, mesh: MeshSpec, family: str) -> bool:
        """Return whether no more cases are to be tried on ``mesh``: its share of a time limit was over."""
        return self.explored or (self._timed and (str(mesh), family) in self._over)

    def tried(self, number: int, mesh: MeshSpec, family: str) -> bool | None:
        """Return whether the case ``number`` was begun; False if it was left out, None if the run did not get there."""
        if number in self.cases:
            return True
        return False if self.over(mesh, family) or number < max(self.cases, default=0) else None

    def why_ended(self, number: int) -> str:
        """Return why no more trials of the case ``number`` are run; empty if they are."""
        if self.explored:
            return "not reached by its shard"
        return (
            OUT_OF_TIME if number < max(self.cases, default=0) else ""
        )  # only a time limit ends a case before its last trial

    def result(self, position: str, trial: Trial) -> Answer | None:
        """Return the outcome of the trial at ``position``, or None if that is not known."""
        line = self.trials.get(position)
        return None if line is None else Answer(position, *load_observation(line, trial))

    def has_case(self, started: CaseStarted) -> bool:
        """Return whether the trials of a case had been sent.

        Raises
        ------
        PastError
            If another case had this number.
        """
        digest = self.cases.get(started.number)
        if digest is not None and digest != started.digest:
            raise PastError(
                f"case {started.number} ({started.case.op} on mesh {started.mesh}) is drawn as {started.digest} now "
                f"and was {digest}: were generators, or modules that they draw constants from, changed since? What the "
                "journal has stays as it is; run again, or with the versions that it was made with"
            )
        return digest is not None
