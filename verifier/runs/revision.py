"""Digests of the sources that results depend on: torch's rules, the verifier, and the user's imports.

A run stores the digests in its header. Evidence counts as long as the digests have not changed. Computing a digest
imports nothing, because the import names of a stored run are data.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import entry_points, version
from pathlib import Path
from types import FunctionType, ModuleType
from typing import NamedTuple

from verifier.core.wording import shown_path
from verifier.records.schema import RunHeader
from verifier.runs.named_files import modules_named, texts_of_files

__all__ = ["BASELINE", "TORCH_RULES", "VERIFIER", "Change", "changes_since", "digest_at", "import_digests", "revision"]

TORCH_RULES = "torch's rules"
"""Name of the digest of the sources of DTensor, of torch's collectives and of its decompositions."""

VERIFIER = "the verifier"
"""Name of the digest of the sources of the verifier and of packages that declare families and samples."""

BASELINE = "baseline"
"""Name of the digest of the known findings. They affect what a run does, but not whether its evidence counts."""

_IN_TORCH = ("distributed/tensor/**/*.py", "distributed/*.py", "_decomp/*.py")
_LARGEST = 4 * 2**20
"""Bytes of the largest file that counts because the user's code names it."""
_GROUPS = ("dtensor_verifier.families", "dtensor_verifier.remedies", "dtensor_verifier.samples")


def revision(imports: Sequence[str] = (), modules: Iterable[ModuleType] = ()) -> dict[str, str]:
    """Return the digests of all sources that the outcome of a trial depends on, by name.

    Parameters
    ----------
    imports
        The user's imports, which must have run.
    modules
        The modules of the imports, and other modules of the user. The user's own code that they use counts, too.
    """
    named = import_digests(imports)
    used = {path: digest for path, digest in _used_by(modules).items() if digest not in named.values()}
    return {TORCH_RULES: _torch_rules(), VERIFIER: _verifier(), **named, **used}


def import_digests(names: Sequence[str]) -> dict[str, str]:
    """Return a digest of the code of each name given to ``--import``.

    The code is the named file, or all source of the module's package, because rules and kernels need not be in the
    module that registers them. The digest is empty for a module without a file, or a module that does not exist.
    """
    return {name: _digest(_sources(name)) for name in names}


class Change(NamedTuple):
    """A source that has changed since a run was made.

    ``under_test`` is True for sources that a gate judges, which are rules and the user's own code. It is False for
    another version of torch or another verifier. ``name`` is that of the digest, for the user's own code.
    """

    text: str
    under_test: bool
    name: str = ""


def changes_since(header: RunHeader) -> list[Change]:
    """Return the sources that have changed since the run with the header ``header`` was made."""
    recorded = header.digests
    if TORCH_RULES not in recorded or VERIFIER not in recorded:
        return [Change("it does not say which sources it was made with", False)]
    was, now = (text.partition("+")[0] for text in (header.versions.get("torch", "?"), version("torch")))
    if was != now:
        return [Change(f"torch was {was} and is {now}", False)]
    changes = []
    if recorded[TORCH_RULES] != _torch_rules():
        changes.append(Change(f"the source of {TORCH_RULES} has changed", True))
    if recorded[VERIFIER] != _verifier():
        changes.append(Change(f"the source of {VERIFIER} has changed", False))
    own = import_digests([name for name in recorded if name not in (TORCH_RULES, VERIFIER, BASELINE)])
    for name, digest in own.items():
        if digest != recorded[name]:
            changes.append(Change(f"{name} has changed" if digest else f"{name} is not there any more", True, name))
    return changes


def digest_at(name: str, read: Callable[[Path], bytes | None], files_in: Callable[[Path], list[Path]]) -> str:
    """Return the digest of the user's own code called ``name`` in another revision; empty if that lacks a file.

    Parameters
    ----------
    read
        Returns the content of a file in that revision; None if it was not there.
    files_in
        Returns the Python files in a folder, sorted by their paths.
    """
    if name.endswith(os.sep):
        files = files_in(Path(name))
    else:
        spec = None if Path(name).is_file() else _spec(name.partition(".")[0])
        folders = (spec.submodule_search_locations or []) if spec is not None else []
        files = [file for folder in folders for file in files_in(Path(folder))] or _sources(name)
    contents = [read(file) for file in files]
    return "" if None in contents else _digest_of(content for content in contents if content is not None)


@cache
def _torch_rules() -> str:
    spec = _spec("torch")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    return _digest(sorted(file for glob in _IN_TORCH for file in root.glob(glob)))


@cache
def _verifier() -> str:
    return _digest([file for name in _packages() for file in _sources(name)])


