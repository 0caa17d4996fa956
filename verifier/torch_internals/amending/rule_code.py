"""What stands in the code of rules and ops of the user's: the numbers and texts with which they compare arguments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType

from torch._ops import OpOverload

from verifier.torch_internals.ops import definition_of
from verifier.torch_internals.registries import registries_of_rules

__all__ = ["constants_of_op", "constants_of_rule", "reads_mesh", "reads_names_of_mesh_dims", "reads_strides"]

_NOT_THE_USERS = ("torch", "verifier")


def constants_of_rule(op: OpOverload) -> frozenset[int | float | str]:
    """Return the numbers and texts in the code of the rule of ``op``, and of the user's functions that it names."""
    return _constants(_rule_of(op))


def constants_of_op(op: OpOverload) -> frozenset[int | float | str]:
    """Return the numbers and texts in the code of ``op``, an op of the user's, and of the functions that it names."""
    return _constants(definition_of(op))


def reads_strides(op: OpOverload) -> bool:
    """Return whether the rule of ``op``, or a function of the user's that it names, names anything like strides."""
    return any(part in name for name in _names_of_rule(op) for part in _OF_MEMORY)


def reads_names_of_mesh_dims(op: OpOverload) -> bool:
    """Return whether the rule of ``op``, or a function of the user's that it names, looks at names of mesh dims."""
    return "mesh_dim_names" in _names_of_rule(op)


def reads_mesh(op: OpOverload) -> bool:
    """Return whether the rule of ``op``, or a function of the user's that it names, looks at a mesh."""
    return any("mesh" in name for name in _names_of_rule(op))


_OF_MEMORY = ("strid", "contig", "memory_format", "is_dense", "overlap")


def _rule_of(op: OpOverload) -> object:
    _, rules, strategies, single = registries_of_rules()
    return single[op].func if op in single else strategies.get(op) or rules.get(op)


def _names_of_rule(op: OpOverload) -> frozenset[str]:
    return frozenset(name for code in _codes_of(_rule_of(op)) for name in code.co_names)


def _constants(function: object) -> frozenset[int | float | str]:
    constants = (one for code in _codes_of(function) for one in _flat(code.co_consts))
    return frozenset(one for one in constants if isinstance(one, int | float | str))


def _codes_of(function: object) -> Iterator[CodeType]:
    """Yield the codes of a function, and of the user's functions that it names."""
    seen: set[FunctionType] = set()
    left = [function]
    while left:
        function = left.pop()
        if isinstance(function, partial):
            left += [function.func, *function.args, *function.keywords.values()]
        elif isinstance(function, MethodType):
            function = function.__func__
        elif not isinstance(function, FunctionType | type):
            function = vars(type(function)).get("__call__")
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        left += [cell.cell_contents for cell in function.__closure__ or ()]
        left.append(getattr(function, "__wrapped__", None))
        if str(function.__globals__.get("__name__")).partition(".")[0] in _NOT_THE_USERS:
            continue
        for code in _codes(function.__code__):
            left += [function.__globals__.get(name) for name in code.co_names]
            yield code


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code and those of the functions inside of it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes(one)


def _flat(constants: Iterable[object]) -> Iterator[object]:
    for one in constants:
        if isinstance(one, tuple | frozenset):
            yield from _flat(one)
        else:
            yield one
