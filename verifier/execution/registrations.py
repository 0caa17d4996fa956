"""The sharding rules that a process has registered with DTensor, so that they can be compared with another process's.

A rule that one process alone has is not what the others run. Functions do not compare across processes; what tells
them apart is where they are defined, and the values that they are bound to.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType

import torch
from torch.distributed.tensor.placement_types import Placement

from verifier.torch_internals.names import OpOverload
from verifier.torch_internals.ops import definition_of
from verifier.torch_internals.registries import keys_of_rules, registries_of_rules

__all__ = [
    "Lacking",
    "Registered",
    "Source",
    "as_option",
    "changes",
    "defining_modules",
    "definition_of_operator",
    "is_installed",
    "is_of_python",
    "is_of_the_user",
    "lacking",
    "module_of_op",
    "referring_modules",
    "registered_rules",
]

_KINDS = ("handler", "rule", "strategy", "strategy for one mesh dim", "key", "key for one mesh dim")
_DEEPEST, _MOST = 8, 2000
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_STANDARD, *_INSTALLED = (
    os.path.realpath(sysconfig.get_path(kind)) + os.sep for kind in ("stdlib", "purelib", "platlib")
)


@dataclass(frozen=True)
class Source:
    """Where a function or class is defined that is neither torch's nor ours. ``line`` is 0 for a class."""

    module: str
    file: str
    line: int
    name: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{self.name} of module {self.module}" + (f" ({place})" if self.file else "")


@dataclass(frozen=True)
class Registered:
    """What one op is run by: ``text`` is the same in each process that has the same; ``sources`` are of the user's."""

    text: str
    sources: tuple[Source, ...] = ()
    functions: tuple[object, ...] = field(default=(), compare=False, repr=False)


# ------------------------------------------------------------------------------------------------------ of this process
@dataclass
class _Read:
    """What was read last: the registries as lists, what each op had, and what came of it."""

    columns: list[list[object]] = field(default_factory=list)
    entries: dict[OpOverload, tuple[object, ...]] = field(default_factory=dict)
    rules: dict[str, Registered] = field(default_factory=dict)


_read = _Read()


def registered_rules() -> Mapping[str, Registered]:
    """Return what DTensor has in this process, by op; the same object as before if nothing was registered since.

    That takes some 20 microseconds.
    """
    registries = (*registries_of_rules(), *keys_of_rules())
    columns = [list(column) for registry in registries for column in (registry, registry.values())]
    if columns == _read.columns:  # which compares by identity first
        return _read.rules
    ops = dict.fromkeys(op for registry in registries_of_rules() for op in registry)
    entries = {op: tuple(registry.get(op) for registry in registries) for op in ops}
    rules = {}
    for op, entry in entries.items():
        before = _read.entries.get(op)
        same = before is not None and all(old is new for old, new in zip(before, entry, strict=True))
        rules[str(op)] = _read.rules[str(op)] if same else _registered(entry)
    if rules != _read.rules:
        _read.rules = rules
    _read.columns, _read.entries = columns, entries
    return _read.rules


def _registered(entry: Sequence[object]) -> Registered:
    described = [None if one is None else _Description(one) for one in entry]
    # what is torch's, and a rule of the user's takes its place (``let_new_rules_win``)
    for number, asked_first in ((1, 2), (1, 3), (2, 3)):
        one, other = described[number], described[asked_first]
        if one is not None and one.sources and other is not None and not other.sources:
            described[asked_first] = None
    if described[3] is not None and described[3].sources and described[5] is not None:
        described[4] = None
    if described[2] is described[3] is None:
        described[4:] = None, None  # DTensor makes keys for ops without strategies, as it decomposes them
    texts = [f"{kind} {one.text}" for kind, one in zip(_KINDS, described, strict=True) if one is not None]
    found = [one for one in described if one is not None]
    sources = tuple(dict.fromkeys(source for one in found for source in one.sources))
    functions = tuple({id(function): function for one in found for function in one.functions}.values())
    return Registered("; ".join(texts), sources, functions)


