"""The baseline: findings that are known, each with a reason and a day on which it has to be looked at again.

It is a TOML file under version control. A line of it changes only when a finding does, so that a review of the file is
a review of what is being accepted.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from verifier.cases import VerdictKind
from verifier.codec import load_trial
from verifier.record_checks import check_name
from verifier.record_files import write_atomically
from verifier.records import FORMAT_VERSION, FindingRecord, RunRecord, TrialRecord
from verifier.wording import did_you_mean, one_line

__all__ = ["NOT_EXPLAINED", "VALID_DAYS", "Baseline", "BaselineEntry", "BaselineError", "load_baseline"]

NOT_EXPLAINED = "not explained yet"
"""The reason of an entry that nobody has given one."""

VALID_DAYS = 180
"""Days from the day on which a finding enters the baseline to the one on which it expires."""

_HEADER = """\
# Known findings of `python -m verifier`. The gate fails on every finding that is not in here.
#
# reason   why the finding is accepted; one with an empty reason counts as new
# link     where it is being dealt with (optional)
# expires  after this day a finding that still fails counts against the gate again
# torch    versions of torch on which it was seen
# groups   what its failures look like before they are minimised: a failure that looks so is this finding
# replay   the trial by value; the verifier runs it again to see whether the finding is fixed
#
# reason, link and expires are yours to edit; an update keeps them. It does not keep comments.
"""


class BaselineError(ValueError):
    """A baseline file cannot be read; the message has the file, the line, and what to change, on one line."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


@dataclass(frozen=True)
class BaselineEntry:
    """One known finding.

    ``summary`` is the first line of the finding's message, ``torch`` the versions on which it was seen, ``expires`` the
    last day on which it is accepted, ``groups`` what its failures look like before they are minimised, ``replay`` a
    TrialRecord as JSON on one line.
    """

    fingerprint: str
    op: str
    family: str
    verdict: str
    rule: str
    mesh: str
    summary: str
    reason: str
    torch: tuple[str, ...]
    expires: date
    replay: str
    link: str = ""
    groups: tuple[str, ...] = ()

    def trial(self) -> TrialRecord:
        """Return the trial to run again."""
        return msgspec.json.decode(self.replay, type=TrialRecord)


