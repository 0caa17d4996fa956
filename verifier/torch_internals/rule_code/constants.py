"""What stands in the code of rules and ops of the user's: the numbers and texts with which they compare arguments."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import NamedTuple

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.distributed.tensor import DTensor

from verifier.torch_internals.ops import definition_of
from verifier.torch_internals.registries import registries_of_rules

__all__ = [
    "asks_for_inference_mode",
    "asks_for_world",
    "codes_of_rule",
    "constants_of_op",
    "constants_of_rule",
    "kinds_asked_for",
    "may_follow_hashes",
    "names_of_mesh_dims",
    "names_strided_shards",
    "reads_strides",
]

_MOST_ENTRIES = 64
"""A larger table in a module of the user's is no list of constants."""
_NOT_THE_USERS = ("torch", "verifier")
_ORDERED = (*_NOT_THE_USERS, "builtins", "typing", "math", "operator", "functools", "itertools", "collections", "numpy")
"""Packages with nothing that makes a rule follow hashes; the sets of builtins are looked for by their names."""
_BY_HASH = {
    "set", "frozenset", "hash", "id", "__hash__", "union", "intersection", "difference", "symmetric_difference", "keys",
    "environ", "getenv", "getattr", "eval", "exec", "globals", "__dict__", "vars",
}  # fmt: skip
"""Names in code that may follow hashes, or that may stand for others."""
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.Size, OpOverload, OpOverloadPacket)


def constants_of_rule(op: OpOverload) -> frozenset[int | float | str]:
    """Return the numbers and texts in the code of the rule of ``op``, and of the user's functions that it names."""
    return _constants(_rule_of(op))


def constants_of_op(op: OpOverload) -> frozenset[int | float | str]:
    """Return the numbers and texts in the code of ``op``, an op of the user's, and of the functions that it names."""
    return _constants(definition_of(op))


def codes_of_rule(op: OpOverload) -> tuple[CodeType, ...]:
    """Return the code of the rule of ``op``, as far as it is the user's, and of the user's functions that it names."""
    return tuple(code for part in _parts_of(_rule_of(op)) for code in part.codes)


def may_follow_hashes(op: OpOverload) -> bool:
    """Return whether code of the user's about ``op`` may go through a set, or ask for a hash, which ranks differ in.

    Code that cannot be read may do so.
    """
    _, rules, strategies, single = registries_of_rules()
    handler = DTensor._op_dispatcher._custom_op_handlers.get(op)
    rule = single[op].func if op in single else strategies.get(op) or rules.get(op)
    seen: set[object] = set()
    return any(_follows_hashes(one, seen) for one in (rule, handler, definition_of(op)) if one is not None)


def _follows_hashes(function: object, seen: set[object]) -> bool:
    if isinstance(function, partial):
        return any(_follows_hashes(one, seen) for one in (function.func, *function.args, *function.keywords.values()))
    if isinstance(function, _PLAIN) or id(function) in seen:
        return False
    seen.add(id(function))
    if getattr(function, "__module__", "").partition(".")[0] in _ORDERED:  # which may call a function of the user's
        return any(_follows_hashes(one.cell_contents, seen) for one in getattr(function, "__closure__", None) or ())
    if isinstance(function, ModuleType):
        return function.__name__.partition(".")[0] not in _ORDERED
    if isinstance(function, list | tuple | dict):
        return any(
            _follows_hashes(one, seen) for one in (function.values() if isinstance(function, dict) else function)
        )
    if isinstance(function, MethodType):
        return _follows_hashes(function.__func__, seen)
    if not isinstance(function, FunctionType):
        return True
    named: list[object] = []
    for code in _codes(function.__code__):
        if not _BY_HASH.isdisjoint(code.co_names) or any(isinstance(one, frozenset) for one in code.co_consts):
            return True
        if any(one.opname.startswith("BUILD_SET") for one in dis.get_instructions(code)):
            return True
        named += [function.__globals__[name] for name in code.co_names if name in function.__globals__]
    named += [cell.cell_contents for cell in function.__closure__ or ()]
    named += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return any(_follows_hashes(one, seen) for one in (*named, getattr(function, "__wrapped__", None)))


def reads_strides(op: OpOverload) -> bool:
    """Return whether the rule of ``op``, or a function of the user's that it names, names anything like strides."""
    return any(part in name for name in _names_of_rule(op) for part in _OF_MEMORY)


def asks_for_inference_mode(op: OpOverload) -> bool:
    """Return whether the rule of ``op``, or a function of the user's that it names, asks for the inference mode."""
    return "is_inference_mode_enabled" in _names_of_rule(op)


