"""The baseline: causes and findings that are known, each with a day on which it expires and has to be reviewed.

A cause has a remedy, and explains the failures that the remedy mends. A finding without a remedy explains the failures
that look like it. The baseline is a TOML file under version control. A line changes only if its cause or finding
changes, so a review of the file's diff is a review of what is accepted.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import tomli_w

from verifier.core.verdict import VerdictKind
from verifier.core.wording import did_you_mean, one_line
from verifier.gate.budgets import Budget, read_budget
from verifier.gate.entries import NOT_EXPLAINED, BaselineEntry, Cause, entry_of, torch_of
from verifier.records.checks import check_name
from verifier.records.files import write_atomically
from verifier.records.schema import RunRecord
from verifier.records.trials import check_trial

__all__ = [
    "VALID_DAYS",
    "Baseline",
    "BaselineError",
    "load_baseline",
]

FORMAT_VERSION = 3
"""Of the file; records have a version of their own. Version 2 has causes, version 3 budgets. All versions are read."""

VALID_DAYS = 180
"""Days from the day on which a finding enters the baseline to the one on which it expires."""

_HEADER = """\
# What `python -m verifier` knows. The gate fails on every finding that is not in here.
#
# A cause explains every failure that its remedy mends, whatever the failure looks like, and no other failure.
# A finding has no remedy, and explains the failures that look like it.
#
# remedy   the code that mends the cause in a process (strategies/remedies)
# reason   why the finding is accepted; without a person's reason it counts as new
# why_none why there is no remedy (optional)
# link     where it is being dealt with (optional)
# expires  after this day a finding that still fails counts against the gate again
# torch    versions of torch on which it was seen
# mended   versions of torch on which it was tried and did not fail (optional)
# imports  the finding is about the rules that these imports register, not about torch's own (optional)
# groups   what its failures look like before they are minimised: a failure that looks so is this finding
# replay   the smallest trial by value; the verifier runs it again to see whether it is fixed
#
# A budget has the redistributions that calls of an op may do on a mesh, for each combination of placements.
#
# reason, link and expires are yours to edit; an update keeps them. It does not keep comments, and writes
# "not explained yet" where a reason is missing.
"""


class BaselineError(ValueError):
    """A baseline file cannot be read; the message has the file, the line, and what to change, on one line."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