@dataclass(frozen=True)
class Baseline:
    """Known findings, in the order of op, verdict and fingerprint. An empty one knows nothing."""

    entries: tuple[BaselineEntry, ...] = ()

    def __post_init__(self) -> None:
        in_order = sorted(self.entries, key=lambda entry: (entry.op, entry.verdict, entry.fingerprint))
        object.__setattr__(self, "entries", tuple(in_order))

    def get(self, fingerprint: str) -> BaselineEntry | None:
        """Return the entry of a finding, or None."""
        return next((entry for entry in self.entries if entry.fingerprint == fingerprint), None)

    @property
    def digest(self) -> str:
        """Sixteen hex digits that stand for the findings and their trials, whatever is said of them.

        >>> Baseline().digest
        'e3b0c44298fc1c14'
        """
        decisive = "".join(f"{entry.fingerprint}{entry.verdict}{entry.groups}{entry.replay}" for entry in self.entries)
        return hashlib.sha256(decisive.encode()).hexdigest()[:16]

    def updated(self, run: RunRecord, today: date, keep_untested: bool = True) -> Baseline:
        """Return the baseline that accepts what ``run`` found.

        New findings enter with the reason ``NOT_EXPLAINED`` and expire in ``VALID_DAYS`` days. Entries that the run saw
        fixed leave. An entry whose finding is still there keeps its reason, link and expiry, even a past one: to accept
        it for longer is a decision, to be made in the file.

        Parameters
        ----------
        keep_untested
            Whether entries that the run did not try again stay. Not observed is not fixed.
        """
        version = run.header.versions.get("torch", "unknown").partition("+")[0]
        found = {finding.fingerprint: finding for finding in run.findings}
        status = {known.fingerprint: known.status for known in run.baseline}
        entries: list[BaselineEntry] = []
        for entry in self.entries:
            if entry.fingerprint in found or status.get(entry.fingerprint) == "known":
                entries.append(
                    replace(
                        entry,
                        reason=entry.reason if entry.reason.strip() else NOT_EXPLAINED,
                        torch=tuple(sorted({*entry.torch, version}, key=_version_key)),
                        groups=_groups(entry, found.get(entry.fingerprint)),
                    )
                )
            elif status.get(entry.fingerprint) != "fixed" and keep_untested:
                entries.append(entry)
        known = {entry.fingerprint for entry in self.entries}
        expires = today + timedelta(days=VALID_DAYS)
        entries += [_entry(finding, version, expires) for name, finding in found.items() if name not in known]
        return Baseline(tuple(entries))

    def to_toml(self) -> str:
        """Return the text of the file: the same entries always give the same text."""
        parts = [_HEADER, f"format_version = {FORMAT_VERSION}\n"]
        for entry in self.entries:
            parts.append("\n[[finding]]\n")
            parts.extend(
                _line(name, getattr(entry, name))
                for name in _FILE_ORDER
                if name not in ("link", "groups") or getattr(entry, name)
            )
        return "".join(parts)

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all.

        Raises
        ------
        RunStoreError
            If the file system refuses; the file is then as it was.
        """
        write_atomically(path, self.to_toml().encode(), "the baseline is as it was before")


_FILE_ORDER = (
    "fingerprint",
    "op",
    "family",
    "verdict",
    "rule",
    "mesh",
    "summary",
    "reason",
    "link",
    "torch",
    "expires",
    "groups",
    "replay",
)
assert set(_FILE_ORDER) == {field.name for field in fields(BaselineEntry)}


def _entry(finding: FindingRecord, version: str, expires: date) -> BaselineEntry:
    return BaselineEntry(
        fingerprint=finding.fingerprint,
        op=finding.op,
        family=finding.family,
        verdict=finding.verdict,
        rule=finding.rule,
        mesh=finding.mesh,
        summary=finding.message.partition("\n")[0],
        reason=NOT_EXPLAINED,
        torch=(version,),
        expires=expires,
        replay=msgspec.json.encode(finding.trial).decode(),
        groups=tuple(finding.groups),
    )


def _groups(entry: BaselineEntry, finding: FindingRecord | None) -> tuple[str, ...]:
    return tuple(sorted({*entry.groups, *(finding.groups if finding is not None else ())}))


def _version_key(version: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in version.split(".")]


def _line(name: str, value: str | date | tuple[str, ...]) -> str:
    """Return ``name = value`` in TOML."""
    if name == "groups" and isinstance(value, tuple):
        lines = "".join(f"    {tomli_w.dumps({'v': item}).removeprefix('v = ').strip()},\n" for item in value)
        return f"groups = [\n{lines}]\n"
    if isinstance(value, tuple):
        # On one line: a version more is one line of diff.
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
        Whether a file that does not exist is an empty baseline, as before the first one is written.

    Raises
    ------
    BaselineError
        If the file does not exist or cannot be read, is no TOML, has another ``format_version``, or an entry lacks a
        field, has an unknown or malformed one, or repeats a fingerprint. The message starts with file and line.
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
        # Python 3.11 gives the position in the text of the message only.
        place = re.search(r"\(at line (\d+), column \d+\)$", str(error))
        line = int(place[1]) if place else text.count("\n") + 1
        raise BaselineError(f"{path}:{line}: not TOML: {error}") from error
    except RecursionError as error:
        raise BaselineError(f"{path}: not a baseline: tables and lists are nested too deep in it") from error
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        what = "has no format_version" if version is None else f"format_version is {version!r}"
        raise BaselineError(
            f"{path}:{_line_of(text, 'format_version')}: {what}; this version of the verifier reads {FORMAT_VERSION}"
        )
    for name in content:
        if name not in ("format_version", "finding"):
            raise BaselineError(f"{path}:{_line_of(text, name)}: unknown key {name!r}; findings are [[finding]]")
    raw = content.get("finding", [])
    if not isinstance(raw, list) or not all(isinstance(each, dict) for each in raw):
        raise BaselineError(f"{path}:{_line_of(text, 'finding')}: findings are written as [[finding]]")
    lines = [n for n, line in enumerate(text.splitlines(), 1) if re.match(r"\s*\[\[\s*finding\s*\]\]", line)]
    seen: dict[str, int] = {}
    entries: list[BaselineEntry] = []
    for position, values in enumerate(raw):
        line = lines[position] if position < len(lines) else 1
        try:
            entry = _read_entry(values)
        except BaselineError as error:
            named = values.get("fingerprint") or "without a fingerprint"
            raise BaselineError(f"{path}:{line}: finding {position + 1} ({named}): {error}") from error
        if entry.fingerprint in seen:
            first = seen[entry.fingerprint]
            raise BaselineError(f"{path}:{line}: fingerprint {entry.fingerprint} stands in line {first} already")
        seen[entry.fingerprint] = line
        entries.append(entry)
    return Baseline(tuple(entries))


def _line_of(text: str, key: str) -> int:
    """Return the number of the line that defines a top-level ``key``; 1 if there is none."""
    found = (n for n, line in enumerate(text.splitlines(), 1) if line.lstrip(" \"'[").startswith(key))
    return next(found, 1)


def _read_entry(values: Mapping[str, Any]) -> BaselineEntry:
    for name in values:
        if name not in _FILE_ORDER:
            raise BaselineError(f"unknown field {name!r}{did_you_mean(name, _FILE_ORDER)}")
    if missing := [name for name in _FILE_ORDER if name not in values and name not in ("link", "groups")]:
        raise BaselineError(f"has no {', '.join(missing)}")
    for name in _FILE_ORDER:
        if name not in ("torch", "expires", "groups") and not isinstance(values.get(name, ""), str):
            raise BaselineError(f"{name} is {values[name]!r}, but has to be a string")
    groups = values.get("groups", [])
    if not isinstance(groups, list) or not all(isinstance(group, str) for group in groups):
        raise BaselineError(f"groups is {groups!r}, but has to be a list of strings")
    versions = values["torch"]
    if not isinstance(versions, list) or not all(isinstance(version, str) for version in versions):
        raise BaselineError(f'torch is {versions!r}, but has to be a list of versions such as ["2.13.0"]')
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
    entry = BaselineEntry(**{**values, "torch": tuple(versions), "groups": tuple(groups)})
    try:
        load_trial(entry.trial())
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BaselineError(f"replay is no trial that can be run again: {error}") from error
    return entry
