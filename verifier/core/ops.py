"""Facts about an op, read from its schema."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from verifier.core.case import OpCase
from verifier.core.wording import NO_SAMPLES
from verifier.torch_internals.names import OpOverload, pytree

__all__ = [
    "argument_names",
    "has_opaque_results",
    "is_users",
    "is_view",
    "of_ones_own",
    "opaque_results",
    "parameter_names",
    "promises_strides",
    "resolve",
    "stand_in_of",
    "stands_in",
    "with_written",
    "writes_out",
    "written_arguments",
]


@functools.cache
def resolve(path: str) -> Callable[..., object]:
    """Return the callable at a dotted path, as ``torch.nn.functional.embedding`` or ``torch.ops.aten.mm.default``.

    Raises
    ------
    ValueError
        If there is no such callable.
    """
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            target: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        try:
            for part in parts[cut:]:
                target = getattr(target, part)
        except AttributeError as error:
            raise ValueError(f"{path!r}: {error}") from error
        if not callable(target):
            raise ValueError(f"{path!r} is a {type(target).__name__}, not a callable")
        return target
    raise ValueError(f"no module in {path!r} can be imported")


_stand_ins: dict[str, str] = {}


def stands_in(op: str, path: str) -> None:
    """Declare that importing the module of ``path`` gives the overload ``op`` a kernel for the CPU, which torch lacks.

    The object at ``path`` is the overload itself.
    """
    _stand_ins[op] = path


def stand_in_of(op: str) -> str:
    """Return the path that :func:`stands_in` declared for the overload ``op``; empty if there is none."""
    return _stand_ins.get(op, "")


def is_users(op: str) -> bool:
    """Return whether ``op`` names an overload of another library than torch's own.

    >>> is_users("mylib.scale.default"), is_users("aten.mul.Tensor"), is_users("composite.copied")
    (True, False, False)
    """
    namespace, *rest = op.split(".")
    return len(rest) == 2 and namespace not in ("aten", "prims")


def of_ones_own(pattern: str, known: Iterable[str]) -> str:
    """Return what to say of an unknown op whose namespace is none of torch's; empty for other patterns.

    Parameters
    ----------
    known
        The names of ops and families that a pattern may match.
    """
    namespace, _, name = pattern.removeprefix("torch.ops.").replace("::", ".").partition(".")
    if not name or not namespace.isidentifier() or namespace in ("aten", "prims"):
        return ""
    if hasattr(getattr(torch.ops, namespace), name.partition(".")[0]):
        return f"{pattern} {NO_SAMPLES}"
    if any(one.startswith(f"{namespace}.") for one in known):
        return ""
    return f"no op {pattern} is registered; --import the file or module that defines it"


_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


def with_written(returned: Sequence[_Tensor], case: OpCase, inputs: Sequence[_Tensor]) -> list[_Tensor]:
    """Return the results, followed by the tensor arguments that the op writes to and does not return."""
    written = [inputs[number] for number in written_arguments(case)]
    return [*returned, *(tensor for tensor in written if not any(tensor is other for other in returned))]


def written_arguments(case: OpCase) -> tuple[int, ...]:
    """Return the tensor arguments that the operator's schema marks as written to, by their numbers.

    >>> a, b = torch.zeros(2), torch.zeros(2)
    >>> written_arguments(OpCase("aten.add.out", "torch.ops.aten.add.out", (a, b), {"out": torch.empty(2)}))
    (2,)
    """
    schema = getattr(resolve(case.call), "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    names = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    named = [(argument.name, value) for argument, value in zip(schema.arguments, case.args, strict=False)]
    numbers: list[int] = []
    count = 0
    for name, value in [*named, *case.kwargs.items()]:
        here = sum(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))
        if name in names:
            numbers += range(count, count + here)
        count += here
    return tuple(numbers)


def writes_out(case: OpCase) -> bool:
    """Return whether the operator's schema has arguments that only receive results, as ``out=`` does.

    >>> writes_out(OpCase("aten.add.out", "torch.ops.aten.add.out")), writes_out(OpCase("aten.add_", "torch.add"))
    (True, False)
    """
    schema = getattr(resolve(case.call), "_schema", None)
    return schema is not None and any(argument.is_out for argument in schema.arguments)


_OPAQUE = frozenset({"rng_state", "unused", "philox_seed", "philox_offset", "max_q", "max_k"})


def opaque_results(op: object) -> tuple[int, ...]:
    """Return the places of the results that only the backward op reads, such as the state of a generator.

    DTensor may return them as plain tensors without dims, or numbers, of the rank. Their names in the schema tell.

    >>> opaque_results(torch.ops.aten._scaled_dot_product_efficient_attention.default)
    (2, 3)
    """
    returns = op._schema.returns if isinstance(op, OpOverload) else ()
    return tuple(place for place, result in enumerate(returns) if result.name in _OPAQUE)


@functools.cache
def has_opaque_results(op: str) -> bool:
    """Return whether the overload ``op``, such as ``aten.mm.default``, has opaque results; its programs return them."""
    try:
        return bool(opaque_results(resolve(f"torch.ops.{op}")))
    except ValueError:
        return False


def is_view(case: OpCase) -> bool:
    """Return whether the op returns a view of an argument, according to its schema.

    >>> [is_view(OpCase(name, f"torch.ops.{name}")) for name in ("aten.expand.default", "aten.sum.dim_IntList")]
    [True, False]
    """
    return _is_view(case.op)


def promises_strides(case: OpCase) -> bool:
    """Return whether a user relies on the strides of the result: only if the call is a view op and nothing else.

    >>> promises_strides(OpCase("aten.t.default", "torch.ops.aten.t.default"))
    True
    """
    return case.call == f"torch.ops.{case.op}" and _is_view(case.op)


@functools.cache
def _is_view(op: str) -> bool:
    try:
        overload = resolve(f"torch.ops.{op}")
    except ValueError:  # a program of several steps
        return False
    if not isinstance(overload, OpOverload):  # a packet of several overloads, as aten.mm
        return False
    aliases = [argument.alias_info for argument in overload._schema.arguments]
    return any(alias is not None and not alias.is_write for alias in aliases)


def argument_names(case: OpCase) -> list[str]:
    """Return a name for each tensor argument, in pytree order: the parameter's name, with an index inside a list."""
    positional = parameter_names(case.call)
    names = []
    for path, leaf in pytree.tree_flatten_with_path((case.args, dict(case.kwargs)))[0]:
        if not isinstance(leaf, torch.Tensor):
            continue
        steps = [key.idx if isinstance(key, pytree.SequenceKey) else key.key for key in path]  # type: ignore[attr-defined]
        root, first, *rest = steps
        name = str(first) if root == 1 else positional[first] if first < len(positional) else f"argument {first}"
        names.append(name + "".join(f"[{part}]" for part in rest))
    return names


@functools.cache
def parameter_names(call: str) -> list[str]:
    """Return the parameter names of the callable at a dotted path; empty if it has no signature."""
    target = resolve(call)
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return [argument.name for argument in schema.arguments]
    try:
        return list(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # builtins without a signature
        return []
