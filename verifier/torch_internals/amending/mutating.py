"""Other code for functions that DTensor decides with, put into the functions that live and taken out again."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops import single_dim_strategy, utils

from verifier.torch_internals.amending.propagation import rule_function
from verifier.torch_internals.amending.registrations import edited
from verifier.torch_internals.caches import clear_caches
from verifier.torch_internals.registries import registries_of_rules

__all__ = [
    "NotInstallableError",
    "differently_keyed",
    "exchanged_code",
    "files_of_torchs_rules",
    "is_of_torch",
    "key_text",
    "keys_of",
    "ruled_like",
    "rules_of_siblings",
]

_NAMES = {"Partial": Partial, "Replicate": Replicate, "Shard": Shard}


class NotInstallableError(ValueError):
    """The new code does not fit the function that is to have it."""


def files_of_torchs_rules() -> tuple[str, ...]:
    """Return the files of torch that have strategies for ops, and what strategies share."""
    _, rules, strategies, single = registries_of_rules()
    folder = os.path.dirname(os.path.realpath(utils.__file__))
    functions = (rule_function(op) for registry in (rules, strategies, single) for op in registry)
    named = {os.path.realpath(one.__code__.co_filename) for one in functions if isinstance(one, FunctionType)}
    own = {file for file in named if os.path.dirname(file) == folder}
    return tuple(sorted(own | {os.path.realpath(str(module.__file__)) for module in (utils, single_dim_strategy)}))


def is_of_torch(file: str) -> bool:
    """Return whether a file is torch's own and has no strategies for ops: it cannot be imported once more."""
    folder = os.path.dirname(os.path.realpath(torch.__file__))
    real = os.path.realpath(file)
    return real.startswith(folder + os.sep) and real not in files_of_torchs_rules()


@functools.cache
def _functions() -> dict[str, dict[CodeType, list[FunctionType]]]:
    """Return the functions that live, by file and code; closures that were made on import are among them."""
    gc.unfreeze()
    found: dict[str, dict[CodeType, list[FunctionType]]] = {}
    for one in gc.get_objects():
        if type(one) is FunctionType:
            found.setdefault(one.__code__.co_filename, {}).setdefault(one.__code__, []).append(one)
    gc.freeze()
    return {os.path.realpath(file): functions for file, functions in found.items()}


def _alive(file: str, codes: Mapping[CodeType, CodeType]) -> list[tuple[FunctionType, CodeType]]:
    """Return the functions of ``file`` that have one of the old codes, each with its new code."""
    return [(one, new) for old, new in codes.items() for one in _functions().get(file, {}).get(old, ())]


@contextlib.contextmanager
def exchanged_code(file: str, codes: Mapping[CodeType, CodeType]) -> Iterator[None]:
    """Let the functions of ``file`` run other code inside the block, whoever calls them.

    A function keeps its identity, so it need not be registered again, and helpers change for all that call them.

    Parameters
    ----------
    codes
        The new code of a function by the old one, as both are compiled from the file.

    Raises
    ------
    NotInstallableError
        If no function that lives has the old code, or the new one has other free variables.
    """
    functions = _alive(file, codes)
    if not functions:  # the file may have been imported since functions were looked for
        _functions.cache_clear()
        functions = _alive(file, codes)
    if not functions:
        raise NotInstallableError("no function that lives has this code")
    named = [one.__globals__ for one, _ in functions]
    added = [(names, name) for names in named[:1] for name in _NAMES if name not in names]
    kept = [(one, one.__code__) for one, _ in functions]
    try:
        for names, name in added:
            names[name] = _NAMES[name]
        for one, new in functions:
            try:
                one.__code__ = new
            except ValueError as error:
                raise NotInstallableError(str(error)) from error
        clear_caches()
        yield
    finally:
        for one, old in kept:
            one.__code__ = old
        for names, name in added:
            del names[name]
        clear_caches()


# ------------------------------------------------------------------------------------------------------ registrations
def keys_of(op: OpOverload) -> dict[str, dict[str, Any]]:
    """Return smaller keys for DTensor's cache of ``op``, by a description; each is what one omission makes of it."""
    info = _info_of(op)
    if info is None:
        return {}
    smaller: dict[str, dict[str, Any]] = {}
    arguments = [one for one in op._schema.arguments if not one.kwarg_only]
    if info.static_argnum < len(arguments):
        smaller[f"static_argnum={info.static_argnum + 1}"] = {"static_argnum": info.static_argnum + 1}
        smaller["static_argnum=100"] = {"static_argnum": 100}
    for left_out in info.static_kwargkey or ():
        rest = [name for name in info.static_kwargkey or () if name != left_out]
        smaller[f"static_kwargkey={rest}"] = {"static_kwargkey": rest or None}
    return smaller


def key_text(op: OpOverload) -> str:
    """Return what the key of DTensor's cache has of the arguments of ``op`` that are no tensors."""
    info = _info_of(op)
    return "" if info is None else f"static_argnum={info.static_argnum}, static_kwargkey={info.static_kwargkey}"


def _info_of(op: OpOverload) -> RuntimeSchemaInfo | None:
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    found = propagator.op_to_schema_info.get(op) or propagator.op_to_schema_info_for_single_dim_strategy.get(op)
    return found if isinstance(found, RuntimeSchemaInfo) else None


@contextlib.contextmanager
def differently_keyed(op: OpOverload, changes: Mapping[str, Any]) -> Iterator[None]:
    """Let the key of DTensor's cache for ``op`` differ by ``changes``, of :func:`keys_of`."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    infos = propagator.op_to_schema_info, propagator.op_to_schema_info_for_single_dim_strategy
    with contextlib.ExitStack() as stack:
        for one in infos:
            if (info := one.get(op)) is not None:
                fields = {name: getattr(info, name) for name in ("static_argnum", "static_kwargkey", "needs_pytree")}
                stack.enter_context(edited(one, op, RuntimeSchemaInfo(**{**fields, **changes})))
        stack.callback(clear_caches)
        clear_caches()
        yield


@functools.cache
def rules_of_siblings() -> dict[OpOverload, tuple[OpOverload, ...]]:
    """Return for each op one op of each other table, for which the same function makes the rules.

    Only ops with the same number of tensors count: an entry in the wrong table is a mistake that people make.
    """
    makers: dict[object, dict[str, list[OpOverload]]] = {}
    for op, info in registries_of_rules()[3].items():
        maker = getattr(info.func, "__code__", info.func), _tensors(op)
        makers.setdefault(maker, {}).setdefault(_bound(info.func), []).append(op)
    return {
        op: tuple(others[0] for other, others in tables.items() if other != bound)
        for tables in makers.values()
        for bound, ops in tables.items()
        for op in ops
    }


def _bound(function: Any) -> str:
    """Return what a function is bound to, as text."""
    bound = [*_cells(function), *(getattr(function, "__defaults__", None) or ())]
    return repr([one for one in (*bound, *(cell for one in bound for cell in _cells(one))) if not callable(one)])


def _cells(function: Any) -> list[object]:
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def _tensors(op: OpOverload) -> tuple[str, ...]:
    return tuple(str(one.type) for one in op._schema.arguments if "Tensor" in str(one.type))


@contextlib.contextmanager
def ruled_like(op: OpOverload, other: OpOverload) -> Iterator[None]:
    """Let DTensor decide on ``op`` by the rules of ``other``, both strategies for one mesh dim."""
    tables = registries_of_rules()[3]
    with contextlib.ExitStack() as stack:
        stack.enter_context(edited(tables, op, tables[other]))
        stack.callback(clear_caches)
        clear_caches()
        yield
