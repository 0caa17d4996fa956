"""The source of a program: a function of ours or of a user's that a case calls, as its script has it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType, FunctionType

from verifier.reference import resolve

__all__ = ["is_program", "needs_its_module", "program_source"]


def is_program(call: str) -> bool:
    """Return whether a dotted path is not torch's own."""
    return not call.startswith("torch.")


_PROGRAM_NAMES = frozenset({"torch", "F", "dist", "DTensor", "Partial", "Replicate", "Shard"})
"""What a program may use of its module, since scripts import it as well."""


def _names(code: CodeType) -> set[str]:
    """Return the names that code, and functions inside it, may look up in their module."""
    nested = [_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*nested)


def _with_helpers(program: Callable[..., object]) -> list[FunctionType]:
    """Return a program and the functions that it calls, of ours and by their own names; helpers first."""
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


def needs_its_module(call: str) -> bool:
    """Return whether a function that is not torch's own uses more of its module than functions whose source does."""
    if not is_program(call):
        return False
    functions = _with_helpers(resolve(call))
    known = _PROGRAM_NAMES | {function.__name__ for function in functions}
    return any((_names(function.__code__) & function.__globals__.keys()) - known for function in functions)


def program_source(call: str) -> str:
    """Return the source of a function that is not torch's own, with the imports that programs may use."""
    if not is_program(call):
        return ""
    if needs_its_module(call):
        module, _, name = call.rpartition(".")
        imported = f"try:\n    from {module} import {name}\nexcept ImportError as error:\n"
        return f'{imported}    print(f"undecided: {{error}}")\n    sys.exit(2)\n\n'
    parts = [inspect.getsource(function) for function in _with_helpers(resolve(call))]
    return "\n\n".join(["import torch.nn.functional as F\n", *parts]) + "\n"