def asks_for_world(op: OpOverload) -> bool:
    """Return whether the rule of ``op``, or a function of the user's that it names, asks which ranks there are."""
    return not _OF_THE_WORLD.isdisjoint(_names_of_rule(op))


def kinds_asked_for(op: OpOverload) -> frozenset[str]:
    """Return ``is_floating_point`` and ``is_complex`` if the code of ``op``, one of the user's, asks for that, and
    ``dtype`` if its rule does: they are for tensors of other kinds than those of its examples, too."""
    named = frozenset(name for part in _parts_of(definition_of(op)) for name in part.names)
    return (named & {"is_floating_point", "is_complex"}) | (_names_of_rule(op) & {"dtype"})


def names_strided_shards(op: OpOverload) -> bool:
    """Return whether the rule of ``op``, or a function of the user's that it names, names strided shards."""
    return "_StridedShard" in _names_of_rule(op)


def names_of_mesh_dims(op: OpOverload) -> list[str] | None:
    """Return the texts that the rule of ``op`` may compare with names of mesh dims, the shortest first.

    None if neither the rule nor a function of the user's that it names looks at names of mesh dims.
    """
    reading = [part for part in _parts_of(_rule_of(op)) if "mesh_dim_names" in part.names]
    texts = {one for part in reading for one in part.constants if isinstance(one, str) and one.isidentifier()}
    return sorted(texts - _NO_NAMES, key=lambda one: (len(one), one)) if reading else None


_NO_NAMES = {"sum", "avg", "min", "max", "product", "tensor_meta", "redistribute_cost", "input_specs", "output_specs"}
"""Texts that rules need for other things."""
_OF_THE_WORLD = {"get_world_size", "get_rank", "get_process_group_ranks", "is_initialized", "WORLD"}
_OF_MEMORY = ("strid", "contig", "memory_format", "is_dense", "overlap")


def _rule_of(op: OpOverload) -> object:
    _, rules, strategies, single = registries_of_rules()
    return single[op].func if op in single else strategies.get(op) or rules.get(op)


def _names_of_rule(op: OpOverload) -> frozenset[str]:
    return frozenset(name for part in _parts_of(_rule_of(op)) for name in part.names)


def _constants(function: object) -> frozenset[int | float | str]:
    return frozenset(one for part in _parts_of(function) for one in part.constants)


class _Part(NamedTuple):
    """One function: its code, the names in it, and its constants, also those of its module that it names."""

    codes: tuple[CodeType, ...]
    names: frozenset[str]
    constants: frozenset[int | float | str]


def _parts_of(function: object) -> Iterator[_Part]:
    """Yield a function, and the user's functions that it names."""
    seen: set[FunctionType] = set()
    left = [function]
    bound: list[object] = []
    while left:
        function = left.pop()
        if isinstance(function, partial):
            left += [function.func, *function.args, *function.keywords.values()]
        elif isinstance(function, MethodType):
            bound.append(function.__self__)
            function = function.__func__
        elif not isinstance(function, FunctionType | type):
            bound.append(function)
            function = vars(type(function)).get("__call__")
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        held = [_content(cell) for cell in function.__closure__ or ()]
        left += [*held, getattr(function, "__wrapped__", None)]
        if str(function.__globals__.get("__name__")).partition(".")[0] in _NOT_THE_USERS:
            continue
        codes = [*_codes(function.__code__)]
        names = frozenset(name for code in codes for name in code.co_names)
        named = [function.__globals__.get(name) for name in sorted(names)]
        left += named
        attributes = [one for owner in (*held, *named, *bound) for one in _attributes(owner, names)]
        written = [one for code in codes for one in code.co_consts]
        values = (*written, *held, *named, *attributes, *(function.__defaults__ or ()))
        yield _Part(tuple(codes), names, frozenset(one for one in _flat(values) if isinstance(one, int | float | str)))


def _attributes(owner: object, names: frozenset[str]) -> list[object]:
    """Return the attributes, of those that are named, of a module, a class or an object of the user's."""
    kind = owner if isinstance(owner, type | ModuleType) else type(owner)
    module = kind.__name__ if isinstance(kind, ModuleType) else kind.__module__
    if module.partition(".")[0] in _ORDERED:
        return []
    held = {**vars(type(owner)), **getattr(owner, "__dict__", {})}
    return [held[name] for name in sorted(names) if name in held]


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is filled later
        return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code and those of the functions inside of it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes(one)


def _flat(constants: Iterable[object]) -> Iterator[object]:
    for one in constants:
        if isinstance(one, dict) and len(one) <= _MOST_ENTRIES:
            yield from _flat(one.values())
        elif isinstance(one, tuple | list | set | frozenset) and len(one) <= _MOST_ENTRIES:
            yield from _flat(one)
        else:
            yield one
