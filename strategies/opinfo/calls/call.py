"""Calls of aten overloads: their arguments by name, how they are run, and their results."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from verifier.torch_internals.names import OpOverload

__all__ = ["REFUSALS", "Call", "Parameter", "attempt", "outcome", "parameters", "quiet", "tensors_of"]

REFUSALS: tuple[type[Exception], ...] = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    AssertionError,
    ArithmeticError,
    AttributeError,
    KeyError,
)
"""Exceptions by which torch refuses a call. NotImplementedError is a RuntimeError."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of an aten overload: ``type`` as in the schema, ``written`` if the op writes into it."""

    name: str
    type: str
    keyword_only: bool
    written: bool
    out: bool
    has_default: bool
    default: object

    @property
    def optional(self) -> bool:
        """Whether the argument may be None."""
        return self.type.startswith("Optional[")


@cache
def parameters(op: OpOverload) -> tuple[Parameter, ...]:
    """Return the parameters of ``op`` in the order of its schema."""
    return tuple(
        Parameter(
            argument.name,
            str(argument.type),
            argument.kwarg_only,
            argument.alias_info is not None and argument.alias_info.is_write,
            argument.is_out,
            argument.has_default_value(),
            argument.default_value,
        )
        for argument in op._schema.arguments
    )


@cache
def _writes(op: OpOverload) -> bool:
    return any(parameter.written for parameter in parameters(op))


class Call:
    """A call of an aten overload with values; immutable."""

    def __init__(self, op: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        self.op, self.args, self.kwargs = op, args, kwargs

    @classmethod
    def of(cls, op: OpOverload, values: Mapping[str, object]) -> Call | None:
        """Return the call of ``op`` with arguments by name; None if one is missing or unknown."""
        args: list[object] = []
        kwargs: dict[str, object] = {}
        names = {parameter.name for parameter in parameters(op)}
        if not values.keys() <= names:
            return None
        for parameter in parameters(op):
            if parameter.name not in values and not parameter.has_default:
                return None
            if not parameter.keyword_only:
                args.append(values.get(parameter.name, parameter.default))
            elif parameter.name in values:
                kwargs[parameter.name] = values[parameter.name]
        while args and parameters(op)[len(args) - 1].name not in values:
            args.pop()
        return cls(op, tuple(args), kwargs)

    @cached_property
    def values(self) -> dict[str, object]:
        """The given arguments, by name."""
        positional = [parameter.name for parameter in parameters(self.op) if not parameter.keyword_only]
        return {**dict(zip(positional, self.args, strict=False)), **self.kwargs}

    @cached_property
    def _flat(self) -> tuple[list[object], list[tuple[type, int] | None]]:
        """The leaves, and for each argument None or the type and length of a list.

        Torch's pytree would return the same leaves but take most of the time of a run. Arguments of aten overloads are
        never nested deeper.
        """
        leaves: list[object] = []
        groups: list[tuple[type, int] | None] = []
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, list | tuple):
                leaves.extend(value)
                groups.append((type(value), len(value)))
            else:
                leaves.append(value)
                groups.append(None)
        return leaves, groups

    @property
    def leaves(self) -> list[object]:
        """The leaves of ``(args, kwargs)`` in pytree order, in a new list."""
        return list(self._flat[0])

    @cached_property
    def parameter_of(self) -> list[str]:
        """The parameter's name of each leaf."""
        names = [parameter.name for parameter in parameters(self.op) if not parameter.keyword_only]
        owners = [*names[: len(self.args)], *self.kwargs]
        return [n for n, group in zip(owners, self._flat[1], strict=True) for _ in range(group[1] if group else 1)]

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self._flat[0] if isinstance(leaf, torch.Tensor)]

    def with_leaves(self, leaves: list[object]) -> Call:
        """Return the same call on other leaves."""
        values: list[object] = []
        at = 0
        for group in self._flat[1]:
            if group is None:
                values.append(leaves[at])
                at += 1
            else:
                values.append(group[0](leaves[at : at + group[1]]))
                at += group[1]
        count = len(self.args)
        other = Call(self.op, tuple(values[:count]), dict(zip(self.kwargs, values[count:], strict=True)))
        other._flat = leaves, self._flat[1]
        return other

    def with_tensors(
        self, which: Collection[int], change: Callable[[torch.Tensor], torch.Tensor | None]
    ) -> Call | None:
        """Return the same call with its tensors at the places ``which`` changed; None if one of them cannot be."""
        leaves, number = self.leaves, -1
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                number += 1
                if number in which:
                    leaves[place] = change(leaf)
                    if leaves[place] is None:
                        return None
        return self.with_leaves(leaves)

    def signature(self) -> str:
        """Return a text that is equal for two calls iff they differ at most in the values of their tensors."""
        return f"{self.op}|{_signature(self.args)}|{_signature(sorted(self.kwargs.items()))}"

    def structure(self) -> str:
        """Return a text that is equal for the same call at another size."""
        return f"{self.op}|{_structure(self.args)}|{_structure(sorted(self.kwargs.items()))}"


def _signature(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"[{','.join(_signature(item) for item in value)}]"
    return f"{type(value).__name__}:{value}"


def _structure(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{value.ndim}"
    if isinstance(value, list | tuple):
        return f"[{','.join(_structure(item) for item in value)}]"
    return type(value).__name__


# ------------------------------------------------------------------------------------------------------------- running
def outcome(call: Call) -> list[torch.Tensor]:
    """Return the tensors that ``call`` returns, then copies of those that it writes into; ``call`` is unchanged.

    Raises
    ------
    Exception
        Any exception of torch; see :data:`REFUSALS`.
    """
    if not _writes(call.op):
        return list(tensors_of(call.op(*call.args, **call.kwargs)))
    leaves = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in call.leaves]
    fresh = call.with_leaves(leaves)
    returned = fresh.op(*fresh.args, **fresh.kwargs)
    values = fresh.values
    written = [values.get(parameter.name) for parameter in parameters(call.op) if parameter.written]
    return [*tensors_of(returned), *tensors_of(written)]


def attempt(call: Call) -> list[torch.Tensor] | None:
    """Return the result of :func:`outcome`, or None if torch refuses the call or cannot compare the results.

    Of prims, the kernel and the function for tensors without values were written apart. A call counts as refused if
    they make results of unequal shapes: of an empty list of dims one reduces all dims and the other none. Nothing in
    torch calls prims so.
    """
    try:
        results = outcome(call)
        if call.op.namespace == "prims" and [t.shape for t in outcome(_on_meta(call))] != [t.shape for t in results]:
            return None
    except REFUSALS:
        return None
    return None if any(result.dtype == torch.complex32 for result in results) else results


def _on_meta(call: Call) -> Call:
    return call.with_leaves([leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf for leaf in call.leaves])


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    """Yield a tensor, or those in lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)


class quiet(warnings.catch_warnings):  # noqa: N801  (a context manager, named as in the standard library)
    """Silence torch's warnings about unusual calls."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")