@cache
def _packages() -> list[str]:
    """Return the names of the verifier's package and of packages that declare families and samples."""
    declared = [one.value.partition(":")[0] for group in _GROUPS for one in entry_points(group=group)]
    return sorted({module.partition(".")[0] for module in (__name__, *declared)})


def _digest(files: Sequence[Path]) -> str:
    """Return sixteen hex digits of the hash of the files' content; empty if there are no files."""
    return _digest_of(file.read_bytes() for file in files)


def _digest_of(contents: Iterable[bytes]) -> str:
    digest, some = hashlib.sha256(), False
    for content in contents:
        digest.update(content)
        some = True
    return digest.hexdigest()[:16] if some else ""


def _sources(name: str) -> list[Path]:
    """Return the named file, the files of a folder ("src/rules/"), or the files of a module's outermost package."""
    if Path(name).is_file():
        return [Path(name)]
    if name.endswith(os.sep):
        return _in_folder(Path(name))
    spec = _spec(name.partition(".")[0])
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [file for folder in spec.submodule_search_locations for file in _in_folder(Path(folder))]
    return [Path(spec.origin)] if spec.has_location and spec.origin is not None else []


def _in_folder(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def _spec(name: str) -> ModuleSpec | None:
    """Return the spec of a module outside packages, without importing anything."""
    try:
        found = importlib.util.find_spec(name) if name.isidentifier() else None
    except ValueError:  # a module without a spec, made by hand
        return None
    return found or PathFinder.find_spec(name, [os.getcwd()])


# ---------------------------------------------------------------------------------------------- the user's own code
def _used_by(modules: Iterable[ModuleType]) -> dict[str, str]:
    """Return digests of the user's own files and packages that ``modules`` use, by their paths.

    A module uses what its source imports, wherever in it, and the files that it names. It uses the modules among its
    global names, and those that define its global functions and classes, too. Source alone shows where constants come
    from.
    """
    waiting, seen = list(modules), set[str]()
    paths: dict[str, None] = {}
    while waiting:
        module = waiting.pop()
        if module.__name__ in seen or (path := _own_path(module)) is None:
            continue
        seen.add(module.__name__)
        paths[path] = None
        for value in list(vars(module).values()):
            used = value if isinstance(value, ModuleType) else sys.modules.get(_module_of(value))
            if used is not None:
                waiting.append(used)
        file = Path(module.__file__ or "")
        for tree in _parsed(file):
            for name in modules_named(tree, module.__package__ or ""):
                if (loaded := sys.modules.get(name)) is not None:
                    waiting.append(loaded)
                elif unloaded := _own_unloaded(name):
                    paths[unloaded] = None
            paths |= dict.fromkeys(_named_files(file, tree))
    return {path: _digest(_sources(path)) for path in sorted(paths)}


def _parsed(file: Path) -> Iterator[ast.Module]:
    """Yield the syntax tree of a source file; nothing if there is none."""
    if file.suffix == ".py" and file.is_file():
        try:
            yield ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            return


def _named_files(file: Path, tree: ast.Module) -> Iterator[str]:
    """Yield the files that the source ``file`` names, beside it or in this folder."""
    for text in texts_of_files(tree):
        for folder in (file.parent, Path.cwd()):
            named = folder / text
            if named.is_file() and named.stat().st_size <= _LARGEST and not _is_of_others(named):
                yield shown_path(named)
                break


def _module_of(value: object) -> str:
    """Return the name of the module that defines a function or a class; empty for anything else."""
    return value.__module__ or "" if isinstance(value, FunctionType | type) else ""


def _own_path(module: ModuleType) -> str | None:
    """Return the file of a user's own module, or the folder of its outermost package; None for other modules."""
    top = sys.modules.get(module.__name__.partition(".")[0], module)
    folders = list(getattr(top, "__path__", ()))
    return _own(folders, getattr(top, "__file__", None))


def _own_unloaded(name: str) -> str | None:
    """Return the same for a module that is not loaded, because the code that imports it has not run."""
    spec = _spec(name.partition(".")[0])
    if spec is None:
        return None
    return _own([*(spec.submodule_search_locations or ())], spec.origin if spec.has_location else None)


def _own(folders: Sequence[str], file: str | None) -> str | None:
    file = folders[0] if folders else file
    if file is None or _is_of_others(Path(file)):
        return None
    text = shown_path(file)
    return text + os.sep if folders else text


def _is_of_others(file: Path) -> bool:
    return any(file.is_relative_to(folder) for folder in _others())


@cache
def _others() -> tuple[Path, ...]:
    """Return the folders of code that is not the user's: installed packages, standard library, torch, the verifier."""
    places = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    specs = [_spec("torch"), *map(_spec, _packages())]
    places |= {str(Path(spec.origin).parent) for spec in specs if spec is not None and spec.origin is not None}
    return tuple(map(Path, sorted(places)))
