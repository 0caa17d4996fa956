"""The code that a script copies: the program that it calls, and the parts of the runtime that it uses."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import keyword
import re
import sys
import textwrap
import threading
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from types import CodeType, FunctionType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from verifier.core.case import OpCase
from verifier.core.ops import resolve, stand_in_of
from verifier.findings.script import runtime

__all__ = [
    "Inlined",
    "called_as",
    "is_program",
    "needs_its_module",
    "parsed",
    "program_source",
    "source_folder",
    "stand_in_source",
    "torchs_path",
]


_PARSING = threading.Lock()


def parsed(text: str) -> ast.Module:
    """Return the tree of a source, in one thread at a time: Python 3.11 counts the depths of all threads in one place.

    Another thread may run meanwhile, as soon as the garbage collector calls back.
    """
    with _PARSING:
        return ast.parse(text)


@functools.cache
def _runtime() -> Mapping[str, tuple[str, frozenset[str]]]:
    """Return the runtime's definitions by name, in order: the source, and the names that the source looks up."""
    text = inspect.getsource(runtime)
    found = {}
    for node in parsed(text).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            case ast.Assign(targets=[ast.Name(id=name)]):
                first = node.lineno
            case _:
                continue
        lines = text.splitlines()[first - 1 : node.end_lineno]
        used = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        found[name] = "\n".join(lines), frozenset(used - {name})
    return found


class Inlined:
    """Gives a script the definitions of the runtime that it uses, each once."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def __call__(self, *names: object) -> str:
        """Return the runtime's source of all non-empty ``names`` and of everything that they use."""
        defined, wanted, waiting = _runtime(), set[str](), [str(name) for name in names if name]
        while waiting:
            name = waiting.pop()
            wanted.add(name)
            waiting += (defined[name][1] & defined.keys()) - wanted
        chosen = [defined[name][0] for name in defined if name in wanted - self._given]
        self._given |= wanted
        text = "\n\n\n".join(chosen)
        return re.sub(r"(?m)^([A-Z_]+ = .*)\n\n\n(?=[A-Z_]+ = )", r"\1\n", text)  # constants stand together


def is_program(call: str) -> bool:
    """Return whether a dotted path is not torch's own."""
    return not call.startswith("torch.")


_PROGRAM_NAMES: dict[str, object] = {
    "torch": torch,
    "F": F,
    "dist": dist,
    "DTensor": DTensor,
    "Partial": Partial,
    "Replicate": Replicate,
    "Shard": Shard,
}
"""Names of its module that a program may use, because scripts have them as well."""

_TEMPLATE = resources.files(__package__).joinpath("script.py.jinja").read_text(encoding="utf-8")
_TAKEN = {*re.findall(r"^(?:def |class )?(\w+)(?: =|\()", _TEMPLATE, re.MULTILINE), *vars(runtime)}
"""Names that scripts define or import themselves, besides the source of a program."""


def _names(code: CodeType) -> set[str]:
    """Return the names that a code object, and functions inside it, may look up in their module."""
    nested = [_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*nested)


def _with_helpers(program: Callable[..., object]) -> list[FunctionType]:
    """Return a program and the functions outside torch that it calls by their own names; helpers first."""
    found: dict[FunctionType, None] = {}
    seen: set[FunctionType] = set()  # functions may call each other

    def visit(function: FunctionType) -> None:
        seen.add(function)
        for name in sorted(_names(function.__code__)):
            other = function.__globals__.get(name)
            if not isinstance(other, FunctionType) or other.__module__.partition(".")[0] == "torch":
                continue
            if other.__name__ == name and other not in seen:
                visit(other)
        found[function] = None

    if isinstance(program, FunctionType):
        visit(program)
    return list(found)


def _stands_alone(function: FunctionType, known: dict[str, object]) -> bool:
    """Return whether a function needs nothing but its source and the ``known`` names of its module."""
    if function.__closure__ or function.__qualname__ != function.__name__ or hasattr(function, "__wrapped__"):
        return False
    try:
        (defined,) = parsed(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError, ValueError):  # made by exec, or one of several definitions on a line
        return False
    if not isinstance(defined, ast.FunctionDef) or defined.decorator_list:
        return False
    defaults = [*defined.args.defaults, *(default for default in defined.args.kw_defaults if default is not None)]
    used = {node.id for default in defaults for node in ast.walk(default) if isinstance(node, ast.Name)}
    used |= (_names(function.__code__) & function.__globals__.keys()) - {"__name__"}  # a class reads that of its module
    missing = object()
    given = {name: getattr(builtins, name, missing) for name in used} | known
    return all(function.__globals__.get(name, getattr(builtins, name, missing)) is given[name] for name in used)


