"""The user's own files, run in the controller and in every rank before anything else (``--import``)."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import verifier
from verifier.execution.patches import BETWEEN_OPS, definitions_of_dtensor, exchanged, ops_that_run
from verifier.execution.registrations import (
    Lacking,
    Registered,
    as_option,
    changes,
    defining_modules,
    definition_of_operator,
    is_installed,
    is_of_python,
    registered_rules,
)
from verifier.torch_internals.registries import count_as_registered, let_new_rules_win, noted_registrations

__all__ = [
    "ImportFailedError",
    "command_names",
    "definitions_of_rules",
    "exchanged_alone",
    "follow",
    "has_changed",
    "imported_module",
    "imports_beside",
    "is_importing",
    "module_as_written",
    "modules_of_rules",
    "once_imported",
    "own_rules",
    "patterns_of_imports",
    "places_of_rules",
    "registered_by",
    "rules_of_the_user",
    "run_file",
    "run_imports",
    "run_imports_with_warnings",
]

_OWN = f"{Path(verifier.__file__).resolve().parent}{os.sep}"
_running: list[str] = []
_registered: dict[str, dict[str, str]] = {}
"""By import, the ops for which it has registered a rule in this process, and the rule as text."""
_times: dict[Path, int] = {}
"""When each file that was run had been changed last."""
_exchanged: set[str] = set()
"""The ops whose rules run code of DTensor that an import has exchanged, or are torch's and registered again."""


class ImportFailedError(ValueError):
    """A module or file named by ``--import`` could not be run."""


_later: list[Callable[[], object]] = []
"""What waits until the imports have run."""


def once_imported(action: Callable[[], object]) -> None:
    """Do ``action`` now, or once the imports that are being run have all run: what it changes is not theirs."""
    _later.append(action)
    if not _running:
        _act()


def _act() -> None:
    while _later:
        _later.pop(0)()


def is_importing() -> bool:
    """Return whether a module or file that was named is being run now."""
    return bool(_running)


def run_imports(names: Sequence[str]) -> list[str]:
    """Import each module, or run each file, in order; a name that has been imported already is not run again.

    A callable at a dotted path, as ``strategies.install``, is called. Sharding rules that are registered win over
    torch's own; returned are the ops for which DTensor by itself would have kept its own.

    Raises
    ------
    ImportFailedError
        With the name, the exception, whatever it was, and the line of the user's that raised it; one that asks Python
        to exit, too, and one by which pytest skips a module.
    """
    if not names:
        return []
    with let_new_rules_win() as helped:
        for name in names:
            _running.append(name)
            before, defined = registered_rules(), definitions_of_dtensor()
            try:
                with noted_registrations() as noted:
                    _import(name)
                _registered.setdefault(name, {}).update(_changed(before, registered_rules()))
                _take_in_again(name, noted)
                _take_in_exchanged(name, exchanged(defined, definitions_of_dtensor()))
            except KeyboardInterrupt:
                raise
            # The user's own code may raise anything. What ends it with sys.exit must not end us, with its status.
            except BaseException as error:
                text = error.msg if isinstance(error, SyntaxError) and _place(error) else error
                said = f"{type(error).__name__}: {text}".removesuffix(": ")
                if isinstance(error, ImportError) and "no known parent package" in said and name.endswith(".py"):
                    said += f"; name it as a module: --import {_module_of_package(Path(name))}"
                raise ImportFailedError(f"--import {name}: {said}{_where(error)}") from error
            finally:
                _running.pop()
        inside = registered_rules()
    _follow_winning(inside, registered_rules())
    if not _running:
        _act()
    return helped


def _follow_winning(before: Mapping[str, Registered], after: Mapping[str, Registered]) -> None:
    """Let what is registered keep its import, when DTensor no longer has torch's own rules beside it."""
    for found in _registered.values():
        found.update({
            op: after[op].text for op, text in found.items() if op in before and op in after and before[op].text == text
        })  # fmt: skip


def _changed(before: Mapping[str, Registered], after: Mapping[str, Registered]) -> dict[str, str]:
    """Return the ops that have other rules than before; a user may register a function of torch, too."""
    ops = {op: text for op, text in changes(before, after).items() if op in after}
    # torch itself registers rules of prims, once its compiler is imported
    return {op: text for op, text in ops.items() if after[op].sources or not op.startswith("prims.")}


def _take_in_again(name: str, noted: Collection[str]) -> None:
    """Let ops count as registered by the import ``name`` for which it has registered what torch has anyway."""
    rules = registered_rules()
    again = {op: rules[op].text for op in noted if op in rules and not rules[op].sources and op[:6] != "prims."}
    _exchanged.update(again.keys() - _registered[name].keys())
    _registered[name].update(again)


