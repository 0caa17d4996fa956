"""The sources that results depend on: torch's rules, the verifier, and what the user imported.

Each is known by a digest, which a run stores in its header. Evidence counts as long as the digests have not changed.
Making a digest imports nothing, because the names of what a stored run imported are data.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import entry_points, version
from pathlib import Path
from types import FunctionType, ModuleType
from typing import NamedTuple

from verifier.records.schema import RunHeader

__all__ = ["BASELINE", "TORCH_RULES", "VERIFIER", "Change", "changes_since", "import_digests", "revision"]

TORCH_RULES = "torch's rules"
"""The digest of DTensor, of torch's collectives and of its decompositions, by their source."""

VERIFIER = "the verifier"
"""The digest of the verifier, and of the packages that declare families and samples, by their source."""

BASELINE = "baseline"
"""The digest of the known findings; it decides what a run does, and not whether its evidence counts."""

_IN_TORCH = ("distributed/tensor/**/*.py", "distributed/*.py", "_decomp/*.py")
_GROUPS = ("dtensor_verifier.families", "dtensor_verifier.samples")


def revision(imports: Sequence[str] = (), modules: Iterable[ModuleType] = ()) -> dict[str, str]:
    """Return the digests of everything that the outcome of a trial depends on, by what each stands for.

    Parameters
    ----------
    imports
        What the user imported; it has to have run.
    modules
        The modules of these, and others that are the user's: what they use of the user's own code counts as well.
    """
    named = import_digests(imports)
    used = {path: digest for path, digest in _used_by(modules).items() if digest not in named.values()}
    return {TORCH_RULES: _torch_rules(), VERIFIER: _verifier(), **named, **used}


def import_digests(names: Sequence[str]) -> dict[str, str]:
    """Return, for each name that ``--import`` takes, a digest of the code that it stands for.

    That is the file that is named, or all source of the package that a module is in, since rules and kernels need not
    be in the module that registers them. Empty for a module that is in no file, or nowhere.
    """
    return {name: _digest(_sources(name)) for name in names}


class Change(NamedTuple):
    """Something that is not what it was when a run was made.

    ``under_test`` is True for what a gate judges, that is rules and the user's own code, and False for another version
    of torch or another verifier.
    """

    text: str
    under_test: bool


def changes_since(header: RunHeader) -> list[Change]:
    """Return what has changed since the run with the header ``header`` was made."""
    recorded = header.digests
    if TORCH_RULES not in recorded or VERIFIER not in recorded:
        return [Change("it does not say with which sources it was made", False)]
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
            changes.append(Change(f"{name} has changed" if digest else f"{name} is not there any more", True))
    return changes


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
    """Return the names of the verifier's package and of those that declare families and samples."""
    declared = [one.value.partition(":")[0] for group in _GROUPS for one in entry_points(group=group)]
    return sorted({module.partition(".")[0] for module in (__name__, *declared)})


def _digest(files: Sequence[Path]) -> str:
    """Return sixteen hex digits that stand for the content of files; empty where there are none."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16] if files else ""


def _sources(name: str) -> list[Path]:
    """Return the file that is named, the files in a folder ("src/rules/"), or those of a module's outermost package."""
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
    """Return where a module that is in no package would be loaded from; nothing is imported to find out."""
    try:
        found = importlib.util.find_spec(name) if name.isidentifier() else None
    except ValueError:  # a module that was made by hand
        return None
    return found or PathFinder.find_spec(name, [os.getcwd()])


# ---------------------------------------------------------------------------------------------- the user's own code
def _used_by(modules: Iterable[ModuleType]) -> dict[str, str]:
    """Return digests of the user's own files and packages that ``modules`` use, by their paths.

    A module uses what its global names lead to: modules, and the modules in which functions and classes were defined.
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
    return {path: _digest(_sources(path)) for path in sorted(paths)}


def _module_of(value: object) -> str:
    """Return the name of the module in which a function or a class was defined; empty for anything else."""
    return value.__module__ or "" if isinstance(value, FunctionType | type) else ""


def _own_path(module: ModuleType) -> str | None:
    """Return the file of a module, or the folder of its outermost package; None unless it is the user's own."""
    top = sys.modules.get(module.__name__.partition(".")[0], module)
    folders = list(getattr(top, "__path__", ()))
    file = folders[0] if folders else getattr(top, "__file__", None)
    if file is None or any(Path(file).is_relative_to(folder) for folder in _others()):
        return None
    path = Path(file).absolute()
    text = str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    return text + os.sep if folders else text


@cache
def _others() -> tuple[Path, ...]:
    """Return where code is that is not the user's: installed packages, the standard library, torch and the verifier."""
    places = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    specs = [_spec("torch"), *map(_spec, _packages())]
    places |= {str(Path(spec.origin).parent) for spec in specs if spec is not None and spec.origin is not None}
    return tuple(map(Path, sorted(places)))
