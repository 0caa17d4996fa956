"""What differs between the user's files and a git revision: which ops' strategies, and which evidence still counts."""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from verifier.core.wording import did_you_mean, one_line
from verifier.gate.baseline import Baseline
from verifier.gate.definitions import EVERYTHING, Definitions, module_files
from verifier.gate.evidence import Evidence, collect
from verifier.gate.question import Question, imports_text
from verifier.records.schema import RunHeader
from verifier.runs.revision import Change, changes_since, digest_at
from verifier.runs.store import RunStore

__all__ = ["Changed", "recorded_since"]

Start = tuple[str, str]
"""A file and the name of a definition in it."""


class Changed:
    """Compares the files under git that ``imports`` name, and what these import, with the revision ``ref``.

    Nothing is imported, and torch is not loaded.

    Raises
    ------
    ValueError
        If this folder is in no git repository, or there is no such revision, or an import is not under git.
    """

    def __init__(self, ref: str, imports: Sequence[str]) -> None:
        self.ref, self.imports = ref, tuple(imports)
        self.root = Path(_git("rev-parse", "--show-toplevel", why="--changed-since needs a git repository").strip())
        if ref.startswith("-") or not ref.strip() or not _git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}"):
            names = _git("for-each-ref", "--format=%(refname:short)").split()
            raise ValueError(
                one_line(f"--changed-since {ref!r}: no such revision{did_you_mean(ref, [*names, 'HEAD'])}")
            )
        differing = _git("-C", str(self.root), "diff", "--name-only", "--no-renames", "-z", ref, "--", why="git diff")
        self._differing = {self.root / name for name in differing.split("\0") if name}
        new = _git("-C", str(self.root), "ls-files", "--others", "--exclude-standard", "-z", why="git ls-files")
        self._new = {self.root / name for name in new.split("\0") if name}
        known = _git("-C", str(self.root), "ls-files", "-z", why="git ls-files")
        self._tracked = {self.root / name for name in known.split("\0") if name}
        folders = (Path.cwd().resolve(), self.root, self.root / "src")
        for name in self.imports:
            if not any(self._is_under_git(file) for file in self._files_of(name)):
                raise ValueError(
                    f"--import {name}: has no file in {self.root}, so it cannot be compared with --changed-since {ref}"
                )
        others = tuple(sorted({file.parent for file in self._differing | self._new if file.suffix == ".py"}))
        self._now = Definitions(self._text_now, folders, others)
        self._then = Definitions(self._text_then, folders, others)

    @cached_property
    def files(self) -> tuple[str, ...]:
        """The files that the imports use and whose code differs, relative to the repository; not those with comments.

        They include files that are new, or not there any more.
        """
        found = dict.fromkeys((*self._loaded_now, *self._loaded_then))
        if any(self._now.is_dynamic(file) or self._then.is_dynamic(file) for file in found):
            found |= dict.fromkeys(file for file in sorted(self._differing | self._new) if file.suffix == ".py")
        new = {file for name in self._new_imports for file in self._files_of(name)}
        everything = (file for file in found if file in new or self._differs(file, EVERYTHING, alone=True))
        return tuple(str(file.relative_to(self.root)) for file in everything)

    @cached_property
    def _loaded_now(self) -> dict[Path, None]:
        return {
            file: None for name in self.imports for start in self._files_of(name) for file in self._now.files(start)
        }

    @cached_property
    def _loaded_then(self) -> dict[Path, None]:
        names = [name for name in self.imports if name not in self._new_imports]
        return {file: None for name in names for start in self._files_of(name) for file in self._then.files(start)}

    @cached_property
    def _new_imports(self) -> set[str]:
        """The imports that the table of the verifier names now and did not name at the revision."""
        file = Path("pyproject.toml").resolve()
        now, then = (_imports_in(text) for text in (self._text_now(file), self._text_then(file)))
        return now - then

    @cached_property
    def _loads_otherwise(self) -> bool:
        """Whether what the files do while they load differs: calls may register any rules."""
        now, then = ((one for one in loaded if one.suffix == ".py") for loaded in (self._loaded_now, self._loaded_then))
        return self._now.loading(now) != self._then.loading(then)

    def know_rules(self, starts: Iterable[Start]) -> None:
        """Take these definitions for rules, each of which concerns its own ops alone."""
        rules = frozenset((Path(file).resolve(), name) for file, name in starts)
        self._now.rules = self._then.rules = rules

    def is_changed(self, starts: Iterable[Start]) -> bool:
        """Return whether one of these definitions, anything that it reads, or what registers them differs.

        What an import registers now differs, too, if the import did not load its file at the revision.
        """
        known = self._tracked | self._new
        found = [(Path(file).resolve(), name) for file, name in starts]
        return self._loads_otherwise or any(
            (file in known and file not in self._loaded_then) or self._differs(file, name) for file, name in found
        )

    def since(self, header: RunHeader) -> list[Change]:
        """Return what has changed since a run was made; a file of the user's as it was at the revision counts as it is.

        This is right for ops whose strategies do not differ from the revision.
        """
        return [
            change
            for change in changes_since(header)
            if not change.name
            or header.digests[change.name] != digest_at(change.name, self._bytes_then, self._list_then)
        ]

    def _differs(self, file: Path, name: str, alone: bool = False) -> bool:
        if alone:
            if file in self._tracked and file not in self._differing:
                return False
            if file.suffix != ".py":
                return self._text_now(file) != self._text_then(file)
            return Definitions(self._text_now, ()).of(file, name) != Definitions(self._text_then, ()).of(file, name)
        return self._now.of(file, name) != self._then.of(file, name)

    def _files_of(self, name: str) -> list[Path]:
        """Return the files of a value of ``--import``: a file, a module, or a callable in a module."""
        if name.endswith(".py") or Path(name).is_file():
            return [Path(name).resolve()]
        for module in (name, name.rpartition(".")[0]):
            for folder in (Path.cwd().resolve(), self.root, self.root / "src"):
                if module and (found := module_files(module, folder, Path.is_file)):
                    return found
        return []

    def _is_under_git(self, file: Path) -> bool:
        return file.is_relative_to(self.root)

    def _text_now(self, file: Path) -> str | None:
        if not self._is_under_git(file) or not file.is_file():
            return None
        return file.read_text(encoding="utf-8", errors="replace")

    def _text_then(self, file: Path) -> str | None:
        if (path := file.resolve()) not in self._tracked and path not in self._differing:
            return None  # git ignores it, so what it was is not known
        content = self._bytes_then(file)
        return None if content is None else content.decode(errors="replace")

    def _bytes_then(self, file: Path) -> bytes | None:
        """Return the content of a file at the revision; None if it was not there."""
        file = file.resolve()
        if not self._is_under_git(file) or file in self._new:
            return None
        if file not in self._differing:
            return file.read_bytes() if file.is_file() else None
        return self._blobs.setdefault(file, _blob(self.root, f"{self.ref}:{file.relative_to(self.root).as_posix()}"))

    @cached_property
    def _blobs(self) -> dict[Path, bytes | None]:
        return {}

    def _list_then(self, folder: Path) -> list[Path]:
        """Return the Python files in a folder at the revision."""
        here = {file.resolve() for file in folder.rglob("*.py")} - self._new
        gone = {file for file in self._differing if file.suffix == ".py" and file.is_relative_to(folder.resolve())}
        return sorted(file for file in here | gone if self._bytes_then(file) is not None)