def needs_its_module(call: str) -> bool:
    """Return whether a path outside torch needs its module, because the source of its functions is not enough."""
    if not is_program(call):
        return False
    functions = _with_helpers(resolve(call))
    names = {function.__name__: function for function in functions}
    if not functions or functions[-1].__name__ != call.rpartition(".")[2]:
        return True
    if len(names) < len(functions) or names.keys() & _TAKEN:
        return True
    return not all(_stands_alone(function, _PROGRAM_NAMES | names) for function in functions)


def _module(call: str) -> str:
    """Return the module that a path begins with."""
    resolve(call)  # imports it
    parts = call.split(".")
    found = (".".join(parts[:cut]) for cut in range(len(parts) - 1, 0, -1))
    return next((name for name in found if name in sys.modules), parts[0])


def called_as(call: str) -> str:
    """Return the expression with which a script names the callable that it calls.

    >>> called_as("torch.mm"), called_as("torch.ops.aten.random_.from")
    ('torch.mm', "getattr(torch.ops.aten.random_, 'from')")
    """
    if is_program(call):
        return "PROGRAM" if needs_its_module(call) else call.rpartition(".")[2]
    return _path(call)


def _path(dotted: str) -> str:
    """Return an expression for a dotted path, which may contain Python's keywords."""
    expression, *rest = dotted.split(".")
    for part in rest:
        plain = part.isidentifier() and not keyword.iskeyword(part)
        expression = f"{expression}.{part}" if plain else f"getattr({expression}, {part!r})"
    return expression


def program_source(call: str) -> str:
    """Return the code that a script needs before it can call a path: imports, or the source of functions."""
    module = _module(call)
    if not is_program(call):
        return "" if module == "torch" or module.startswith("torch.ops") else f"import {module}\n\n"
    if needs_its_module(call):
        return (
            f"try:\n    import {module}\n\n    PROGRAM = {_path(call)}\nexcept BaseException as error:\n"
            f'    print(f"undecided: {{error}}", flush=True)\n    os._exit(2)\n\n'
        )
    parts = [inspect.getsource(function) for function in _with_helpers(resolve(call))]
    return "\n\n".join(["import torch.nn.functional as F\n", *parts]) + "\n"


def torchs_path(case: OpCase) -> str:
    """Return the path that ``case`` calls, or the op's own where it is called by the path of its stand-in kernel."""
    return f"torch.ops.{case.op}" if case.call == stand_in_of(case.op) else case.call


def stand_in_source(case: OpCase) -> str:
    """Return the source of the kernel for the CPU that the op of ``case`` needs; empty if torch's own is called."""
    path = "" if case.call == f"torch.ops.{case.op}" else stand_in_of(case.op)
    return f"# a kernel for the CPU\n{_source_of(_module(path))}\n\n\n" if path else ""


def _source_of(module: str) -> str:
    """Return the source of a module and of those of its package that it imports, without their docstrings."""
    text = inspect.getsource(sys.modules[module])
    lines: list[str | None] = list(text.splitlines())
    before = []
    for place, node in enumerate(parsed(text).body):
        match node:
            case ast.Expr(value=ast.Constant(value=str())) if place == 0:
                pass
            case ast.ImportFrom(module="__future__") | ast.Assign(targets=[ast.Name(id="__all__")]):
                pass
            case ast.ImportFrom(module=str(other)) if other.startswith(f"{module.rpartition('.')[0]}."):
                before.append(_source_of(other))
            case _:
                continue
        lines[node.lineno - 1 : node.end_lineno] = [None] * ((node.end_lineno or node.lineno) - node.lineno + 1)
    own = "\n".join(line for line in lines if line is not None).strip()
    return "\n\n\n".join([*before, own])


def source_folder(module: str) -> str:
    """Return the folder from which Python imports a module; empty if the module is installed or has no file."""
    package = sys.modules.get(module.partition(".")[0])
    if package is None:
        return ""
    file = getattr(package, "__file__", None)
    folders = [Path(folder).parent for folder in getattr(package, "__path__", ())]
    folders += [Path(file).parent] if file and not folders else []
    return next((str(folder.resolve()) for folder in folders if "site-packages" not in folder.parts), "")
