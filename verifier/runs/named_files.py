"""What a Python file of the user's names: the modules that it imports, and the files that it reads. Nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

__all__ = ["called_module", "modules_named", "texts_of_files"]

_IMPORTING = ("import_module", "__import__")
_UNREAD = (".log", ".md", ".rst")
"""Suffixes of files that code writes to, or that are for people alone."""
_LONGEST = 200


def called_module(node: ast.AST) -> str:
    """Return the module that a call as ``import_module("helper")`` names; empty for any other node.

    >>> called_module(ast.parse('importlib.import_module("helper")').body[0].value)
    'helper'
    """
    if not isinstance(node, ast.Call) or not node.args:
        return ""
    function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    named = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
    return named if function in _IMPORTING and isinstance(named, str) else ""


def modules_named(tree: ast.AST, package: str = "") -> Iterator[str]:
    """Yield the full names of the modules that code imports, and of what it takes from them, which may be modules.

    Parameters
    ----------
    package
        The package of the code, for relative imports; without it, these are left out.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            if base and (above or not node.level):
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)
        elif (name := called_module(node)) and not name.startswith("."):
            yield name


def texts_of_files(tree: ast.AST) -> Iterator[str]:
    """Yield the texts in code that may be the path of a file, as of a table of rules, or of a kernel's source."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and 0 < len(node.value) < _LONGEST:
            path = Path(node.value)
            if path.suffix and path.suffix not in _UNREAD and node.value.isprintable():
                yield node.value
