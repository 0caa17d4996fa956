"""The evidence for a gate: the recorded runs that answer its question and that still count.

A gate is asked a question: which ops, on which meshes, with which imports. A recorded run gives evidence for *cells*,
each an op on a mesh, at one level, with one set of imports. Evidence counts as long as torch's rules, the verifier and
the imported code have not changed. If a later run has tried a cell again, at least as thoroughly, only that run counts
for the cell. Every other cell stands: a run of other cells neither hides a finding nor replaces evidence.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from verifier.core.verdict import VerdictKind
from verifier.core.wording import plural
from verifier.gate.baseline import Baseline
from verifier.gate.question import Question, families, names_op, selected
from verifier.gate.rule_changes import RuleChange
from verifier.planning.budgets import CAMPAIGN_PROFILES
from verifier.planning.families import select_ops
from verifier.records.commands import resume_text
from verifier.records.files import RunFormatError, out_option, read_record
from verifier.records.schema import INTERRUPTED, FindingRecord, RunHeader, RunRecord
from verifier.runs.journal import FINDING, JOURNAL_NAME, RECORD_NAME, is_open, read_journal
from verifier.runs.revision import Change, changes_since
from verifier.runs.store import RunStore

__all__ = ["Evidence", "NoEvidence", "collect", "proves", "refuse_unfinished"]

Since = Callable[[RunHeader], list[Change]]

_PROVES_NOTHING = (VerdictKind.UNSUPPORTED, VerdictKind.INCONCLUSIVE, VerdictKind.TOOL_ERROR)


def proves(counts: Mapping[str, int]) -> int:
    """Return how many of the trials or rules with these verdicts prove something about a rule."""
    return sum(count for name, count in counts.items() if VerdictKind(name) not in _PROVES_NOTHING)


# ---------------------------------------------------------------------------------------------------------------- cells
class Level(Enum):
    """How a cell was tried: at level 1, at level 2, or by a test at level 2."""

    RULES = "rules"
    MESHES = "meshes"
    TESTS = "tests"


def _level(header: RunHeader) -> Level:
    if header.profile == "rules":
        return Level.RULES
    return Level.MESHES if header.request else Level.TESTS


Cell = tuple[str, str]
"""An op and a mesh, as text."""


def _cells(run: RunRecord) -> dict[Cell, Counter[str]]:
    """Return the verdicts of each op on each mesh; for level 1, those of the op on all meshes together."""
    cells: dict[Cell, Counter[str]] = {}
    for matrix in run.matrices:
        counts = cells.setdefault((matrix.op, matrix.mesh), Counter())
        for columns in matrix.cells.values():
            for verdicts in columns.values():
                counts.update(verdicts)
    if run.rules is not None:
        for op in run.rules.ops.values():
            for overload in op.overloads:
                verdicts = run.counts_by_op.get(overload, {})
                cells |= {(overload, mesh): Counter(verdicts) for mesh in run.rules.meshes}
    return cells


def _as_thorough(
    new: RunRecord, old: RunHeader, old_run: RunRecord | None, cell: Cell | None, any_seed: bool = False
) -> bool:
    """Return whether ``new`` tried a cell at least as thoroughly as the run with the header ``old`` did or planned.

    Another seed draws other calls, unless ``any_seed`` will do.
    """
    header, level = new.header, _level(old)
    if level is not _level(header) or set(header.imports) != set(old.imports) or header.device != old.device:
        return False
    if level is Level.TESTS:
        if old_run is None or cell is None:
            return header.command == old.command
        return _cells(new)[cell].total() >= _cells(old_run)[cell].total()
    if not any_seed and header.seed != old.seed:
        return False
    if header.max_examples < old.max_examples or not {*old.dtypes} <= {*header.dtypes}:
        return False
    if level is Level.RULES:
        if new.rules is None or old_run is None or old_run.rules is None:
            return False
        looks_for_all = old_run.rules.claims_only or not new.rules.claims_only
        return looks_for_all and new.rules.sizes >= old_run.rules.sizes
    combinations = [CAMPAIGN_PROFILES[one.profile].combinations_per_case for one in (header, old)]
    return combinations[0] >= combinations[1] and header.shard in ("", old.shard)


def _asked(header: RunHeader) -> dict[str, tuple[str, ...]]:
    """Return the ops of each family that a run on meshes was to try; loads the families, and so torch."""
    return selected(tuple(header.request.get("patterns") or ())) or {}


def _tries_again(new: RunRecord, old: RunRecord, cell: Cell, any_seed: bool = False) -> bool:
    """Return whether ``new`` is complete and has tried a cell at least as thoroughly as ``old`` did."""
    return new.complete and cell in _cells(new) and _as_thorough(new, old.header, old, cell, any_seed)


def _covers(new: RunRecord, old: RunHeader, old_run: RunRecord | None) -> bool:
    """Return whether ``new`` has completed everything that the run with the header ``old`` was to try."""
    if not new.complete or not _as_thorough(new, old, old_run, None):
        return False
    if _level(old) is Level.TESTS:
        return True
    if _level(old) is Level.RULES:
        return old_run is not None and _cells(old_run).keys() <= _cells(new).keys()
    if not {*old.meshes} <= {*new.header.meshes}:
        return False
    ours, theirs = _asked(new.header), _asked(old)
    return bool(theirs) and all({*names} <= {*ours.get(family, ())} for family, names in theirs.items())


# ------------------------------------------------------------------------------------------------------------- evidence
@dataclass(frozen=True)
class NoEvidence:
    """A part of the question that has no answer: ``why``, and the ``remedy``."""

    why: str
    remedy: str


@dataclass(frozen=True)
class Evidence:
    """The runs that count, newest first, and what is missing.

    ``runs`` exclude ops that were not asked about and cells that a later run has tried again. A gate does not pass if
    anything is ``unanswered``; runs that are ``left_out`` do not prevent it. ``unchanged`` says why nothing had to be
    verified, if that is so; then no evidence is needed. ``lost`` has rules of torch's that hold and that the imports do
    not claim.
    """

    question: Question
    runs: tuple[RunRecord, ...] = ()
    unanswered: tuple[NoEvidence, ...] = ()
    left_out: tuple[str, ...] = ()
    unchanged: str = ""
    lost: tuple[RuleChange, ...] = ()

    @property
    def nothing_recorded(self) -> bool:
        """Whether there is no run of what was asked, not even one that does not count."""
        return not self.runs and not self.unanswered and not self.left_out


def collect(
    store: RunStore, question: Question, baseline: Baseline, since: Since = changes_since, needed: bool = True
) -> Evidence:
    """Return the evidence that the runs in ``store`` give for ``question``.

    Parameters
    ----------
    baseline
        Says which findings are accepted. A run of another version matters only if it has a finding that is not.
    since
        Says what has changed since a run was made.
    needed
        Whether each op and each mesh that is asked about by name needs evidence.

    Raises
    ------
    ValueError
        If a pattern names no op, no family and nothing that was recorded.
    RunFormatError
        If a record or a journal cannot be read.
    """
    return _Collection(store, question, baseline, since).evidence(needed)


def refuse_unfinished(store: RunStore) -> None:
    """Raise a ValueError if a run in ``store`` has no record, because making another run would ignore that one."""
    unanswered = collect(store, Question(), Baseline()).unanswered
    if unanswered:
        first = unanswered[0]
        raise ValueError(f"{first.why}; {first.remedy}; to make a new run all the same, add --fresh")


@dataclass(frozen=True)
class _Recorded:
    """A finished run, those of its cells that are asked about, and what has changed since."""

    run: RunRecord
    cells: frozenset[Cell]
    changes: tuple[Change, ...]

    def left(self, others: Iterable[RunRecord], any_seed: bool = False) -> frozenset[Cell]:
        """Return the cells that none of ``others`` has tried again, with the same seed or with any."""
        again = [*others]
        return frozenset(
            cell for cell in self.cells if not any(_tries_again(one, self.run, cell, any_seed) for one in again)
        )

    def findings(self, question: Question, left: frozenset[Cell]) -> list[FindingRecord]:
        """Return the findings that are asked about, except those of ops without a cell in ``left``."""
        settled = {op for op, _ in self.cells} - {op for op, _ in left}
        return [one for one in self.run.findings if question.asks_op(one.op) and one.op not in settled]


class _Collection:
    """Sorts the runs of a store, from the newest to the oldest."""

    def __init__(self, store: RunStore, question: Question, baseline: Baseline, since: Since) -> None:
        self.store, self.question, self.baseline, self.since = store, question, baseline, since
        self.counted: list[RunRecord] = []
        """The runs that were made with the present code."""
        self.kept: list[RunRecord] = []
        """The same runs without the cells that later runs have tried again."""
        self.stale: list[_Recorded] = []
        self.stale_ops: set[str] = set()
        """The ops that only stale runs have tried."""
        self.cut_short: list[tuple[RunHeader, RunRecord | None]] = []
        self.unanswered: list[NoEvidence] = []
        self.left_out: list[str] = []
        self.other_versions: list[str] = []

    def evidence(self, needed: bool) -> Evidence:
        for run_id in self.store.ids():
            self._sort_in(self.store.directory / run_id)
        for number, recorded in enumerate(self.stale):
            self._settle_stale(recorded, [later.run for later in self.stale[:number]])
        for header, run in self.cut_short:
            self._settle_cut_short(header, run)
        if needed and (self.question.patterns or self.question.meshes):
            self._ask_for_each()
        if self.other_versions:
            runs = plural(len(self.other_versions), "run was", "runs were")
            text = f"{runs} made with another torch or verifier, the newest is {self.other_versions[0]}"
            self.left_out.append(text)
            if not self.counted and not self.unanswered:
                self.unanswered.append(NoEvidence(text, self._command("gate --fresh")))
        return Evidence(self.question, tuple(self.kept), tuple(self.unanswered), tuple(self.left_out))

    def _sort_in(self, folder: Path) -> None:
        """Take in the run in ``folder``, which is older than all before."""
        record, journal = folder / RECORD_NAME, folder / JOURNAL_NAME
        try:
            if record.is_file():
                self._take(read_record(record))
            elif journal.is_file() and b"\n" in journal.read_bytes():  # otherwise it was killed before it began
                self._take_unfinished(journal)
        except RunFormatError as error:  # it is not known which ops it is about, so it may be any
            raise RunFormatError(f"{error}; move {folder} away, and run again what it was to try") from error

    def _take(self, run: RunRecord) -> None:
        if not self.question.asks_imports(run.header):
            return
        everything = _cells(run)
        cells = {cell for cell in everything if self.question.asks_op(cell[0]) and self.question.asks_mesh(cell[1])}
        if not cells and (everything or self.question.patterns):
            return
        recorded = _Recorded(run, frozenset(cells), tuple(self.since(run.header)))
        if recorded.changes:
            self.stale.append(recorded)
            return
        left = recorded.left(self.counted)
        self.counted.append(run)
        if not run.complete:
            self.cut_short.append((run.header, run))
        if left or not cells:
            self.kept.append(self._asked_part(run, recorded.findings(self.question, left)))

    def _asked_part(self, run: RunRecord, findings: list[FindingRecord]) -> RunRecord:
        """Return the run without the ops that are not asked about; what it did not reach is reported separately."""
        if not self.question.patterns:
            return replace(run, findings=findings, complete=True)
        by_op = {op: counts for op, counts in run.counts_by_op.items() if self.question.asks_op(op)}
        counts: Counter[str] = Counter()
        for one in by_op.values():
            counts.update(one)
        return replace(
            run, findings=findings, complete=True, counts=dict(counts), counts_by_op=by_op, trials=counts.total()
        )

    def _accepted(self, finding: FindingRecord, run: RunRecord) -> bool:
        entry = self.baseline.about(run.header.imports, run.header.own_rules).get(finding.fingerprint)
        return entry is not None and entry.explained

    def _settle_stale(self, recorded: _Recorded, later: Sequence[RunRecord]) -> None:
        """Note which parts of a run that was made with other code have to be run again, if any.

        Nothing has to be run again if runs that count, or a ``later`` stale run that is named itself, tried the same.
        If the run has no finding that is not accepted, they may have tried it with another seed: a run that has
        nothing to hide is evidence of nothing once the code has changed.
        """
        run, again = recorded.run, [*self.counted, *later]
        left = recorded.left(again)
        if not left and recorded.cells:
            return
        new = [one for one in recorded.findings(self.question, left) if not self._accepted(one, run)]
        if not new and recorded.cells and not (left := recorded.left(again, any_seed=True)):
            return
        if not new and not any(change.under_test for change in recorded.changes):
            self.other_versions.append(run.header.id)
            return
        ops = sorted({op for op, _ in left})
        parts = [change.text for change in recorded.changes]
        if new:
            parts.append(f"it has {plural(len(new), 'finding')} that the baseline does not accept")
        if ops:
            tried = any(not left.isdisjoint(_cells(one)) for one in again)
            parts.append(f"no later run has tried {_some(ops)} again{' as thoroughly' * tried}")
        self.stale_ops.update(ops)
        self.unanswered.append(NoEvidence(f"run {run.header.id} is stale: {'; '.join(parts)}", _again(run.header)))

    def _take_unfinished(self, path: Path) -> None:
        """Take in a run that has only a journal: it is still running, or it was killed."""
        journal = read_journal(path)
        header = journal.header
        if not self.question.asks_imports(header) or not any(map(self.question.asks_mesh, header.meshes)):
            return
        ops = _asked(header) if self.question.patterns else {}
        if ops and not any(self.question.asks_op(op) for names in ops.values() for op in names):
            return
        if is_open(path):
            self.left_out.append(f"run {header.id} is still going on")
        elif self.since(header) and not any(event.get("event") == FINDING for event in journal.events):
            self.left_out.append(f"run {header.id} was cut short, before something that it verified was changed")
        else:
            self.cut_short.append((header, None))

    def _settle_cut_short(self, header: RunHeader, run: RunRecord | None) -> None:
        """Note what to do about a run that did not complete, unless another run has answered its question."""
        if any(_covers(other, header, run) for other in self.counted):
            self.left_out.append(f"run {header.id} was cut short; a complete run has tried all that it was to try")
            return
        goes_on = bool(header.request) and (run is None or any(one.reason == INTERRUPTED for one in run.untested))
        remedy = f"to go on: {resume_text(header.id, header.imports, self.store.root)}" if goes_on else _again(header)
        ended = "was cut short and has no record" if run is None else "is incomplete: it stopped before its end"
        self.unanswered.append(NoEvidence(f"run {header.id} {ended}", remedy))

    # ------------------------------------------------------------------------------------------- what was asked by name
    def _ask_for_each(self) -> None:
        """Find out for each op and each mesh that was asked about by name whether there is evidence."""
        cells: dict[Cell, Counter[str]] = {}
        for run in self.counted:
            for cell, counts in _cells(run).items():
                if self.question.asks_op(cell[0]) and self.question.asks_mesh(cell[1]):
                    cells.setdefault(cell, Counter()).update(counts)
        for pattern in self.question.patterns:
            mine = {cell: counts for cell, counts in cells.items() if names_op(pattern, cell[0])}
            own = any(names_op(pattern, op) for run in self.counted for op in run.header.own_rules)
            if not mine and not own and selected((pattern,)) is None:
                select_ops((pattern,), families())  # raises, with the nearest name
            if any(names_op(pattern, op) for op in self.stale_ops):
                continue  # the stale run is named
            if not any(map(proves, mine.values())):
                trials = sum(counts.total() for counts in mine.values())
                none = f": all {plural(trials, 'trial')} are unsupported or inconclusive" if trials else ""
                self._miss(f"{pattern}{none}", f"run {shlex.quote(pattern)}")
            elif never := self._never_tried(pattern, mine):
                self._miss(_some(never), f"run {shlex.join(never)}")
        for mesh in self.question.meshes if any(map(proves, cells.values())) else ():
            if not any(proves(counts) for cell, counts in cells.items() if cell[1] == mesh):
                self._miss(f"mesh {mesh}", shlex.join(["run", *self.question.patterns, "--mesh", mesh]))

    def _never_tried(self, pattern: str, cells: Iterable[Cell]) -> list[str]:
        """Return the ops that ``pattern`` selects and that no run was to try."""
        tried = {op for op, _ in cells}
        asked = [_asked(run.header) for run in self.counted if run.complete]
        return [
            op
            for name, ops in (selected((pattern,)) or {}).items()
            for op in ops
            if not any(op in of_run.get(name, ()) for of_run in asked)
            and not any(families()[name].covers((op,), one) for one in tried)
        ]

    def _miss(self, what: str, command: str) -> None:
        if not any(one.remedy == self._command(command) for one in self.unanswered):
            self.unanswered.append(NoEvidence(f"no run that counts has evidence for {what}", self._command(command)))

    def _command(self, command: str) -> str:
        imports = "".join(f" --import {shlex.quote(name)}" for name in self.question.imports or ())
        return f"python -m verifier {command}{imports}{out_option(self.store.root)}"


def _again(header: RunHeader) -> str:
    return f"again: {header.command}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