def _take_in_exchanged(name: str, changed: frozenset[tuple[str, str]]) -> None:
    """Let ops count as registered by the import ``name`` if their rules run code of DTensor that it has changed."""
    rules = registered_rules()
    ops = ops_that_run(changed, rules) if changed else ()
    if ops:
        _registered[name].update({op: rules[op].text if op in rules else "" for op in ops})
        count_as_registered(ops)
        _exchanged.update(ops)


def registered_by(names: Sequence[str]) -> tuple[str, ...]:
    """Return the ops that have rules, handlers or strategies of the imports ``names``, sorted."""
    now = registered_rules()
    given = [item for name in names for item in _registered.get(name, {}).items()]
    return tuple(sorted({op for op, text in given if op in BETWEEN_OPS or (op in now and now[op].text == text)}))


def exchanged_alone() -> frozenset[str]:
    """Return the ops whose rules are torch's own, and run code that an import has exchanged or registers them again."""
    rules = registered_rules()
    return frozenset(op for op in _exchanged if op not in rules or not rules[op].sources)


def patterns_of_imports(patterns: Sequence[str], imports: Sequence[str], only: Sequence[str] = ()) -> Sequence[str]:
    """Return ``patterns``, or if there is none, the ops for which ``imports`` have registered rules, or ``only`` these.

    A warning is given if nothing was asked for and the imports have registered nothing.
    """
    if patterns or not imports:
        return patterns
    ops = registered_by(imports)
    if not ops:
        warnings.warn(
            f"{', '.join(imports)}: registers no sharding rule, so it does not say what to verify", stacklevel=3
        )
    return [op for op in ops if op in only] if only else ops


def _module_of_package(file: Path) -> str:
    """Return the dotted name of a file as a module of the package that its folder is."""
    folder = file.resolve().parent
    parts = [folder.name, file.stem]
    while (folder / "__init__.py").is_file() and (folder.parent / "__init__.py").is_file():
        folder = folder.parent
        parts.insert(0, folder.name)
    return ".".join(parts)


def _where(error: BaseException) -> str:
    """Return the last line of the user's own code that an exception went through, as `` (rules.py:12)``, if any did.

    What is installed is the user's own only where nothing else is.
    """
    if isinstance(error, SyntaxError) and (place := _place(error)):
        return f" ({place})"
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    files = [frame for frame in frames if os.path.isfile(frame[0]) and not is_of_python(frame[0])]
    seen = [frame for frame in files if not os.path.realpath(frame[0]).startswith(_OWN)]
    own = [frame for frame in seen if not is_installed(frame[0])]
    file, line = next(reversed(own or seen), ("", None))
    return f" ({file}:{line})" if file else ""


def _place(error: SyntaxError) -> str:
    """Return the line of the file that Python could not read; empty if what it could not read is in no file."""
    return f"{error.filename}:{error.lineno}" if error.filename and os.path.isfile(error.filename) else ""


def run_imports_with_warnings(names: Sequence[str]) -> None:
    """Do as :func:`run_imports`, and warn of each op that it returns.

    For functions that make a plan of what a user asked for: the warning names the line that called such a function.
    """
    for op in run_imports(names):
        warnings.warn(
            f"{op}: DTensor keeps its own rule beside one that is registered later; yours is verified in its place",
            stacklevel=3,
        )


@contextmanager
def imports_beside(names: Sequence[str]) -> Iterator[list[str]]:
    """Yield ``names``, and add what the block imports that registers rules: what processes are to import in its place.

    So a family that registers rules of its own is tested with them, though ranks load no families.
    """
    imports, before = list(names), registered_rules()
    yield imports
    after = registered_rules()
    new = [Lacking(op, after[op]) for op in changes(before, after) if op in after]
    options = (as_option(source.module, source.file, ["", *sys.path]) for source in defining_modules(new))
    imports += [name for name in dict.fromkeys(options) if name and name not in imports]


def rules_of_the_user() -> dict[str, tuple[str, list[str]]]:
    """Return, by op, what this process runs it by that is not torch's, as text, and the modules that define it."""
    rules = {op: rule for op, rule in registered_rules().items() if rule.sources}
    return {
        op: (
            rule.text,
            [as_option(one.module, one.file, sys.path) for one in defining_modules([Lacking(op, rule)])],
        )
        for op, rule in rules.items()
    }


def follow(rules: Mapping[str, tuple[str, Sequence[str]]]) -> None:
    """Have this process run ops by the rules of another one, as :func:`rules_of_the_user` returned them there.

    Raises
    ------
    ImportFailedError
        If that takes more than to import what defines them.
    """
    for op, (text, modules) in rules.items():
        if not _runs(op, text):
            run_imports([name for name in modules if name])
        if not _runs(op, text):
            raise ImportFailedError(
                f"{op}: the process that asks has a rule that this one does not have, {text}, and it is not registered "
                f"by an import of {', '.join(modules) or 'any module'}; name what registers it by --import FILE"
            )


