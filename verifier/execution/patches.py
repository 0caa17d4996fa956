"""What an import has exchanged in DTensor's own code, and the ops whose rules run that code."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType

from verifier.execution.registrations import Registered

__all__ = ["BETWEEN_OPS", "definitions_of_dtensor", "exchanged", "ops_that_run"]

BETWEEN_OPS = ("dtensor.redistribute", "dtensor.sequence")
"""Stand for ops, where code is exchanged that no rule runs: DTensor redistributes by it, or reduces, or shards.

Ops ask for redistributions that users cannot ask for, to pending sums for one.
"""
_PACKAGE = "torch.distributed.tensor"
Name = tuple[str, str]
"""A module, and a name in it: of a function, a class or a table."""


def definitions_of_dtensor() -> dict[Name, tuple[bool, object]]:
    """Return what DTensor's modules have under each name, so that it is equal if and only if it is the same code.

    The flag says whether the module itself defines it: a function, a class, or a table in capital letters, but nothing
    that the module remembers.
    """
    modules = [(name, one) for name, one in list(sys.modules.items()) if f"{name}.".startswith(f"{_PACKAGE}.")]
    return {
        (name, held): (_is_defined_in(name, held, value), _state(value))
        for name, module in modules
        for held, value in list(vars(module).items())
        if not held.startswith("__")
    }


def _is_defined_in(module: str, name: str, value: object) -> bool:
    return value.__module__ == module if isinstance(value, FunctionType | type) else name.isupper()


def exchanged(before: Mapping[Name, tuple[bool, object]], after: Mapping[Name, tuple[bool, object]]) -> frozenset[Name]:
    """Return the names of what the modules defined before and what is other code now."""
    return frozenset(
        name for name, (defined, state) in before.items() if defined and name in after and after[name][1] != state
    )


def ops_that_run(names: frozenset[Name], rules: Mapping[str, Registered]) -> tuple[str, ...]:
    """Return the ops whose rules read one of ``names``, themselves or by a function of DTensor that they call.

    A class is read by all that make its objects, so its methods do not count. What no rule reads is shown by
    redistributions, if by anything: :data:`BETWEEN_OPS` are then among the ops.
    """
    functions = frozenset(name for name in names if not isinstance(_value(name), type))
    reading: dict[CodeType, frozenset[Name]] = {}
    found: dict[str, None] = {}
    left = set(names)
    for op, rule in rules.items():
        read = [_reads(one, functions, reading) for one in rule.functions if isinstance(one, FunctionType)]
        if any(read):
            found[op] = None
            left.difference_update(*read)
    return (*found, *(BETWEEN_OPS if left else ()))


def _value(name: Name) -> object:
    return getattr(sys.modules[name[0]], name[1], None)


def _state(value: object) -> object:
    match value:
        case FunctionType():
            bound = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            return id(value), value.__code__, tuple(_shallow(one) for one in (*bound, *(value.__defaults__ or ())))
        case type() if value.__module__.startswith(_PACKAGE):
            members = ((name, _function_of(member)) for name, member in list(vars(value).items()))
            return id(value), tuple((name, id(one), one.__code__) for name, one in members if one is not None)
        case _:
            return _shallow(value)


def _function_of(member: object) -> FunctionType | None:
    member = getattr(member, "fget", None) or getattr(member, "__func__", member)
    return member if isinstance(member, FunctionType) else None


def _shallow(value: object) -> object:
    """Return the items of a table, or else the identity of a value."""
    match value:
        case dict():
            return id(value), tuple((id(name), id(held)) for name, held in list(value.items()))
        case list() | tuple() | set() | frozenset():
            return id(value), frozenset(map(id, value)) if isinstance(value, set | frozenset) else tuple(map(id, value))
        case _:
            return id(value)


def _is_filled(cell: object) -> bool:
    try:
        cell.cell_contents  # type: ignore[attr-defined]  # noqa: B018
    except ValueError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------- who reads them
def _reads(function: FunctionType, names: frozenset[Name], known: dict[CodeType, frozenset[Name]]) -> frozenset[Name]:
    """Return those of ``names`` that a function reads, itself or by functions of DTensor that it calls."""
    if function.__code__ in known:
        return known[function.__code__]
    known[function.__code__] = frozenset()  # of a function that calls itself
    module = str(function.__globals__.get("__name__", ""))
    read = set(_names(function.__code__))
    found = names & {(module, name) for name in (*read, function.__name__)}
    for one in _called(function, read):
        if f"{one.__module__}.".startswith(f"{_PACKAGE}."):
            found |= names & {(one.__module__, one.__name__)}
            found |= _reads(one, names, known)
    known[function.__code__] = found
    return found


def _called(function: FunctionType, read: Iterable[str]) -> Iterator[FunctionType]:
    cells = (cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))
    for value in (*(function.__globals__.get(name) for name in read), *cells):
        value = value.__func__ if isinstance(value, MethodType) else value
        if isinstance(value, FunctionType):
            yield value


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _names(one)
