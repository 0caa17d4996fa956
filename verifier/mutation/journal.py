"""A file of outcomes, written while mutants are tried: so a run goes on where it ended, and shards are put together."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from verifier.core.errors import ReportedError
from verifier.core.versions import versions
from verifier.mutation.outcomes import MutationRun, Outcome

__all__ = ["Journal", "Question", "joined", "question_of", "read_journal"]


@dataclass(frozen=True)
class Question:
    """What decides which mutants there are and what becomes of them.

    Parameters
    ----------
    files
        The changed files, each with a digest of its source.
    shard
        ``I/N``; empty for all mutants. Journals of one question are put together whatever their shards are.
    """

    patterns: tuple[str, ...]
    files: tuple[tuple[str, str], ...]
    imports: tuple[str, ...]
    torch: str
    seed: int
    most: int | None
    samples: int
    level: int
    shard: str = ""

    def difference(self, other: Question) -> str:
        """Return how ``other`` differs, apart from the shard, as text; empty if it does not."""
        for name, value in asdict(self).items():
            theirs = getattr(other, name)
            if name != "shard" and value != theirs:
                return "the changed files differ" if name == "files" else f"{name} {value}, not {theirs}"
        return ""


def question_of(
    patterns: Sequence[str],
    files: Sequence[str],
    imports: Sequence[str],
    seed: int,
    most: int | None,
    samples: int,
    level: int,
    shard: str | None,
) -> Question:
    """Return the question, with the files as they are now."""
    digests = tuple((file, hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]) for file in files)
    version = versions()["torch"]
    return Question(tuple(patterns), digests, tuple(imports), version, seed, most, samples, level, shard or "")


class Journal:
    """Appends outcomes to a file, one line of JSON for each.

    Parameters
    ----------
    path
        Is made, or goes on if it answers the same question.

    Raises
    ------
    ReportedError
        If the file holds the answers to another question, or cannot be written.
    """

    def __init__(self, path: str, question: Question) -> None:
        self._path, self.run = path, MutationRun()
        exists = os.path.exists(path) and os.path.getsize(path) > 0
        if exists:
            before, self.run = read_journal(path)
            if difference := before.difference(question) or (
                before.shard != question.shard and f"shard {before.shard or 'all'}, not {question.shard or 'all'}"
            ):
                raise ReportedError(f"--out {path}: holds the outcomes of another run: {difference}")
            _drop_cut_line(path)
        try:
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise ReportedError(f"--out {path}: {error.strerror}") from error
        if not exists:
            self._write({"question": asdict(question)})

    def note(self, run: MutationRun, outcome: Outcome) -> None:
        """Append an outcome. It takes the place of an earlier one of the same mutant."""
        self._write({"candidates": run.candidates, "outcome": asdict(outcome)})

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:  # such as a full disk
            raise ReportedError(f"--out {self._path}: {error.strerror or error}; what it holds is kept") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written has been said
            self._file.close()


class _Line(msgspec.Struct):
    question: Question | None = None
    candidates: int = 0
    outcome: Outcome | None = None


def read_journal(path: str) -> tuple[Question, MutationRun]:
    """Return what a file of outcomes was asked and what it holds. A last line that was cut short is left out.

    Raises
    ------
    ReportedError
        If the file cannot be read, or is none of these files.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportedError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    lines: list[_Line] = []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            lines.append(msgspec.json.decode(line, type=_Line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ReportedError(f"{path}, line {number}: no outcome of mutants: {error}") from error
    if not lines or (question := lines[0].question) is None:
        raise ReportedError(f"{path}: no file of mutants' outcomes, which `mutate --out` writes")
    outcomes = {one.outcome.mutant: one.outcome for one in lines if one.outcome is not None}
    return question, MutationRun(
        max(one.candidates for one in lines), sorted(outcomes.values(), key=lambda one: one.mutant)
    )


def joined(paths: Sequence[str]) -> MutationRun:
    """Return what several files hold together, such as those of the shards of one run.

    Raises
    ------
    ReportedError
        If one cannot be read, or they answer different questions.
    """
    read = [(path, *read_journal(path)) for path in paths]
    first_path, first, _ = read[0]
    for path, question, _ in read[1:]:
        if difference := first.difference(question):
            raise ReportedError(f"{path} answers another question than {first_path}: {difference}")
    return _together(run for _, _, run in read)


def _together(runs: Iterable[MutationRun]) -> MutationRun:
    made = MutationRun()
    outcomes: dict[Any, Outcome] = {}
    for run in runs:
        made.candidates = max(made.candidates, run.candidates)
        outcomes |= {one.mutant: one for one in run.outcomes}
    made.outcomes = [outcomes[mutant] for mutant in sorted(outcomes)]
    return made


def _drop_cut_line(path: str) -> None:
    """Cut off a last line without its end, which a killed process leaves."""
    with open(path, "r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