def recorded_since(
    changed: Changed, store: RunStore, known: Baseline, ops: Sequence[str] = (), meshes: Sequence[str] = ()
) -> Evidence:
    """Return the evidence of recorded runs about strategies that do not differ from a revision.

    No evidence is needed of these. So what is missing is only listed. Without ``ops``, all are asked about.
    """
    question = Question(tuple(ops), tuple(meshes), changed.imports)
    found = collect(store, question, known, changed.since, needed=False)
    tried = {op for run in found.runs for op in run.counts_by_op}
    lacking = [op for op in ops if op not in tried]
    missing = tuple(one.why for one in found.unanswered if one.why not in found.left_out)
    missing += (f"no run that counts has tried {', '.join(lacking)}",) if lacking else ()
    unchanged = f"no strategy of {imports_text(changed.imports)} differs from {changed.ref}, so none had to be verified"
    return replace(found, unanswered=(), left_out=(*found.left_out, *missing), unchanged=unchanged)


def _imports_in(text: str | None) -> set[str]:
    """Return the imports that a pyproject.toml names for the gate."""
    try:
        table = tomllib.loads(text or "")["tool"]["dtensor-verifier"]
        named = [*table.get("import", ()), *table.get("gate", {}).get("import", ())]
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError):
        return set()
    return {name for name in named if isinstance(name, str)}


def _git(*arguments: str, why: str = "") -> str:
    """Return what git writes to stdout; empty if it fails, or a ValueError with ``why``, if that is given."""
    try:
        made = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ValueError(f"--changed-since needs git: {error.strerror}") from error
    if made.returncode and why:
        raise ValueError(one_line(f"{why}: {made.stderr.strip()}"))
    return "" if made.returncode else made.stdout


def _blob(root: Path, name: str) -> bytes | None:
    made = subprocess.run(["git", "-C", str(root), "show", name], capture_output=True, check=False)
    return None if made.returncode else made.stdout
