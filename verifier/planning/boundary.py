"""What a stored call may reach: torch's ops, programs of installed families, and the command line's imports.

A file that is read back (a baseline, a record, a journal, a finding) is data. Before a call is made, its name is looked
up here among the loaded modules. A lookup imports nothing and runs nothing that the file chooses. Whether a callable
may be called depends on the callable itself. docs/explanations/trust.md describes the whole boundary.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType

import torch

from verifier.core.arguments import tensor_arguments
from verifier.core.case import MOST_RANKS, OpCase, Trial
from verifier.execution.imports import imported_module
from verifier.planning.families import installed_families
from verifier.torch_internals.names import CustomOpDef, OpOverload, OpOverloadPacket

__all__ = ["OutsideError", "declares", "needs_imports", "refusal"]

CallNames = Callable[[OpCase], Iterable[str]]

_declared: dict[str, CallNames] = {}


class OutsideError(ValueError):
    """A file names something to be called or imported that the command line did not."""


def declares(call: str, names: CallNames = lambda case: ()) -> None:
    """Declare that stored calls may name the program of an installed family at the dotted path ``call``.

    ``torch.ops.NAMESPACE`` stands for the ops of a namespace.

    Parameters
    ----------
    names
        Returns the dotted paths of all callables that the program's arguments name. Each has to be allowed, too. Raises
        a ValueError if an argument names anything else that is forbidden.
    """
    _declared[call] = names


# ------------------------------------------------------------------------------------------------------- what is asked
def refusal(trial: Trial, imports: Sequence[str] = (), most_ranks: int = MOST_RANKS) -> str:
    """Return why ``trial``, which comes from a file, is not run; empty if it may be.

    Parameters
    ----------
    imports
        The command line's imports, which have already run.
    most_ranks
        The largest number of ranks allowed.
    """
    case, mesh = trial.case, trial.mesh
    if mesh.world_size > most_ranks:
        return f"needs {mesh.world_size} ranks, at most {most_ranks} run here"
    if reason := _refused_call(case, imports):
        return reason
    tensors = len(tensor_arguments(case.args, case.kwargs))
    if len(trial.combination) != tensors:
        return f"places {len(trial.combination)} tensors, but its call has {tensors}"
    for placements in (*trial.combination, *(one for cotangents in trial.cotangents for one in cotangents)):
        if len(placements) != mesh.ndim:
            return f"has {len(placements)} placements of a tensor on mesh {mesh}"
    return ""


def needs_imports(named: Sequence[str], imports: Sequence[str]) -> list[str]:
    """Return the imports that a file names and the command line does not; the imported file may have moved since.

    >>> needs_imports(["rules.py", "mine.ops"], ["/home/me/rules.py"])
    ['mine.ops']
    """
    given = {*imports, *(_file_name(name) for name in imports)}
    return [name for name in named if name not in given and _file_name(name) not in given]


def _file_name(name: str) -> str:
    return name.rpartition("/")[2] if name.endswith(".py") else name


# ------------------------------------------------------------------------------------------------------------ the call
def _refused_call(case: OpCase, imports: Sequence[str]) -> str:
    """Return why the call of ``case``, or one that its arguments name, is refused; empty if all are allowed."""
    if reason := _refused_path(case.call, imports):
        return reason
    names = _declared.get(case.call)
    if names is None:
        return ""
    try:
        called = list(names(case))
    except (ValueError, TypeError, LookupError) as error:
        return f"has arguments that {case.call} does not take from a file: {error}"
    return next(filter(None, (_refused_path(path, imports) for path in called)), "")


def _refused_path(path: str, imports: Sequence[str]) -> str:
    """Return why the callable at a dotted path is refused; empty if it is allowed."""
    parts = path.split(".")
    if len(path) > 300 or not all(part.isascii() and part.isidentifier() for part in parts):
        return f"calls {path[:80]!r}, which is no dotted path"
    is_op = parts[:2] == ["torch", "ops"]
    found = _is_op(parts[2:], bool(imports)) if is_op else path in _functions_of_torch()
    if found or _is_imported(parts, imports) or _is_declared(path):
        return ""
    remedy = ""
    if is_op and len(parts) > 3 and parts[2] not in _NAMESPACES:
        remedy = "; needs --import with the file that defines it"
    elif len(parts) > 1 and parts[0] not in ("torch", "verifier", *sys.stdlib_module_names):
        remedy = f"; needs --import {'.'.join(parts[:-1])}"
    return f"calls {path}, which is no op of torch and no program of an installed family{remedy}"


@functools.cache
def _load_families() -> None:
    """Load the installed families, which declare their programs."""
    installed_families()


def _is_declared(path: str) -> bool:
    _load_families()
    return path in _declared


_NAMESPACES = ("aten", "prims")
"""Torch's namespaces whose ops map tensors to tensors. Its other ones load libraries, communicate, or read files."""