class _Description:
    """What a registered object is, as text without addresses, and the functions and classes that it is made of."""

    def __init__(self, value: object) -> None:
        self.sources: dict[Source, None] = {}
        self.functions: list[object] = []
        self._open: set[int] = set()
        self._left = _MOST
        self.text = self._text(value)

    def _text(self, value: object) -> str:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return repr(value)
        self._left -= 1
        if self._left < 0 or id(value) in self._open or len(self._open) > _DEEPEST:
            return "..."
        self._open.add(id(value))
        try:
            return self._parts(value)
        finally:
            self._open.discard(id(value))

    def _parts(self, value: object) -> str:
        match value:
            case FunctionType():
                return self._function(value)
            case MethodType():
                return f"{self._text(value.__func__)} of {self._text(value.__self__)}"
            case functools.partial():
                return f"partial({self._texts((value.func, value.args, value.keywords))})"
            case BuiltinFunctionType():
                return f"{value.__module__}.{value.__qualname__}"
            case type():
                return self._class(value)
            case ModuleType():
                return value.__name__
            case OpOverload() | torch.dtype() | torch.device() | slice() | range():
                return str(value)
            case Placement():
                return f"{type(value).__name__} {_ADDRESS.sub('', str(value))}"
            case torch.Tensor():
                return f"tensor of {value.dtype}, {list(value.shape)}"
            case list() | tuple():
                return f"[{self._texts(value)}]"
            case set() | frozenset():
                return f"{{{', '.join(sorted(map(self._text, value)))}}}"
            case dict():
                pairs = sorted((self._text(name), self._text(held)) for name, held in list(value.items()))
                return f"{{{', '.join(f'{name}: {held}' for name, held in pairs)}}}"
        wrapped = getattr(value, "__wrapped__", None)  # as what functools.cache makes has it
        if isinstance(wrapped, FunctionType):
            return f"{type(value).__qualname__} of {self._text(wrapped)}"
        return self._class(type(value)) + self._text(_state(value))

    def _texts(self, values: Iterable[object]) -> str:
        return ", ".join(map(self._text, values))

    def _function(self, function: FunctionType) -> str:
        self.functions.append(function)
        module = str(function.__globals__.get("__name__", ""))
        text = f"{module}.{function.__qualname__}"
        if is_of_the_user(module):
            file = _file_of(module, function)
            line = function.__code__.co_firstlineno
            self.sources[Source(module, file, line, function.__qualname__)] = None
            # a file is one module under one name here, and under another where it was named as a file
            same = file and os.path.realpath(function.__code__.co_filename) == file
            text = f"{function.__qualname__} ({file or module}:{line if same else '?'})"
            if not same or function.__name__ == "<lambda>":  # of which a line may have several
                text += f" {_digest(function.__code__)}"
        bound: list[object] = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        bound += [*(function.__defaults__ or ()), function.__kwdefaults__ or None]
        return text + (f" with {self._texts(bound)}" if any(one is not None for one in bound) else "")

    def _class(self, kind: type) -> str:
        if is_of_the_user(kind.__module__):
            self.functions.append(kind)
            file = _file_of(kind.__module__)
            self.sources[Source(kind.__module__, file, 0, kind.__qualname__)] = None
            return f"{kind.__qualname__} ({file or kind.__module__})"
        return f"{kind.__module__}.{kind.__qualname__}"


def _state(value: object) -> dict[str, object]:
    """Return what an object of a dataclass or of the user's own class holds, without what it has worked out of that.

    Others, such as loggers and locks, differ from process to process.
    """
    if is_dataclass(value):
        return {one.name: getattr(value, one.name, None) for one in fields(value)}
    if not is_of_the_user(type(value).__module__):
        return {}
    held = getattr(value, "__dict__", {})
    kept = (name for name in held if not isinstance(getattr(type(value), name, None), functools.cached_property))
    return {name: held[name] for name in kept}


def _is_filled(cell: object) -> bool:
    try:
        cell.cell_contents  # type: ignore[attr-defined]  # noqa: B018
    except ValueError:  # of a name that is not bound yet
        return False
    return True


