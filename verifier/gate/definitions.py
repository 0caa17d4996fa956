"""What a definition in a file of the user's depends on, read from the source of two revisions. Nothing is imported.

A definition depends on the names that it reads, wherever the user's files define them. Statements that call something
while a module loads may register anything, so every definition of the module depends on them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Container, Iterable, Iterator
from functools import cached_property
from pathlib import Path

from verifier.runs.named_files import called_module, texts_of_files

__all__ = ["EVERYTHING", "Definitions", "module_files"]

EVERYTHING = ""
"""Stands for all names of a module."""

_LOADED = "<loaded>"
"""Stands for what a module does while it loads."""
_LOADING = (
    "__import__", "exec", "exec_module", "import_module", "iter_modules", "run_module", "run_path",
    "spec_from_file_location", "walk_packages",
)  # fmt: skip
_REGISTERING_RULES = ("register_op_strategy", "register_prop_rule", "register_sharding", "register_single_dim_strategy")
_ONLY_CHANGING = (
    "cache", "contextmanager", "dataclass", "lru_cache", "no_grad", "overload", "singledispatch", "total_ordering",
    "wraps",
)  # fmt: skip
"""Decorators of Python and torch that register nothing."""

Reader = Callable[[Path], str | None]
"""Returns the text of a file; None if there is none."""


class _Module:
    """The statements of a module, by the names that they define, and those that do something when it loads."""

    def __init__(self, text: str) -> None:
        self.tree = _without_docstrings(ast.parse(text))
        self.of_name: dict[str, list[ast.stmt]] = {}
        self.effects: list[ast.stmt] = []
        self.decorated: dict[str, list[ast.stmt]] = {}
        """Definitions, by their names, that a decorator may register, as a fake kernel or samples."""
        for statement in [one for given in self.tree.body for one in _one_import_each(given)]:
            names = set(_bound(statement))
            for name in names:
                self.of_name.setdefault(name, []).append(statement)
            definition = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            imports = isinstance(statement, ast.Import | ast.ImportFrom)
            loads = any(isinstance(node, ast.Call | ast.Import | ast.ImportFrom) for node in ast.walk(statement))
            if not definition and not imports and (loads or not names):
                self.effects.append(statement)
            elif _is_given_away(statement):
                self.decorated.setdefault(next(iter(names)), []).append(statement)

    def effects_beside(self, rules: Container[str]) -> Iterator[ast.stmt]:
        """Yield the statements that may register anything, except the definitions that are ``rules``."""
        yield from self.effects
        for name, statements in self.decorated.items():
            yield from (one for one in statements if (name not in rules or name == "_") and not _is_rule(one))

    @cached_property
    def is_dynamic(self) -> bool:
        """Whether the module loads code whose file or name its text does not tell."""
        calls = (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))
        return any(_last_name(call) in _LOADING and not called_module(call) for call in calls)

    @cached_property
    def imports(self) -> list[ast.AST]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)]


class Definitions:
    """The definitions in the user's files, as ``read`` returns their texts.

    Parameters
    ----------
    folders
        Where modules are looked for by their names.
    others
        Where those are looked for that are in none of ``folders``, because code may add folders to ``sys.path``.

    Attributes
    ----------
    rules
        Files and names of the definitions that are known to be rules of an op, and so concern no other op.
    """

    def __init__(self, read: Reader, folders: tuple[Path, ...], others: tuple[Path, ...] = ()) -> None:
        self._read, self._folders, self._others = read, folders, others
        self.rules: frozenset[tuple[Path, str]] = frozenset()
        self._modules: dict[Path, _Module | None] = {}

    def files(self, file: Path) -> list[Path]:
        """Return ``file`` and all files of the user's that it imports or names, directly or not."""
        found: dict[Path, None] = {}
        waiting = [file]
        while waiting:
            one = waiting.pop()
            if one in found or (module := self._module(one)) is None:
                continue
            found[one] = None
            waiting += [target for node in module.imports for target, _ in self._imported(one, node)]
            found |= dict.fromkeys(path for path, _ in self._named(one, module.tree))
        return [*found]

    def is_dynamic(self, file: Path) -> bool:
        """Return whether a module loads code whose file or name its text does not tell."""
        module = self._module(file)
        return module is not None and module.is_dynamic

    def loading(self, files: Iterable[Path]) -> frozenset[str]:
        """Return everything that the statements depend on which may register anything while ``files`` load, as text."""
        return self._closure([(file, _LOADED) for file in files])

    def of(self, file: Path, name: str) -> frozenset[str]:
        """Return everything that ``name`` in ``file`` depends on, as text; all of the file if it defines no such name.

        The text of a statement has no comments, docstrings and line numbers.
        """
        return self._closure([(file, name)])

    def _closure(self, waiting: list[tuple[Path, str]]) -> frozenset[str]:
        found: set[str] = set()
        seen: set[tuple[Path, str]] = set()
        while waiting:
            one = waiting.pop()
            module = self._module(one[0])
            if one in seen or module is None:
                continue
            seen.add(one)
            statements = [] if one[1] == _LOADED else [*module.of_name.get(one[1], module.tree.body)]
            statements += module.effects_beside({name for file, name in self.rules if file == one[0]})
            for statement in statements:
                found.add(f"{one[0].name}: {ast.dump(statement)}")
                found |= {f"{path.name}: {text}" for path, text in self._named(one[0], statement)}
                waiting += self._read_by(one[0], module, statement)
        return frozenset(found)

    def _read_by(self, file: Path, module: _Module, statement: ast.stmt) -> Iterator[tuple[Path, str]]:
        """Yield the definitions that a statement reads, and what it imports."""
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and (node.id in module.of_name or "*" in module.of_name):
                yield file, node.id if node.id in module.of_name else "*"
            else:
                yield from self._imported(file, node)

    def _named(self, file: Path, node: ast.AST) -> Iterator[tuple[Path, str]]:
        """Yield the files that code names, beside its own or in one of the folders, and their texts."""
        for name in texts_of_files(node):
            for folder in (file.parent, *self._folders):
                if (text := self._read(folder / name)) is not None:
                    yield folder / name, text
                    break

    def _imported(self, file: Path, node: ast.AST) -> Iterator[tuple[Path, str]]:
        """Yield what a statement or a call imports; nothing for any other node."""
        if name := called_module(node):
            package = file.parents[max(len(name) - len(name.lstrip(".")) - 1, 0)]
            folders = (package,) if name.startswith(".") else self._beside(file)
            yield from ((path, EVERYTHING) for path in self._find(name.lstrip("."), folders))
        if not isinstance(node, ast.Import | ast.ImportFrom):
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from ((path, EVERYTHING) for path in self._find(alias.name, self._beside(file)))
            return
        base = self._beside(file) if not node.level else (file.parents[node.level - 1],)
        for alias in node.names:
            inner = self._find(f"{node.module}.{alias.name}" if node.module else alias.name, base)
            own = self._find(node.module, base) if node.module else []
            if inner and inner[-1] not in own:
                yield inner[-1], EVERYTHING
            for path in own:
                yield path, alias.name if path == own[-1] and alias.name != "*" else EVERYTHING

    def _beside(self, file: Path) -> tuple[Path, ...]:
        return (*self._folders, file.parent, *self._others)

    def _find(self, name: str, folders: tuple[Path, ...]) -> list[Path]:
        """Return the files that importing ``name`` runs: those of the packages around the module, then its own."""
        for folder in folders:
            if found := module_files(name, folder, lambda path: self._module(path) is not None):
                return found
        return []

    def _module(self, file: Path) -> _Module | None:
        if file not in self._modules:
            text = self._read(file)
            try:
                self._modules[file] = None if text is None else _Module(text)
            except (SyntaxError, ValueError):  # it cannot be imported either
                self._modules[file] = None
        return self._modules[file]


