"""Ops that stand for functions of tensors, so that what knows ops takes functions, too."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

import torch

from verifier.core.errors import SamplesError
from verifier.core.wording import one_line

__all__ = ["define_stand_in", "function_of_autograd"]

_SCALARS = ((bool, "bool"), (int, "int"), (float, "float"), (str, "str"), (torch.dtype, "ScalarType"))


_libraries: list[torch.library.Library] = []
"""An op is there as long as its library is."""


def define_stand_in(
    name: str,
    function: Callable[..., object],
    examples: Sequence[tuple[tuple[object, ...], Mapping[str, object]]],
    where: str,
) -> None:
    """Register the op ``name``, as ``"namespace::op"``, that calls ``function``; its schema takes all ``examples``.

    Raises
    ------
    SamplesError
        If the function does not take an example, or has no schema: it returns something else than tensors, or takes
        something that no schema has. The message begins with ``where``.
    """
    try:
        signature = _signature(function)
        bound = [signature.bind(*args, **kwargs).arguments for args, kwargs in examples]
    except (TypeError, ValueError) as error:
        raise SamplesError(f"{where}: {error}") from error
    try:
        results = [function(*args, **kwargs) for args, kwargs in examples]
    except Exception as error:
        raise SamplesError(one_line(f"{where}: it raised {type(error).__name__}: {error}")) from error
    to = _returned_types(results)
    if not to:
        raise SamplesError(f"{where}: it returns something else than a tensor or a tuple of tensors")
    texts, keyword = [], False
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise SamplesError(f"{where}: its parameter {parameter} has no fixed number of arguments")
        has_default = parameter.default is not parameter.empty
        given = [arguments[parameter.name] for arguments in bound if parameter.name in arguments]
        kind = _schema_type([*given, *([parameter.default] if has_default else [])])
        if not kind:
            raise SamplesError(f"{where}: its parameter {parameter.name} is no tensor, number, text, or list of these")
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword:
            keyword = True
            texts.append("*")
        texts.append(f"{kind} {parameter.name}" + (f"={_schema_value(parameter.default)}" if has_default else ""))
    namespace, _, packet = name.partition("::")
    library = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(f"{packet}({', '.join(texts)}) -> {to}")  # type: ignore[no-untyped-call]
    library.impl(packet, function, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
    _libraries.append(library)


def function_of_autograd(function: object) -> type[torch.autograd.Function] | None:
    """Return the class whose ``apply`` a function is; None if it is no such method."""
    owner = getattr(function, "__self__", None)
    if not (isinstance(owner, type) and issubclass(owner, torch.autograd.Function)):
        return None
    return owner if getattr(function, "__name__", "") == "apply" else None


def _signature(function: Callable[..., object]) -> inspect.Signature:
    """Return the parameters of a function; those of ``apply`` are those of ``forward``, without its context."""
    owner = function_of_autograd(function)
    if owner is None:
        return inspect.signature(function)
    whole = inspect.signature(owner.forward)
    has_context = owner.setup_context is torch.autograd.Function.setup_context
    return whole.replace(parameters=list(whole.parameters.values())[has_context:])


def _returned_types(results: Sequence[object]) -> str:
    """Return the type of ``results`` in a schema; empty if they are neither tensors nor tuples of as many of them.

    >>> x = torch.zeros(2)
    >>> _returned_types([x]), _returned_types([(x, x), (x, None)]), _returned_types([x, (x,)]), _returned_types([3])
    ('Tensor', '(Tensor, Tensor?)', '', '')
    """
    if all(isinstance(one, torch.Tensor) for one in results):
        return "Tensor"
    tuples = [one for one in results if isinstance(one, tuple)]
    if len(tuples) < len(results) or len(set(map(len, tuples))) > 1:
        return ""
    types = [_schema_type(column) for column in zip(*tuples, strict=True)]
    return f"({', '.join(types)})" if types and {*types} <= {"Tensor", "Tensor?"} and "Tensor" in types else ""


def _schema_type(values: Sequence[object]) -> str:
    """Return the type of a parameter in a schema that takes all ``values``; empty if there is none.

    >>> _schema_type([1, None]), _schema_type([[2, 3]]), _schema_type([torch.zeros(2)]), _schema_type([object()])
    ('int?', 'int[]', 'Tensor', '')
    """
    present = [value for value in values if value is not None]
    optional = "?" if len(present) < len(values) else ""
    if not present:
        return "Tensor?" if values else ""
    if all(isinstance(value, list | tuple) and value for value in present):
        of = _schema_type([one for value in present for one in value])  # type: ignore[attr-defined]
        return f"{of}[]{optional}" if of and "[" not in of else ""
    if all(isinstance(value, torch.Tensor) for value in present):
        return f"Tensor{optional}"
    for kind, text in _SCALARS:
        if all(type(value) is kind or (kind is float and type(value) is int) for value in present):
            return f"{text}{optional}"
    return ""


def _schema_value(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(list(value) if isinstance(value, tuple) else value)