def _digest(code: CodeType) -> str:
    """Return what tells code apart that no line of a file stands for, as what ``exec`` makes.

    Not of other functions: pytest changes the code of those that assert.
    """
    constants = [_digest(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    constants = ["{}" if one.startswith("frozenset") else one for one in constants]  # in the order of its hashes
    held = [code.co_code.hex(), *code.co_names, *constants]
    return hashlib.sha256("\0".join(held).encode(errors="surrogatepass")).hexdigest()[:12]


def is_of_the_user(module: str) -> bool:
    """Return whether a module is neither of torch, nor of Python itself, nor of the verifier.

    >>> [is_of_the_user(name) for name in ("my_rules", "torch.nn", "verifier.core", "functools", "strategies.rows")]
    [True, False, False, False, True]
    """
    top = module.partition(".")[0]
    return top not in ("torch", "verifier", "builtins") and (top == "__main__" or top not in sys.stdlib_module_names)


def is_installed(file: str) -> bool:
    """Return whether a file belongs to an installed package."""
    return os.path.realpath(file).startswith(tuple(_INSTALLED))


def is_of_python(file: str) -> bool:
    """Return whether a file belongs to Python itself."""
    return os.path.realpath(file).startswith(_STANDARD) and not is_installed(file)


def _file_of(module: str, function: FunctionType | None = None) -> str:
    """Return the file of a module, resolved; empty if it is in none."""
    held = function.__globals__ if function is not None else vars(sys.modules.get(module, ModuleType("")))
    file = held.get("__file__") or (function.__code__.co_filename if function is not None else "")
    return os.path.realpath(file) if file and os.path.isfile(file) else ""


# ----------------------------------------------------------------------------------------------------- of two processes
def changes(before: Mapping[str, Registered], after: Mapping[str, Registered]) -> dict[str, str]:
    """Return what became of the ops that were registered or taken back, as text; empty for what is not there now."""
    ops = [op for op in {**before, **after} if before.get(op) != after.get(op)]
    return {op: after[op].text if op in after else "" for op in ops}


@dataclass(frozen=True)
class Lacking:
    """An op that another process runs by other rules: ``ours`` is what this one has, ``theirs`` the text of its.

    ``untouched`` says that the other one has for it what torch has, be that nothing.
    """

    op: str
    ours: Registered | None
    theirs: str = ""
    untouched: bool = True


def lacking(
    ours: Mapping[str, Registered], torchs: Mapping[str, str], theirs: Mapping[str, str], allowed: Collection[str] = ()
) -> list[Lacking]:
    """Return the ops that another process has other rules for.

    Parameters
    ----------
    torchs
        What that process had before it ran anything of the user's.
    theirs
        What became of it since; see :func:`changes`.
    allowed
        Ops for which that process may have rules of the user's where this one has torch's own.
    """
    found = []
    for op in {**ours, **torchs, **theirs}:
        here = ours[op].text if op in ours else ""
        there = theirs.get(op, torchs.get(op, ""))
        if here == there or (op in allowed and here == torchs.get(op, "")):
            continue
        if op.startswith("prims.") and not (here and there) and not (op in ours and ours[op].sources):
            continue  # torch registers these itself, once its compiler is imported
        found.append(Lacking(op, ours.get(op), there, there == torchs.get(op, "")))
    return found


def defining_modules(found: Sequence[Lacking]) -> list[Source]:
    """Return a source in each module in which what is lacking is defined, in the order in which they were imported.

    The modules that define operators of the user's are among them: a module with a rule may rely on these.
    """
    sources = [source for one in found if one.ours is not None for source in one.ours.sources]
    sources += [source for one in found if one.ours is not None and (source := definition_of_operator(one.op))]
    return _in_order({source.module: source for source in reversed(sources)}.values())


def definition_of_operator(op: str) -> Source | None:
    """Return where the operator of a name, as ``mylib.my_op.default``, is defined, if a module of the user's does."""
    namespace, name, *overload = op.split(".")
    if namespace in ("aten", "prims"):
        return None
    try:
        return module_of_op(
            getattr(getattr(getattr(torch.ops, namespace), name), overload[0] if overload else "default")
        )
    except AttributeError:
        return None


def module_of_op(op: OpOverload) -> Source | None:
    """Return where an operator is defined, if that is in a module of the user's."""
    definition = definition_of(op)
    if isinstance(definition, FunctionType):
        return next(iter(_Description(definition).sources), None)
    if not isinstance(definition, str) or not os.path.isfile(definition):
        return None
    file = os.path.realpath(definition)
    named = (name for name in list(sys.modules) if is_of_the_user(name) and _file_of(name) == file)
    name = next(named, "")
    return Source(name, file, 0, name) if name else None


def referring_modules(found: Sequence[Lacking]) -> list[Source]:
    """Return the user's modules that name a function of what is lacking, and so may be what registers it."""
    wanted = {id(function) for one in found if one.ours is not None for function in one.ours.functions}
    sources = []
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or not is_of_the_user(name):
            continue
        file = _file_of(name)
        if not file or is_installed(file) or is_of_python(file):
            continue
        if any(id(held) in wanted for held in list(vars(module).values())):
            sources.append(Source(name, file, 0, name))
    return _in_order(sources)


def _in_order(sources: Iterable[Source]) -> list[Source]:
    order = {name: number for number, name in enumerate(list(sys.modules))}  # other threads may import meanwhile
    return sorted(sources, key=lambda source: order.get(source.module, len(order)))


def as_option(module: str, file: str, path: Sequence[str]) -> str:
    """Return what ``--import`` takes for a module: its name if ``path`` leads to it, else its file; empty if neither.

    Parameters
    ----------
    path
        Where modules are looked for, as ``sys.path``.
    """
    named = module != "__main__" and all(part.isidentifier() for part in module.split("."))
    found = _found(module, path) if named and file else ""
    return module if found and os.path.realpath(found) == file else file


def _found(module: str, path: Sequence[str]) -> str:
    """Return the file in which a process with ``path`` finds a module; empty if it does not."""
    folders: Sequence[str] | None = path
    spec = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        if folders is None:
            return ""
        spec = _spec(".".join(parts[:depth]), folders, top=depth == 1)
        if spec is None:
            return ""
        locations = spec.submodule_search_locations
        folders = None if locations is None else list(locations)
    return spec.origin or "" if spec is not None else ""


def _spec(name: str, folders: Sequence[str], top: bool) -> importlib.machinery.ModuleSpec | None:
    spec = importlib.machinery.PathFinder.find_spec(name, folders)
    if spec is None and top:
        for finder in _finders_of_installed_packages():
            spec = spec or finder(name, None)
    return spec


def _finders_of_installed_packages() -> Iterator[Callable[[str, None], importlib.machinery.ModuleSpec | None]]:
    """Yield the finders that editable installs add in every process; not those of pytest, which note what they find."""
    for finder in sys.meta_path:
        module = getattr(finder, "__module__", "") or ""
        if module.startswith("__editable__"):
            yield finder.find_spec
