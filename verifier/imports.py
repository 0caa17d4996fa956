"""The user's own files, run in the controller and in every rank before anything else (``--import``)."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from verifier.torch_internals import let_new_rules_win

__all__ = ["ImportFailedError", "import_digests", "imported_module", "run_imports", "run_imports_with_warnings"]


class ImportFailedError(ValueError):
    """A module or file named by ``--import`` could not be run."""


def run_imports(names: Sequence[str]) -> list[str]:
    """Import each module, or run each file, in order; a name that has been imported already is not run again.

    A callable at a dotted path, as ``strategies.install``, is called. Sharding rules that are registered win over
    torch's own; returned are the ops for which DTensor by itself would have kept its own.

    Raises
    ------
    ImportFailedError
        With the name and the exception, whatever it was; one that asks Python to exit, too.
    """
    if not names:
        return []
    with let_new_rules_win() as helped:
        for name in names:
            try:
                _import(name)
            # The user's own code may raise anything. What ends it with sys.exit must not end us, with its status.
            except (Exception, SystemExit) as error:
                said = f"{type(error).__name__}: {error}".removesuffix(": ")
                raise ImportFailedError(f"--import {name}: {said}") from error
    return helped


def run_imports_with_warnings(names: Sequence[str]) -> None:
    """Do as :func:`run_imports`, and warn of each op that it returns.

    For functions that make a plan of what a user asked for: the warning names the line that called such a function.
    """
    for op in run_imports(names):
        warnings.warn(
            f"{op}: DTensor keeps its own rule beside one from register_sharding; yours is verified in its place",
            stacklevel=3,
        )


def import_digests(names: Sequence[str]) -> dict[str, str]:
    """Return, for each name that :func:`run_imports` has run, a digest of the code that it stands for.

    That is the file that was named, or all source of the package that a module is in, since rules and kernels need not
    be in the module that registers them. Empty for a module that is in no file.
    """
    return {name: _digest(name) for name in names}


def _digest(name: str) -> str:
    digest = hashlib.sha256()
    files = [Path(name)] if Path(name).is_file() else _sources(name)
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16] if files else ""


def _sources(name: str) -> list[Path]:
    """Return the files of the outermost package that ``name`` is in, or of a module that is in none."""
    module = sys.modules.get(name) or sys.modules.get(name.rpartition(".")[0])
    if module is None:
        return []
    package = sys.modules[module.__name__.partition(".")[0]]
    folders = [Path(folder) for folder in getattr(package, "__path__", ())]
    if folders:
        return sorted(file for folder in folders for file in folder.rglob("*.py"))
    file = getattr(package, "__file__", None)
    return [Path(file)] if file else []


def imported_module(name: str) -> ModuleType | None:
    """Return the module that :func:`run_imports` loaded under ``name``; of a function it is the one that has it.

    None if there is none; nothing is imported.
    """
    path = Path(name)
    if name.endswith(".py") or path.is_file():
        return sys.modules.get(_module_name(path))
    return sys.modules.get(name) or sys.modules.get(name.rpartition(".")[0])


def _module_name(path: Path) -> str:
    return f"verifier_import_{path.stem}_{abs(hash(str(path.resolve())))}"


def _import(name: str) -> None:
    path = Path(name)
    if name.endswith(".py") or path.is_file():
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path.absolute()}")
        module_name = _module_name(path)
        if module_name in sys.modules:
            return
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
        return
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        parent, _, attribute = name.rpartition(".")
        if error.name != name or not parent:
            raise
        target = getattr(importlib.import_module(parent), attribute, None)
        if not callable(target):
            raise
        target()