def _is_op(parts: list[str], imported: bool) -> bool:
    """Return whether ``torch.ops`` has an op of this name that takes a tensor, as ``["aten", "mm", "default"]``.

    Ops other than torch's were defined by an installed family or by an import.
    """
    if len(parts) not in (2, 3) or any(part.startswith("__") for part in parts[:1]):
        return False
    if not (imported or parts[0] in _NAMESPACES or _declared_namespace(parts[0])):
        return False
    found: object = getattr(torch.ops, parts[0], None)
    if isinstance(found, Callable):  # type: ignore[arg-type]  # torch.ops.load_library and the like are methods
        return False
    for part in parts[1:]:
        found = getattr(found, part, None)
    return _takes_tensors(found)


def _declared_namespace(name: str) -> bool:
    _load_families()
    return any(call == f"torch.ops.{name}" for call in _declared)


def _takes_tensors(op: object) -> bool:
    """Return whether an overload, or one of an op's overloads, takes a tensor that it does not only write to.

    This excludes ``aten::from_file``, which may create its file, and ``aten::save``.
    """
    if isinstance(op, OpOverloadPacket):
        return any(_takes_tensors(getattr(op, name)) for name in op.overloads())  # type: ignore[no-untyped-call]
    if not isinstance(op, OpOverload):
        return False
    return any("Tensor" in str(each.type) and not each.is_out for each in op._schema.arguments)


@functools.cache
def _functions_of_torch() -> frozenset[str]:
    """Return the dotted paths of torch's documented functions of tensors.

    These are the functions that tensor-like classes can override (``torch.overrides``), the functions of
    ``torch.nn.functional`` that are missing there, and names that aten has, too. So functions that load, save, compile
    or configure are excluded, and so are names that a module of torch merely imports.
    """
    overridable = {one for functions in torch.overrides.get_overridable_functions().values() for one in functions}
    found: set[str] = set()
    for module in (torch, torch.functional, torch.nn.functional, torch.linalg, torch.fft, torch.special):
        for name, value in vars(module).items():
            if not callable(value) or name.startswith("__") or isinstance(value, type):
                continue
            own = isinstance(value, FunctionType) and value.__module__ == module.__name__ == "torch.nn.functional"
            op = inspect.isbuiltin(value) and _takes_tensors(_aten(name))
            if (own and not name.startswith("_")) or op or (value in overridable and not isinstance(value, ModuleType)):
                found.add(f"{module.__name__}.{name}")
    for name in dir(torch.Tensor):
        value = getattr(torch.Tensor, name, None)
        if callable(value) and value in overridable:
            alike = _takes_tensors(_aten(name)) or f"torch.{name}" in found
            if alike or _is_operator(name):
                found.add(f"torch.Tensor.{name}")
    return frozenset(found)


def _aten(name: str) -> object:
    return None if name.startswith("__") and not name.endswith("__") else getattr(torch.ops.aten, name, None)


def _is_operator(name: str) -> bool:
    """Return whether ``name`` is the method of a Python operator, such as ``__add__``, ``__radd__`` or ``__iadd__``."""
    if not (name.startswith("__") and name.endswith("__")):
        return False
    return name in vars(operator) or (name[2] == "r" and f"__{name[3:]}" in vars(operator))


# --------------------------------------------------------------------------------------------- what was imported
def _is_imported(parts: list[str], imports: Sequence[str]) -> bool:
    """Return whether an imported module, or one of its submodules, defines the function at a dotted path."""
    for module, inner in _modules(imports):
        for cut in range(len(parts) - 1, 0, -1):
            name = ".".join(parts[:cut])
            if name == module.__name__ or (inner and name.startswith(f"{module.__name__}.")):
                holder = sys.modules.get(name)
                if holder is not None and _defines(holder, parts[cut:]):
                    return True
    return False


def _modules(imports: Sequence[str]) -> Iterator[tuple[ModuleType, bool]]:
    """Yield each imported module, and whether the import includes its submodules."""
    for name in imports:
        module = imported_module(name)
        if module is not None:
            yield module, module.__name__ == name


def _defines(module: ModuleType, parts: Sequence[str]) -> bool:
    """Return whether ``module`` itself defines the function at the end of a path of attributes."""
    holder: object = module
    for part in parts:
        if part.startswith("__") or not isinstance(holder, ModuleType | type):
            return False
        found = getattr(holder, part, None)
        bound = isinstance(found, MethodType | BuiltinMethodType) and found.__self__ is holder
        op = isinstance(found, OpOverload | OpOverloadPacket | CustomOpDef)
        if not (bound or op or getattr(found, "__module__", None) == module.__name__):
            return False
        holder = found
    return callable(holder)
