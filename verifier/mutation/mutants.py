"""Mutants of strategies: what is changed, and how a process comes to run it."""

from __future__ import annotations

import ast
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType

from verifier.core.ops import resolve
from verifier.mutation.operators import Edit, edits_of
from verifier.torch_internals.amending.mutating import (
    differently_keyed,
    exchanged_code,
    key_text,
    keys_of,
    ruled_like,
    rules_of_siblings,
)
from verifier.torch_internals.amending.propagation import rule_function
from verifier.torch_internals.names import OpOverload

__all__ = ["Mutant", "installed", "mutants_of_files", "mutants_of_registrations"]

KEY, TABLE = "cache key", "rules of another op"
_OPS_OF_A_REGISTRATION = 3


@dataclass(frozen=True, order=True)
class Mutant:
    """One change to a strategy.

    Parameters
    ----------
    file, line, last_line
        What is changed; for a registration, the function that has the rules.
    function
        Its qualified name.
    operator
        One of :data:`verifier.mutation.operators.OPERATORS`.
    before, after
        The source, or the registration, before and after.
    number
        Of the change among those of the file.
    op
        The overload whose registration is changed; empty for a change to source.
    """

    file: str
    line: int
    last_line: int
    function: str
    operator: str
    before: str
    after: str
    number: int = 0
    op: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.before}  ->  {self.after}"


def mutants_of_files(files: Sequence[str]) -> list[Mutant]:
    """Return all mutants of the functions in ``files``, in the order of the source.

    Raises
    ------
    SyntaxError
        If a file cannot be parsed.
    """
    return [
        Mutant(file, edit.line, edit.last_line, edit.function, edit.operator, *edit.texts, number)
        for file in files
        for number, edit in enumerate(_source(file).edits)
    ]


def mutants_of_registrations(ops: Sequence[str]) -> list[Mutant]:
    """Return mutants of what is registered beside the functions: keys of the cache, and tables of rules.

    Hundreds of ops share a function and a registration; a few of them stand for all.
    """
    made: dict[tuple[object, ...], list[Mutant]] = {}
    for name in ops:
        op = _op(name)
        function = rule_function(op)
        if not isinstance(function, FunctionType):
            continue
        code = function.__code__
        place = os.path.realpath(code.co_filename), code.co_firstlineno, code.co_firstlineno, function.__qualname__
        changes = [(KEY, key_text(op), after) for after in keys_of(op)]
        changes += [(TABLE, name, str(other)) for other in rules_of_siblings().get(op, ())]
        for operator, before, after in changes:
            alike = (*place, operator, after, before if operator == KEY else "")
            made.setdefault(alike, []).append(Mutant(*place, operator, before, after, op=name))
    return [
        mutant
        for alike in made.values()
        for number, mutant in enumerate(alike)
        if number % max(1, len(alike) // _OPS_OF_A_REGISTRATION) == 0
    ]


@contextlib.contextmanager
def installed(mutant: Mutant) -> Iterator[None]:
    """Let this process decide as the mutant does, inside the block.

    Raises
    ------
    NotInstallableError
        If no function that lives can have the code of the mutant.
    """
    op = _op(mutant.op) if mutant.op else None
    if op is None:
        with exchanged_code(mutant.file, _source(mutant.file).codes(mutant.number)):
            yield
    elif mutant.operator == KEY:
        with differently_keyed(op, keys_of(op)[mutant.after]):
            yield
    else:
        with ruled_like(op, _op(mutant.after)):
            yield


def _op(name: str) -> OpOverload:
    found = resolve(f"torch.ops.{name}")
    assert isinstance(found, OpOverload)
    return found


class _Source:
    """A file as a tree, with its changes."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.tree = ast.parse(Path(file).read_text(encoding="utf-8"), file)
        self.edits: list[Edit] = edits_of(self.tree)

    def codes(self, number: int) -> dict[CodeType, CodeType]:
        """Return the code of each function that a change makes another one, by the code that it has without it."""
        edit = self.edits[number]
        before = self._compiled(edit.line)
        undo = edit.apply()
        try:
            changed = self._compiled(edit.line)
        finally:
            undo()
        return dict(_differing(before, changed))

    def _compiled(self, line: int) -> CodeType:
        """Return the code of the function or class at the top level around a line, beside the imports.

        The rest of the module need not be compiled. A method of an imported module is called by other code than one of
        any other object, so without the imports the code would not be that of the function that lives.
        """
        kept = [
            one
            for one in self.tree.body
            if isinstance(one, ast.Import | ast.ImportFrom) or one.lineno <= line <= (one.end_lineno or 0)
        ]
        return compile(ast.Module(kept, []), self.file, "exec", dont_inherit=True)


@lru_cache(maxsize=32)
def _source(file: str) -> _Source:
    return _Source(file)


def _differing(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Yield the functions below ``old`` that differ in ``new``, with what they are there."""
    ours, theirs = ([one for one in code.co_consts if isinstance(one, CodeType)] for code in (old, new))
    names = [(one.co_qualname, one.co_firstlineno) for one in theirs]
    for one in ours:
        name = one.co_qualname, one.co_firstlineno
        here = [number for number, other in enumerate(names) if other == name]
        rank = [other for other in ours if (other.co_qualname, other.co_firstlineno) == name].index(one)
        if rank < len(here) and (other := theirs[here[rank]]) != one:
            yield one, other
            yield from _differing(one, other)
