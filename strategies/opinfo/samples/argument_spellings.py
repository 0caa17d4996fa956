"""Other spellings of a call: arguments as users write them, not only as OpInfo does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from strategies.opinfo.calls.call import Call, Parameter, attempt, parameters
from strategies.opinfo.calls.op_names import base_of

__all__ = ["DIMS", "Variation", "equivalent_dim", "spellings", "with_value", "with_values"]


@dataclass(frozen=True)
class Variation:
    """A change to a call: its label, and the changed call at each size (None if it does not apply).

    ``strided`` says that the strides are what it changes, so that they are kept with other values. The values that are
    drawn are multiplied by ``factor``.
    """

    label: str
    apply: Callable[[Call], Call | None]
    strided: bool = False
    factor: int = 1


DIMS = {"dim", "dims", "dim0", "dim1", "dim2", "axis", "axis0", "axis1", "start_dim", "end_dim"}
"""Names of arguments that are dims of tensors."""
_AMOUNTS = {"pad", "padding", "shifts", "output_padding"}
"""Lists with an amount for each dim, or for both sides of each, of which 0 means none."""
_FLAGS = {
    "keepdim",
    "largest",
    "sorted",
    "descending",
    "stable",
    "right",
    "unbiased",
    "ceil_mode",
    "count_include_pad",
    "align_corners",
    "log_target",
    "upper",
    "exclusive",
}


def with_value(call: Call, name: str, value: object) -> Call | None:
    """Return ``call`` with another value of the argument ``name``."""
    return Call.of(call.op, {**call.values, name: value})


def with_values(values: Mapping[str, object], call: Call) -> Call | None:
    """Return ``call`` with other values of several arguments, by name."""
    return Call.of(call.op, {**call.values, **values})


def spellings(call: Call) -> Iterator[Variation]:
    """Yield the other spellings of ``call`` that torch accepts.

    Of helper ops only ``padding_idx``, ``ignore_index`` and the like are changed. The callers of helpers check the
    other arguments, and some helper kernels read past the end of a tensor if an argument is invalid.
    """
    base = base_of(str(call.op))
    helper = (base.startswith("_") and not base.startswith("_foreach")) or "backward" in base
    for parameter in parameters(call.op):
        for variation in _variations(call, parameter, helper):
            changed = variation.apply(call)
            if changed is not None and attempt(changed) is not None:
                yield variation


def _variations(call: Call, parameter: Parameter, helper: bool) -> Iterator[Variation]:
    name, given = parameter.name, call.values.get(parameter.name, parameter.default)
    if name in ("ignore_index", "padding_idx"):
        yield Variation(f"{name} occurs", partial(_with_last_index, name))
    elif name == "scale_grad_by_freq" and given is False:
        yield Variation(f"{name}=True for False", partial(with_value, name=name, value=True))
    elif not helper:
        for value in _candidates(call, parameter, given):
            if value != given or type(value) is not type(given):
                yield Variation(f"{name}={value} for {given}", partial(with_value, name=name, value=value))


def _with_last_index(name: str, call: Call) -> Call | None:
    """Return ``call`` with an index that occurs in the call as the argument ``name``, so that ignoring it matters."""
    indices = [t for t in call.tensors if not t.is_floating_point() and t.dtype != torch.bool and t.numel()]
    return with_value(call, name, int(indices[-1].view(-1)[-1])) if indices else None


def _candidates(call: Call, parameter: Parameter, given: object) -> Iterator[object]:
    name, type_ = parameter.name, parameter.type
    names = {other.name for other in parameters(call.op)}
    optional = type_.startswith("Optional")
    has_out = any(other.out for other in parameters(call.op))
    if has_out and name not in DIMS:
        return  # the result might no longer fit the buffers
    if name in DIMS and "int" in type_ and isinstance(given, int):
        yield from _equivalent_dims(call, name, given)
        if optional and not has_out:
            yield None
    elif name in DIMS and "List[int]" in type_:
        reduces = "keepdim" in names and not has_out
        yield from _dim_lists(call, given if isinstance(given, list | tuple) else [], reduces, optional)
    elif name in _AMOUNTS and isinstance(given, list | tuple) and len(given) > 1:
        # on one side or along one dim alone, so that a mix-up of the entries shows
        for place, amount in enumerate(given):
            yield [amount or 1 if other == place else 0 for other in range(len(given))]
    elif name in _FLAGS and "bool" in type_:
        yield not given
    elif name == "correction":
        yield from (0, 1, 2, None)
    elif name == "reduction" and type_ == "int":
        yield from (0, 1, 2)
    elif name == "dtype" and optional and given is None and call.tensors[0].is_floating_point():
        # another precision than the tensors have, so that a cast on the wrong side of a reduction shows
        yield torch.float32 if call.tensors[0].dtype == torch.float64 else torch.float64


def _dim_lists(call: Call, given: list[int] | tuple[int, ...], reduces: bool, optional: bool) -> Iterator[object]:
    rank = call.tensors[0].ndim
    if given and rank:
        yield [dim - rank if dim >= 0 else dim + rank for dim in given]
    if reduces:
        if len(given) > 1:
            yield list(reversed(given))
        if rank > 1:
            yield [0, -1]
            yield [rank - 1]
        yield []
        if optional:
            yield None
    elif len(given) > 1:
        yield list(reversed(given))


def _equivalent_dims(call: Call, name: str, given: int) -> Iterator[int]:
    """Yield the same dim counted from the other end, for the first tensor and for a result with one more dim."""
    reference = attempt(call)
    ranks = {tensor.ndim for tensor in call.tensors[:1]} | {tensor.ndim + 1 for tensor in call.tensors[:1]}
    for rank in sorted(ranks):
        other = given - rank if given >= 0 else given + rank
        changed = with_value(call, name, other)
        results = None if changed is None else attempt(changed)
        if reference is not None and results is not None and _equal(results, reference):
            yield other
            return


def equivalent_dim(name: str, call: Call) -> Call | None:
    """Return ``call`` with the dim ``name`` counted from the other end; None if no such number means the same."""
    defaults = {parameter.name: parameter.default for parameter in parameters(call.op)}
    given = call.values.get(name, defaults[name])
    if type(given) is not int:
        return None
    other = next(_equivalent_dims(call, name, given), None)
    return None if other is None else with_value(call, name, other)


def _equal(these: list[torch.Tensor], those: list[torch.Tensor]) -> bool:
    return len(these) == len(those) and all(torch.equal(a, b) for a, b in zip(these, those, strict=True))
