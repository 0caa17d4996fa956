"""The user's own files, run in the controller and in every rank before anything else (``--import``)."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from verifier.torch_internals import let_new_rules_win

__all__ = ["ImportFailedError", "import_digests", "run_imports", "run_imports_with_warnings"]


class ImportFailedError(ValueError):
    """A module or file named by ``--import`` could not be run."""


def run_imports(names: Sequence[str]) -> list[str]:
    """Import each module, or run each file, in order; a name that has been imported already is not run again.

    A callable at a dotted path, as ``strategies.install``, is called. Sharding rules that are registered win over
    torch's own; returned are the ops for which DTensor by itself would have kept its own.

    Raises
    ------
    ImportFailedError
        With the name and the exception, whatever it was.
    """
    if not names:
        return []
    with let_new_rules_win() as helped:
        for name in names:
            try:
                _import(name)
            except Exception as error:  # the user's own code may raise anything
                raise ImportFailedError(f"--import {name}: {type(error).__name__}: {error}") from error
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
    """Return, for each name that :func:`run_imports` has run, a digest of the file that it is in.

    Empty for a module that is in no file.
    """
    return {name: _digest(name) for name in names}


def _digest(name: str) -> str:
    path: str | None = name
    if not Path(name).is_file():
        module = sys.modules.get(name) or sys.modules.get(name.rpartition(".")[0])
        path = getattr(module, "__file__", None)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] if path else ""


def _import(name: str) -> None:
    path = Path(name)
    if name.endswith(".py") or path.is_file():
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path.absolute()}")
        module_name = f"verifier_import_{path.stem}_{abs(hash(str(path.resolve())))}"
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
