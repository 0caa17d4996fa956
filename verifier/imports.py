"""The user's own files, run in the controller and in every rank before anything else (``--import``)."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from verifier.torch_internals import let_new_rules_win

__all__ = ["ImportFailedError", "imported_modules", "own_rules", "run_imports", "run_imports_with_warnings"]


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


def imported_modules(names: Sequence[str]) -> list[ModuleType]:
    """Return the modules that :func:`run_imports` has run for ``names``."""
    found = (sys.modules.get(_module_name(name)) or sys.modules.get(name.rpartition(".")[0]) for name in names)
    return [module for module in found if module is not None]


def own_rules() -> list[str]:
    """Return the ops for which rules are registered that are not torch's own."""
    return []


def _is_file(name: str) -> bool:
    return name.endswith(".py") or Path(name).is_file()


def _module_name(name: str) -> str:
    """Return the name of the module that ``--import name`` makes."""
    path = Path(name)
    return f"verifier_import_{path.stem}_{abs(hash(str(path.resolve())))}" if _is_file(name) else name


def _import(name: str) -> None:
    path = Path(name)
    if _is_file(name):
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path.absolute()}")
        module_name = _module_name(name)
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
