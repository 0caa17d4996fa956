"""torch's OpInfo database, and calls captured from it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.abc
import logging
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "capture_calls",
    "opinfo_entries",
    "opinfo_samples",
    "opinfo_sizes",
]

_COMPILER_UTILITIES = "torch._inductor.utils"


@functools.cache
def opinfo_entries() -> tuple[Any, ...]:
    """Return torch's own descriptions of its ops, with generators of arguments: ``op_db`` and the foreach lists.

    The first call imports torch's test utilities, which takes about a second.
    """
    db = _database()
    foreach = ("unary", "binary", "pointwise", "reduce", "other")
    return (*db.op_db, *(entry for kind in foreach for entry in getattr(db, f"foreach_{kind}_op_db")))


@functools.cache
def _database() -> ModuleType:
    """Return the module of the database, loaded without torch's compiler.

    ``torch.testing._internal.common_device_type`` loads the compiler for one list of names, and that takes more than a
    third of the time. A module with that list stands in while the database is loaded. If a version of torch needs
    more of the compiler, the database is loaded with it.
    """
    name = "torch.testing._internal.common_methods_invocations"
    # to call an op under a dispatch mode, as a remedy has one, loads the compiler while the stand-in is there
    with _disable_current_modes(), _without_notice_of_cuda(), _without_references(), _without_deep_copies():
        return _loaded(name)


@contextlib.contextmanager
def _without_notice_of_cuda() -> Iterator[None]:
    """Silence a line that a build of torch with CUDA logs if there is no GPU: nothing is compiled for one here."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _without_deep_copies() -> Iterator[None]:
    """Have each description keep its arguments without copying what they hold, which takes half of the time.

    Torch copies them for the descriptions of its reference functions, which are made from those of ops. A process that
    runs tests may use these, and gets the copies.
    """
    if "pytest" in sys.modules:
        yield
        return
    deep = dataclasses.asdict

    def shallow(info: Any) -> dict[str, Any]:
        return {field.name: getattr(info, field.name) for field in dataclasses.fields(info)}

    dataclasses.asdict = shallow  # type: ignore[assignment]
    try:
        yield
    finally:
        dataclasses.asdict = deep
        if (core := sys.modules.get("torch.testing._internal.opinfo.core")) is not None:
            core.asdict = deep  # type: ignore[attr-defined]