@dataclass(frozen=True)
class Baseline:
    """Known causes and findings, in the order of op, verdict and fingerprint, and budgets of redistributions.

    An empty one knows nothing.
    """

    entries: tuple[BaselineEntry, ...] = ()
    budgets: tuple[Budget, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "budgets", tuple(sorted(self.budgets)))
        in_order = sorted(self.entries, key=lambda entry: (entry.op, entry.verdict, entry.fingerprint, entry.imports))
        object.__setattr__(self, "entries", tuple(in_order))

    def get(self, fingerprint: str) -> BaselineEntry | None:
        """Return the entry of a finding, or None."""
        return next((entry for entry in self.entries if entry.fingerprint == fingerprint), None)

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The entries that have a remedy."""
        return tuple(entry for entry in self.entries if isinstance(entry, Cause))

    def looks_like(self, fingerprint: str) -> BaselineEntry | None:
        """Return the entry of a finding that explains by looks, or None; causes do not."""
        entry = self.get(fingerprint)
        return None if isinstance(entry, Cause) else entry

    @property
    def digest(self) -> str:
        """A digest of the findings and their trials, as sixteen hex digits; reasons and other notes do not count.

        >>> Baseline().digest
        'e3b0c44298fc1c14'
        """
        decisive = "".join(
            f"{entry.fingerprint}{entry.verdict}{entry.groups}{entry.imports or ''}{getattr(entry, 'remedy', '')}"
            f"{entry.replay}"
            for entry in self.entries
        )
        return hashlib.sha256(decisive.encode()).hexdigest()[:16]

    def about(self, imports: Collection[str], own_rules: Collection[str]) -> Baseline:
        """Return the entries that are about the rules that a run verifies; see :meth:`BaselineEntry.applies`."""
        return replace(self, entries=tuple(entry for entry in self.entries if entry.applies(imports, own_rules)))

    def updated(self, runs: Sequence[RunRecord], today: date, keep_untested: bool = True) -> Baseline:
        """Return the baseline that lists what ``runs`` found.

        New findings enter with the placeholder ``NOT_EXPLAINED`` and expire in ``VALID_DAYS`` days. If runs saw an
        entry fixed, and none saw it fail, their version of torch counts as one that mends it; the entry is removed if
        it was seen on no other. An entry whose finding is still there keeps its reason, link and expiry, even a past
        one: a person decides in the file to accept it for longer.

        Parameters
        ----------
        keep_untested
            Whether entries that no run tried again stay: an entry that was not observed is not fixed.
        """
        entries: list[BaselineEntry] = []
        taken: set[tuple[str, str]] = set()
        for entry in self.entries:
            about = [run for run in runs if entry.applies(run.header.imports, run.header.own_rules)]
            found = [(run, one) for run in about for one in run.findings if one.fingerprint == entry.fingerprint]
            status = {one.status for run in about for one in run.baseline if one.fingerprint == entry.fingerprint}
            taken |= {(run.header.id, entry.fingerprint) for run, _ in found}
            if found or "known" in status:
                for torch in {torch_of(run) for run in about if _shows(run, entry.fingerprint)}:
                    entry = entry.tried_under(torch, fails=True)
                groups = {group for _, one in found for group in one.groups}
                entries.append(
                    replace(
                        entry,
                        reason=entry.reason if entry.reason.strip() else NOT_EXPLAINED,
                        groups=() if isinstance(entry, Cause) else tuple(sorted({*entry.groups, *groups})),
                    )
                )
            elif "fixed" in status:
                for torch in {torch_of(run) for run in about if _passes(run, entry.fingerprint)}:
                    entry = entry.tried_under(torch, fails=False)
                if entry.torch:
                    entries.append(entry)
            elif keep_untested:
                entries.append(entry)
        new: dict[tuple[str, tuple[str, ...]], BaselineEntry] = {}
        for run in runs:
            for finding in run.findings:
                if (run.header.id, finding.fingerprint) not in taken:
                    entry = entry_of(finding, run, today + timedelta(days=VALID_DAYS))
                    new.setdefault((entry.fingerprint, entry.imports), entry)
        return replace(self, entries=(*entries, *new.values()))

    def to_toml(self) -> str:
        """Return the text of the file: the same entries always give the same text."""
        parts = [_HEADER, f"format_version = {FORMAT_VERSION}\n"]
        by_name = sorted(self.causes, key=lambda cause: cause.remedy)
        for entry in (*by_name, *(entry for entry in self.entries if not isinstance(entry, Cause))):
            table = _TABLES[type(entry)]
            parts.append(f"\n[[{table.name}]]\n")
            parts.extend(
                _line(name, getattr(entry, name))
                for name in table.fields
                if name not in _OPTIONAL or getattr(entry, name)
            )
        return "".join([*parts, *(budget.to_toml() for budget in self.budgets)])

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all.

        Raises
        ------
        RunStoreError
            If the file system refuses; the file is then as it was.
        """
        write_atomically(path, self.to_toml().encode(), "the baseline is as it was before")


class _Table(NamedTuple):
    """A kind of table of the file."""

    name: str
    fields: tuple[str, ...]


_ENTRY = tuple(field.name for field in fields(BaselineEntry))
_OWN = ("remedy", "title", "where")
_TABLES: dict[type[BaselineEntry], _Table] = {
    Cause: _Table("cause", (*_OWN, *(name for name in _ENTRY if name not in ("groups", "why_none")))),
    BaselineEntry: _Table("finding", _ENTRY),
}
_BUDGET = "budget"
"""The table of budgets."""
_OPTIONAL = ("link", "mended", "imports", "groups", "why_none")
_VERSIONS = 'versions such as ["2.13.0"]'
_LISTS = {"groups": "strings", "imports": "strings", "torch": _VERSIONS, "mended": _VERSIONS, "where": "strings"}


