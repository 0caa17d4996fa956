"""Example calls of ops of one's own, declared in the file that ``--import`` names."""

from __future__ import annotations

import inspect
import itertools
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from hypothesis.strategies import SearchStrategy

from verifier.core.errors import SamplesError
from verifier.core.wording import did_you_mean, one_line
from verifier.execution.imports import module_as_written
from verifier.planning.drawing import draw_each
from verifier.planning.stand_ins import define_stand_in, function_of_autograd
from verifier.torch_internals.names import OpOverload, OpOverloadPacket

__all__ = [
    "MOST_EXAMPLES",
    "Example",
    "callable_of",
    "examples_of",
    "is_sampled",
    "module_of",
    "overload_named",
    "sampled_ops",
    "samples",
    "say_made_from_schema",
]

MOST_EXAMPLES = 16
"""So many examples of one function are taken."""

Maker = Callable[[], object]
_makers: dict[str, list[Maker]] = {}
"""The functions that give examples, by overload."""


@dataclass(frozen=True)
class Example:
    """The arguments of one call."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]


def samples(op: str | Callable[..., object]) -> Callable[[Maker], Maker]:
    """Return a decorator of a function that gives example calls of ``op``, from which all commands make their calls.

    The function takes no arguments. It yields tuples of arguments, or returns a list of them, or a Hypothesis generator
    that draws them. A dict at the end of a tuple has the keyword arguments; ``(args, kwargs)`` is taken too. Extents,
    and the values of tensors, are varied as far as the op accepts them.

    Parameters
    ----------
    op
        The overload, as ``"mylib::my_op"``, ``"mylib.my_op.default"`` or ``"torch.ops.mylib.my_op"``. Or a function of
        tensors that is no op, such as the body of a ``local_map``, or an ``autograd.Function``, for
        ``derive --target local-map``.

    Raises
    ------
    ValueError
        If no such op is registered, with the nearest name of the same library; or if a function has no name under which
        it can be imported.
    """
    if isinstance(op, str):
        name = str(overload_named(op))
    elif isinstance(op, OpOverload):
        name = str(op)
    else:
        name = stand_in_op(op)

    def declare(maker: Maker) -> Maker:
        _makers.setdefault(name, []).append(maker)
        return maker

    return declare


def overload_named(text: str) -> OpOverload:
    """Return the overload that a user named; of an op with one overload its name may be left out.

    For a function with samples, named by its path, and for the name of its stand-in, this is the stand-in. The path of
    an ``autograd.Function`` may end with its class.

    Raises
    ------
    ValueError
        If there is none.
    """
    for name in _functions:
        if text in (name, *_paths_of(name)):
            return _defined(name)
    if text.partition(".")[0] in {module_of(name).partition(".")[0] for name in _functions}:
        known = [path for name in _functions for path in _paths_of(name)]
        raise ValueError(f"no function {text} has samples{did_you_mean(text, known)}")
    parts = text.removeprefix("torch.ops.").replace("::", ".").split(".")
    if len(parts) not in (2, 3) or not all(part.isidentifier() for part in parts):
        raise ValueError(f"{text!r} does not name an op, as 'mylib::my_op' does")
    library = getattr(torch.ops, parts[0])
    try:
        packet = getattr(library, parts[1])
    except AttributeError:
        near = did_you_mean(parts[1], [*dir(library)])
        hint = near or ("" if parts[0] == "aten" else "; --import the file or module that defines it")
        raise ValueError(f"no op {text} is registered{hint}") from None
    assert isinstance(packet, OpOverloadPacket)
    overloads: list[str] = packet.overloads()  # type: ignore[no-untyped-call]
    name = parts[2] if len(parts) == 3 else "default" if "default" in overloads else overloads[0]
    if name not in overloads or (len(parts) == 2 and "default" not in overloads and len(overloads) > 1):
        raise ValueError(f"{text}: its overloads are {', '.join(overloads)}")
    overload = getattr(packet, name)
    assert isinstance(overload, OpOverload)
    return overload


# ----------------------------------------------------------------------------------------------------------- functions
_STAND_INS = "functions_with_samples"
"""The namespace of the ops that stand for functions."""
_functions: dict[str, Callable[..., object]] = {}
"""The functions of which samples were declared, by the overload that stands for each."""


def stand_in_op(function: Callable[..., object]) -> str:
    """Return the name of the overload that stands for a function of tensors; it is defined when it is asked for.

    Raises
    ------
    ValueError
        If the function cannot be imported by a name.
    """
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        function = function.apply
    path = _path_of(function)
    if not callable(function) or not all(part.isidentifier() for part in path.split(".")):
        raise ValueError(f"verifier.samples({function!r}): give the name of an op, or a function of a module")
    name = f"{_STAND_INS}.{path.replace('.', '_')}.default"
    _functions[name] = function
    return name


def callable_of(op: str) -> str:
    """Return the path of the function that an overload stands for; empty if it stands for none."""
    function = _functions.get(op)
    return "" if function is None else _path_of(function)


def _paths_of(op: str) -> tuple[str, ...]:
    """Return the paths by which a user may name a function; an ``autograd.Function`` may go without ``.apply``."""
    path = callable_of(op)
    return (path,) if function_of_autograd(_functions[op]) is None else (path, path.removesuffix(".apply"))


def module_of(op: str) -> str:
    """Return the module of the function that an overload stands for; empty if it stands for none."""
    function = _functions.get(op)
    return "" if function is None else _module_of(function)


def _path_of(function: object) -> str:
    of_autograd = function_of_autograd(function)
    name = getattr(function, "__qualname__", "") if of_autograd is None else f"{of_autograd.__qualname__}.apply"
    return f"{_module_of(function)}.{name}"


def _module_of(function: object) -> str:
    return module_as_written(str(getattr(function_of_autograd(function) or function, "__module__", "")))


def _defined(name: str) -> OpOverload:
    """Return the op that stands for a function, defined as its first examples are."""
    namespace, packet, _ = name.split(".")
    library = getattr(torch.ops, namespace)
    if not hasattr(library, packet):
        examples = [(example.args, example.kwargs) for example in examples_of(name)]
        define_stand_in(f"{namespace}::{packet}", _functions[name], examples, f"samples of {callable_of(name)}")
    overload = getattr(library, packet).default
    assert isinstance(overload, OpOverload)
    return overload


def sampled_ops() -> tuple[str, ...]:
    """Return the overloads of which examples were declared, sorted; what stands for a function is none of them."""
    return tuple(sorted(name for name in _makers if name not in _functions))


def is_sampled(op: str) -> bool:
    """Return whether examples of an overload were declared, or of the function that it stands for."""
    return op in _makers


def examples_of(op: str, seed: int = 0) -> list[Example]:
    """Return the examples that were declared of an overload, the same ones for the same seed.

    Raises
    ------
    SamplesError
        If a function raises, or gives something else than tuples of arguments, or nothing.
    """
    found: list[Example] = []
    for maker in _makers.get(op, ()):
        where = f"samples of {op} by {getattr(maker, '__qualname__', maker)}"
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            try:
                drawn = [_example(one, op) for one in _made(maker, seed)]
                if not drawn:
                    raise SamplesError("it gave no example")
            except SamplesError as error:
                raise SamplesError(f"{where}: {error}{_begins(maker)}") from error
            except Exception as error:
                raised = f"{type(error).__name__}: {error}{_at(maker, error)}"
                raise SamplesError(one_line(f"{where}: it raised {raised}")) from error
        found += drawn
    return found


def _made(maker: Maker, seed: int) -> list[object]:
    made = maker()
    if isinstance(made, SearchStrategy):
        return _drawn(made, seed)
    if isinstance(made, Iterable) and not isinstance(made, str | bytes | torch.Tensor | Mapping):
        return list(itertools.islice(made, MOST_EXAMPLES))
    raise SamplesError(f"it has to yield tuples of arguments, and returned a {type(made).__name__}")


def _begins(maker: Maker) -> str:
    """Return where ``maker`` begins, as text."""
    code = getattr(inspect.unwrap(maker), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""


def _at(maker: Maker, error: Exception) -> str:
    """Return the innermost line of the traceback that is in the file of ``maker``, as text."""
    file = getattr(getattr(maker, "__code__", None), "co_filename", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({file}:{lines[-1]})" if lines else ""


def say_made_from_schema(op: str) -> None:
    """Warn that calls of an op were made from its schema alone."""
    warnings.warn(
        f"{op}: its calls were made from its schema alone; give better ones with @verifier.samples "
        "(docs/guides/samples.md)",
        stacklevel=1,
    )


def _example(given: object, op: str) -> Example:
    if not isinstance(given, tuple):
        raise SamplesError(f"{_brief(given)} is no tuple of arguments; write (x,) for a single one")
    if given and isinstance(given[-1], Mapping):
        args = given[:-1]
        if len(args) == 1 and isinstance(args[0], tuple) and not _takes_a_list_first(op):
            (args,) = args
        return Example(tuple(args), dict(given[-1]))
    return Example(given, {})


def _takes_a_list_first(op: str) -> bool:
    """Return whether a tuple may be the first argument of an op, so that it is not the tuple of the arguments."""
    arguments = overload_named(op)._schema.arguments
    return bool(arguments) and not arguments[0].kwarg_only and "List[" in str(arguments[0].type)


def _brief(given: object) -> str:
    return f"a {type(given).__name__}" if isinstance(given, torch.Tensor) else repr(given)[:60]


def _drawn(generator: SearchStrategy[object], seed: int) -> list[object]:
    """Return what Hypothesis draws from ``generator`` with a fixed seed; nothing is stored or shrunk."""
    drawn: list[object] = []
    draw_each(generator, seed, MOST_EXAMPLES, drawn.append)
    return drawn