class _Hidden(importlib.abc.MetaPathFinder):
    """A finder that calls packages missing, whether they are installed or not."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> None:
        if fullname.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"no module named {fullname!r}", name=fullname)


@contextlib.contextmanager
def _without_references() -> Iterator[None]:
    """Hide packages of which torch's descriptions only take reference functions and marks.

    Loading SciPy takes longer than all the rest of the database. Neither changes which ops there are, nor their
    arguments. A process that runs tests may use torch's test utilities itself, and they remember what was there; there
    nothing is hidden.
    """
    if "pytest" in sys.modules:
        yield
        return
    hidden = _Hidden([name for name in ("pytest", "scipy") if name not in sys.modules])
    sys.meta_path.insert(0, hidden)
    try:
        yield
    finally:
        sys.meta_path.remove(hidden)


def _loaded(name: str) -> ModuleType:
    if _COMPILER_UTILITIES in sys.modules:
        return importlib.import_module(name)
    stand_in = ModuleType(_COMPILER_UTILITIES)
    stand_in.GPU_TYPES = ["cuda", "mps", "xpu", "mtia"]  # type: ignore[attr-defined]
    sys.modules[_COMPILER_UTILITIES] = stand_in
    try:
        return importlib.import_module(name)
    except ImportError:
        pass
    finally:
        if sys.modules.get(_COMPILER_UTILITIES) is stand_in:
            del sys.modules[_COMPILER_UTILITIES]
    return importlib.import_module(name)


@functools.cache
def _opinfo_modules() -> list[ModuleType]:
    from torch.testing._internal.opinfo import definitions

    db = _database()

    names = [module.name for module in pkgutil.iter_modules(definitions.__path__)]
    return [db, *(importlib.import_module(f"{definitions.__name__}.{name}") for name in names)]


@contextlib.contextmanager
def opinfo_sizes(constants: Mapping[str, int], foreach: Sequence[tuple[int, ...]]) -> Iterator[None]:
    """Let torch's generators of arguments use other sizes inside the block.

    Parameters
    ----------
    constants
        Values of the constants that the generators use: S, M, L, XS.
    foreach
        Shapes of the tensors in each list of a foreach op; torch itself only uses square ones.
    """
    from torch.testing import make_tensor

    db = _database()

    def foreach_tensors(
        info: object, device: str, dtype: torch.dtype, count: int, **options: Any
    ) -> list[torch.Tensor]:
        kept = {name: options[name] for name in ("low", "high", "requires_grad") if name in options}
        return [make_tensor(foreach[i % len(foreach)], dtype=dtype, device=device, **kept) for i in range(count)]

    replaced: list[tuple[Any, str, object]] = []
    try:
        for module in _opinfo_modules():
            for name, value in constants.items():
                if isinstance(getattr(module, name, None), int):
                    replaced.append((module, name, getattr(module, name)))
                    setattr(module, name, value)
        replaced.append((db, "sample_inputs_foreach", vars(db)["sample_inputs_foreach"]))
        setattr(db, "sample_inputs_foreach", foreach_tensors)  # noqa: B010
        yield
    finally:
        for module, name, old in reversed(replaced):
            setattr(module, name, old)


def opinfo_samples(entry: Any, dtype: torch.dtype, *, requires_grad: bool) -> Iterator[Any]:
    """Return the sample inputs that ``entry`` generates, without torch's seeding, which depends on the running test."""
    options = {"num_input_tensors": [2]} if entry.name.startswith("_foreach") else {}
    # entry.sample_inputs seeds by the running test, and walks the stack to find that test for every sample
    samples: Iterator[Any] = iter(entry.sample_inputs_func(entry, "cpu", dtype, requires_grad, **options))
    return samples


_EMPTY = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
"""Ops that return uninitialised memory. Captured values would differ from process to process; the noise of rrelu when
it is not training is such a value."""


class _Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(
        self, wanted: Callable[[OpOverload], bool], largest: int, calls: list[tuple[OpOverload, Any, Any]]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wanted, self.largest, self.calls = wanted, largest, calls

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise torch loads its compiler, and wraps the next method so that it is not compiled."""
        return False

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.wanted(func):
            values = [*args, *kwargs.values()]
            # aten has no deeper nesting; pytree would take most of the time
            flat = [leaf for value in values for leaf in (value if isinstance(value, list | tuple) else (value,))]
            tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
            if tensors and all(self._plain(tensor) for tensor in tensors):
                # copied now, since a later call may write into them
                copies = tuple(map(_plain_copies, args)), {name: _plain_copies(v) for name, v in kwargs.items()}
                self.calls.append((func, *copies))
        result = func(*args, **kwargs)
        if func.overloadpacket.__name__ in _EMPTY:
            result.zero_()
        return result

    def _plain(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.layout == torch.strided
            and tensor.device.type == "cpu"
            and not tensor.is_quantized
            and tensor.numel() <= self.largest
        )


def _plain_copies(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return type(value)(map(_plain_copies, value)) if isinstance(value, list | tuple) else value


@contextlib.contextmanager
def capture_calls(
    wanted: Callable[[OpOverload], bool], largest: int
) -> Iterator[list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]]]:
    """Collect the calls of overloads inside the block that ``wanted`` accepts, with copies of their tensors.

    A call is left out if it has no tensor, a tensor of more than ``largest`` elements, or one that is not plain
    (sparse, quantized, on another device). The copies are contiguous. Uninitialised memory is filled with 0.
    """
    calls: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]] = []
    with _Capture(wanted, largest, calls):
        yield calls