def _shows(run: RunRecord, fingerprint: str) -> bool:
    """Return whether the run saw the finding fail."""
    known = any(one.fingerprint == fingerprint and one.status == "known" for one in run.baseline)
    return known or any(finding.fingerprint == fingerprint for finding in run.findings)


def _passes(run: RunRecord, fingerprint: str) -> bool:
    """Return whether the run tried the finding again and saw it pass."""
    return any(one.fingerprint == fingerprint and one.status == "fixed" for one in run.baseline)


def _line(name: str, value: str | date | tuple[str, ...]) -> str:
    """Return ``name = value`` in TOML."""
    if name == "groups" and isinstance(value, tuple):
        lines = "".join(f"    {tomli_w.dumps({'v': item}).removeprefix('v = ').strip()},\n" for item in value)
        return f"groups = [\n{lines}]\n"
    if isinstance(value, tuple):
        # On one line, so that another version is one line of diff.
        items = ", ".join(tomli_w.dumps({"v": item}).removeprefix("v = ").strip() for item in value)
        return f"{name} = [{items}]\n"
    if name == "replay" and isinstance(value, str) and not re.search(r"['\x00-\x1f\x7f]", value):
        # JSON is full of double quotes; a literal string shows it as it is.
        return f"{name} = '{value}'\n"
    return tomli_w.dumps({name: value})