def module_files(name: str, folder: Path, exists: Callable[[Path], bool]) -> list[Path]:
    """Return the files that importing the module ``name`` from ``folder`` runs; none if it is not there."""
    *packages, last = name.split(".")
    found: list[Path] = []
    for package in packages:
        folder /= package
        if exists(folder / "__init__.py"):
            found.append(folder / "__init__.py")
    for file in (folder / last / "__init__.py", folder / f"{last}.py"):
        if exists(file):
            return [*found, file]
    return []


def _bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement defines in its module."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    for child in ast.iter_child_nodes(node):
        yield from _bound(child)


def _decorators(statement: ast.stmt) -> list[ast.expr]:
    definition = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return statement.decorator_list if definition else []  # type: ignore[attr-defined]


def _is_given_away(statement: ast.stmt) -> bool:
    """Return whether a decorator may keep a definition for later, instead of only changing it."""
    return any(name not in _ONLY_CHANGING for name in map(_last_name, _decorators(statement)))


def _is_rule(statement: ast.stmt) -> bool:
    return any(_last_name(one) in _REGISTERING_RULES for one in _decorators(statement))


def _last_name(decorator: ast.expr) -> str:
    """Return ``c`` for the decorators ``a.b.c`` and ``a.b.c(...)``; empty for others."""
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _one_import_each(statement: ast.stmt) -> list[ast.stmt]:
    """Return a statement for each name that an import defines, because a definition may read only one of them."""
    if isinstance(statement, ast.Import):
        return [ast.Import([alias]) for alias in statement.names]
    if isinstance(statement, ast.ImportFrom):
        return [ast.ImportFrom(statement.module, [alias], statement.level) for alias in statement.names]
    return [statement]


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = node.body[1:] or [ast.Pass()]
    return tree