def _runs(op: str, text: str) -> bool:
    registered = registered_rules().get(op)
    return registered is not None and registered.text == text


def own_rules() -> list[str]:
    """Return the ops that this process runs by rules that are not torch's own, or that an import registered."""
    own = {op for op, rule in registered_rules().items() if rule.sources}
    return sorted(own.union(registered_by([*_registered])))


def places_of_rules() -> dict[str, tuple[str, int]]:
    """Return the file and the line of the user's own strategy of each op; files in this folder are relative to it."""
    found = {}
    for op, rule in registered_rules().items():
        source = next((one for one in rule.sources if one.file and one.line), None)
        if source is not None:
            relative = os.path.relpath(source.file)
            found[op] = (source.file if relative.startswith(os.pardir) else relative, source.line)
    return found


def definitions_of_rules() -> dict[str, tuple[tuple[str, str], ...]]:
    """Return the files and the names, in their modules, of the user's definitions that make the rules of each op.

    They include the definition of an operator of the user's. An op that a module of the user's registers a function of
    torch for has the whole file of the import.
    """
    found: dict[str, dict[tuple[str, str], None]] = {}
    for op, rule in registered_rules().items():
        sources = [*rule.sources, *([own] if (own := definition_of_operator(op)) is not None else [])]
        starts = {(one.file, one.name.partition(".")[0]): None for one in sources if one.file}
        if starts:
            found[op] = starts
    for name, ops in _registered.items():
        module = imported_module(name)
        for op in ops:
            if op not in found and (file := getattr(module, "__file__", None)):
                found[op] = {(file, ""): None}
    return {op: tuple(starts) for op, starts in found.items()}


def modules_of_rules() -> list[ModuleType]:
    """Return the modules that define these rules."""
    names = {source.module: None for rule in registered_rules().values() for source in rule.sources}
    return [sys.modules[name] for name in names if name in sys.modules]


def imported_module(name: str) -> ModuleType | None:
    """Return the module that :func:`run_imports` loaded under ``name``; of a function it is the one that has it.

    None if there is none; nothing is imported.
    """
    path = Path(name)
    if name.endswith(".py") or path.is_file():
        return sys.modules.get(_module_name(path))
    return sys.modules.get(name) or sys.modules.get(name.rpartition(".")[0])


_OF_FILES = "verifier_import_"


def module_as_written(name: str) -> str:
    """Return the name under which a user's own code imports a module: that of its file, if a file was given.

    >>> module_as_written("my_package.ops")
    'my_package.ops'
    """
    file = getattr(sys.modules.get(name), "__file__", None)
    return Path(file).stem if name.startswith(_OF_FILES) and file else name


def _module_name(path: Path) -> str:
    return f"{_OF_FILES}{path.stem}_{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]}"


def _import(name: str) -> None:
    path = Path(name)
    if name.endswith(".py") or path.is_file():
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path.absolute()}")
        run_file(path)
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


def run_file(path: Path) -> ModuleType:
    """Run a file as a module, once in a process, and return that; modules beside it can be imported by it.

    Its name has the path in it, so that two files of one name are two modules.
    """
    resolved = path.resolve()
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    _times[resolved] = resolved.stat().st_mtime_ns
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(resolved.parent) not in sys.path:
        sys.path.append(str(resolved.parent))  # last, so that no file there hides an installed module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def has_changed(file: str) -> bool:
    """Return whether a file is another one now than when :func:`run_file` ran it; False if it has not run it."""
    resolved = Path(file).resolve()
    return resolved in _times and not (resolved.is_file() and resolved.stat().st_mtime_ns == _times[resolved])


def command_names(names: Sequence[str], path: Sequence[str], folder: Path) -> list[str]:
    """Return names that this process has imported as another one takes them that starts in ``folder``.

    A module that is not found from there by its name is named by its file.

    Parameters
    ----------
    path
        Where modules are looked for in the other process, beside ``folder``, as ``sys.path``.
    """
    given = []
    for name in names:
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None) if not name.endswith(".py") else name
        if file is None:  # a callable at a dotted path, or a module in no file
            given.append(name)
            continue
        option = as_option(name, os.path.realpath(file), [str(folder), *path]) if module is not None else file
        relative = os.path.relpath(option, folder) if os.path.isabs(option) else option
        given.append(option if relative.startswith(os.pardir) else relative)
    return list(dict.fromkeys(given))