# ------------------------------------------------------------------------------------------------------------ reading
def load_baseline(path: Path, missing_ok: bool = False) -> Baseline:
    """Return the baseline that is stored in the file ``path``.

    Parameters
    ----------
    missing_ok
        Whether a missing file counts as an empty baseline, as before the first baseline is written.

    Raises
    ------
    BaselineError
        If the file does not exist, cannot be read, is not TOML, or has another ``format_version``. Also if an entry
        lacks a field, has an unknown or malformed one, or repeats a fingerprint. The message starts with file and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if missing_ok:
            return Baseline()
        raise BaselineError(f"{path}: no such baseline file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BaselineError(f"{path}: cannot be read: {error}") from error
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # Python 3.11 gives the position only in the text of the message.
        place = re.search(r"\(at line (\d+), column \d+\)$", str(error))
        line = int(place[1]) if place else text.count("\n") + 1
        raise BaselineError(f"{path}:{line}: not TOML: {error}") from error
    except RecursionError as error:
        raise BaselineError(f"{path}: not a baseline: tables and lists are nested too deep in it") from error
    version = content.get("format_version")
    if version not in range(1, FORMAT_VERSION + 1):
        what = "has no format_version" if version is None else f"format_version is {version!r}"
        raise BaselineError(
            f"{path}:{_line_of(text, 'format_version')}: {what}; this version of the verifier reads {FORMAT_VERSION}"
        )
    tables = {table.name: kind for kind, table in _TABLES.items()}
    for name in content:
        if name not in ("format_version", _BUDGET, *tables):
            what = "causes are [[cause]], findings [[finding]], budgets [[budget]]"
            raise BaselineError(f"{path}:{_line_of(text, name)}: unknown key {name!r}; {what}")
    seen: dict[tuple[str, tuple[str, ...]], int] = {}
    entries: list[BaselineEntry] = []
    for table, kind in tables.items():
        entries += _read_table(path, text, table, content.get(table, []), kind, seen)
    return Baseline(tuple(entries), _read_budgets(path, text, content.get(_BUDGET, [])))


def _tables(path: Path, text: str, table: str, raw: object) -> list[tuple[int, dict[str, Any]]]:
    """Return the tables of one name, each with its line."""
    if not isinstance(raw, list) or not all(isinstance(each, dict) for each in raw):
        raise BaselineError(f"{path}:{_line_of(text, table)}: {table}s are written as [[{table}]]")
    head = re.compile(rf"\s*\[\[\s*{table}\s*\]\]")
    lines = [n for n, line in enumerate(text.splitlines(), 1) if head.match(line)]
    return [(lines[position] if position < len(lines) else 1, values) for position, values in enumerate(raw)]


def _read_budgets(path: Path, text: str, raw: object) -> tuple[Budget, ...]:
    seen: dict[tuple[object, ...], int] = {}
    budgets = []
    for line, values in _tables(path, text, _BUDGET, raw):
        try:
            budget = read_budget(values)
        except ValueError as error:
            raise BaselineError(f"{path}:{line}: {_BUDGET} of {values.get('op') or 'no op'}: {error}") from error
        if budget.cell in seen:
            what = f"{budget.op} on mesh {budget.mesh}"
            raise BaselineError(f"{path}:{line}: a budget of {what} stands in line {seen[budget.cell]} already")
        seen[budget.cell] = line
        budgets.append(budget)
    return tuple(budgets)


def _read_table(
    path: Path,
    text: str,
    table: str,
    raw: object,
    kind: type[BaselineEntry],
    seen: dict[tuple[str, tuple[str, ...]], int],
) -> list[BaselineEntry]:
    """Return the entries of all tables of one name; ``seen`` has the lines of those that were read before."""
    entries = []
    for position, (line, values) in enumerate(_tables(path, text, table, raw), 1):
        try:
            entry = _read_entry(values, kind)
        except BaselineError as error:
            named = values.get("fingerprint") or "without a fingerprint"
            raise BaselineError(f"{path}:{line}: {table} {position} ({named}): {error}") from error
        key = (entry.fingerprint, tuple(sorted(entry.imports)))
        if key in seen:
            raise BaselineError(f"{path}:{line}: fingerprint {entry.fingerprint} stands in line {seen[key]} already")
        seen[key] = line
        entries.append(entry)
    return entries


def _line_of(text: str, key: str) -> int:
    """Return the number of the line that defines a top-level ``key``; 1 if there is none."""
    found = (n for n, line in enumerate(text.splitlines(), 1) if line.lstrip(" \"'[").startswith(key))
    return next(found, 1)


def _read_entry(values: Mapping[str, Any], kind: type[BaselineEntry]) -> BaselineEntry:
    names = _TABLES[kind].fields
    for name in values:
        if name not in names:
            raise BaselineError(f"unknown field {name!r}{did_you_mean(name, names)}")
    if missing := [name for name in names if name not in values and name not in _OPTIONAL]:
        raise BaselineError(f"has no {', '.join(missing)}")
    for name in names:
        if name not in (*_LISTS, "expires") and not isinstance(values.get(name, ""), str):
            raise BaselineError(f"{name} is {values[name]!r}, but has to be a string")
    lists = {name: wanted for name, wanted in _LISTS.items() if name in names}
    for name, wanted in lists.items():
        texts = values.get(name, [])
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise BaselineError(f"{name} is {texts!r}, but has to be a list of {wanted}")
    expires = values["expires"]
    if not isinstance(expires, date) or isinstance(expires, datetime):
        raise BaselineError(f"expires is {str(expires)!r}, but has to be a date such as 2026-05-20, without quotes")
    if not values["fingerprint"]:
        raise BaselineError("its fingerprint is empty")
    try:
        check_name(values["fingerprint"], "fingerprint")
    except ValueError as error:
        raise BaselineError(f"{error}") from error
    accusing = [kind.value for kind in VerdictKind if kind.bad]
    if values["verdict"] not in accusing:
        hint = did_you_mean(values["verdict"], accusing, 0.0)
        raise BaselineError(f"verdict {values['verdict']!r} is none of a finding{hint}")
    entry = kind(**{**values, **{name: tuple(values.get(name, ())) for name in lists}})
    try:
        check_trial(entry.trial())
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BaselineError(f"replay is no trial that can be run again: {error}") from error
    return entry
