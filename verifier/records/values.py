"""Cases and trials by value, as JSON that names every dtype and spells out every number.

People can read and edit a finding, and later versions can run it again after the generators of its case have changed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import msgspec
import torch
from torch import nn
from torch.distributed.tensor.placement_types import Placement

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.placement_text import format_placements
from verifier.core.wording import did_you_mean
from verifier.placements.parsing import parse_placement, parse_placements
from verifier.records.memory import own_strides, with_strides
from verifier.records.schema import CaseRecord, TensorRecord, TrialRecord
from verifier.records.trials import MOST_GAPS, span_of, strides_fit
from verifier.torch_internals.placements import Placements

__all__ = [
    "case_record",
    "check_dense",
    "load_case",
    "load_trial",
    "trial_record",
]

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_TORCH_NAMES: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
_DEEPEST = 100
"""The most levels of lists, tuples and dicts in an argument; torch's own recursion fails for more."""
_MOST_DIMS = 64
"""The most tensor dims for which torch has views."""
_SEEDS = 1 << 64
_TAGS = ("tensor", "tuple", "size", "dict", "float", "complex", "placement", "device", *_TORCH_NAMES)
_STORABLE = (
    "None, bool, int, float, complex, str, torch dtypes, devices, placements, dense tensors, "
    "and lists, tuples and dicts of these"
)


def case_record(case: OpCase) -> CaseRecord:
    """Return ``case`` by value, ready to be written as JSON.

    A stored tensor keeps its dtype, shape, values, and whether it is contiguous, requires a gradient and is an
    ``nn.Parameter``, and gaps in its memory that are not large. It loses the payload of a NaN, its device, and the fact
    that it shares memory with another argument.

    Raises
    ------
    TypeError
        If an argument cannot be stored; the message names it, as ``args[1][0]``.

    >>> case_record(OpCase("aten.sum.dim_IntList", "torch.sum", (torch.tensor([1.0, -0.0]),), {"dim": (0,)})).kwargs
    {'dim': {'tuple': [0]}}
    """
    return CaseRecord(
        op=case.op,
        call=case.call,
        args=[_store(value, f"args[{position}]") for position, value in enumerate(case.args)],
        kwargs={name: _store(value, f"kwargs[{name!r}]") for name, value in case.kwargs.items()},
        family=case.family,
        exact=case.exact,
        tags=sorted(case.tags),
    )


def load_case(record: CaseRecord) -> OpCase:
    """Return the case that :func:`case_record` stored, with new tensors on the CPU.

    Raises
    ------
    ValueError
        If the record is not one that :func:`case_record` writes; the message says which argument.
    """
    _check_depth(record)
    return OpCase(
        op=record.op,
        call=record.call,
        args=tuple(_load(value, f"args[{position}]") for position, value in enumerate(record.args)),
        kwargs={name: _load(value, f"kwargs[{name!r}]") for name, value in record.kwargs.items()},
        family=record.family,
        exact=record.exact,
        tags=frozenset(record.tags),
    )


def trial_record(trial: Trial) -> TrialRecord:
    """Return ``trial`` by value, without ``trace`` and ``fault``, which belong to a run.

    Raises
    ------
    TypeError
        If an argument or a placement cannot be stored.
    """
    return TrialRecord(
        case=case_record(trial.case),
        mesh=str(trial.mesh),
        device=trial.mesh.device,
        combination=[_store_placements(placements) for placements in trial.combination],
        cotangents=[[_store_placements(placements) for placements in outputs] for outputs in trial.cotangents],
        seed=trial.seed,
    )


def load_trial(record: TrialRecord) -> Trial:
    """Return the trial that :func:`trial_record` stored.

    Raises
    ------
    ValueError
        If the record is not one that :func:`trial_record` writes.
    """
    if not -_SEEDS < record.seed < _SEEDS:
        raise ValueError("seed: the seed of a trial has 64 bits at most")
    return Trial(
        case=load_case(record.case),
        mesh=MeshSpec.parse(record.mesh, device=record.device),
        combination=tuple(parse_placements(text) for text in record.combination),
        cotangents=tuple(tuple(parse_placements(text) for text in outputs) for outputs in record.cotangents),
        seed=record.seed,
    )


def _store_placements(placements: Placements) -> str:
    text = format_placements(placements)
    try:
        readable = parse_placements(text) == placements
    except ValueError:
        readable = False
    if not readable:
        raise TypeError(f"placements {text} cannot be stored: only R, S(dim) and P(reduction) can be read back")
    return text


def _store(value: object, where: str) -> Any:
    """Return ``value`` as JSON values; a dict with one key of ``_TAGS`` stands for types that JSON lacks.

    Types are compared exactly: a NumPy float is a ``float`` to ``isinstance`` and would come back as another type.
    """
    kind = type(value)
    if value is None or kind is bool or kind is int:
        return value
    if kind is str:
        return _store_text(cast(str, value), where)
    if kind is float:
        number = _store_float(cast(float, value))
        return {"float": number} if isinstance(number, str) else number
    if kind is complex:
        return {"complex": [_store_float(part) for part in (cast(complex, value).real, cast(complex, value).imag)]}
    if kind in (list, tuple, torch.Size):
        items = [_store(item, f"{where}[{position}]") for position, item in enumerate(cast("list[object]", value))]
        return items if kind is list else {"tuple" if kind is tuple else "size": items}
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                raise TypeError(f"{where} cannot be stored: its key {key!r} is a {type(key).__name__}, not a str")
        return {
            "dict": {_store_text(key, where): _store(item, f"{where}[{key!r}]") for key, item in value.items()},
        }
    if isinstance(value, torch.Tensor):
        stored = msgspec.to_builtins(_store_tensor(value, where))
        return {"tensor": {name: item for name, item in stored.items() if name != "order" or item}}
    if isinstance(value, Placement):
        return {"placement": _store_placements((value,))}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for tag, torch_type in _TORCH_NAMES.items():
        if isinstance(value, torch_type):
            return {tag: str(value).removeprefix("torch.")}
    raise TypeError(f"{where} cannot be stored: {_short(value)} is a {kind.__name__}; storable are {_STORABLE}")


def _store_text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TypeError(f"{where} cannot be stored: {text!r} is not valid Unicode") from None
    return text


_WHOLE = 2.0**53
"""Below, every whole number is a float64."""


def _store_float(value: float) -> float | str:
    """Return nan and the infinities as text, because JSON lacks them."""
    return value if math.isfinite(value) else str(value)


def _store_element(value: float) -> float | str:
    """Return an element of a tensor of floats: whole numbers without a point, because the dtype says what they are."""
    if value.is_integer() and (value or math.copysign(1.0, value) > 0.0) and abs(value) < _WHOLE:
        return int(value)
    return _store_float(value)


def _store_tensor(tensor: torch.Tensor, where: str) -> TensorRecord:
    check_dense(tensor, where)
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().reshape(-1)
    values: list[Any]
    if flat.dtype.is_complex:
        pairs = torch.view_as_real(flat.to(torch.complex128)).tolist()
        values = [[_store_element(part) for part in pair] for pair in pairs]
    elif flat.dtype.is_floating_point:
        # Every narrower float is a float64 exactly, and JSON carries a float64 exactly.
        values = [_store_element(number) for number in flat.to(torch.float64).tolist()]
    else:
        values = flat.tolist()
    return TensorRecord(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=list(tensor.shape),
        values=values,
        contiguous=tensor.is_contiguous(),
        requires_grad=tensor.requires_grad,
        parameter=isinstance(tensor, nn.Parameter),
        order=_order(tensor),
        strides=own_strides(tensor) if span_of(tensor.shape, tensor.stride()) <= MOST_GAPS * tensor.numel() else [],
    )


def _order(tensor: torch.Tensor) -> list[int]:
    """Return the dims of a tensor in memory, the outermost first; none if it has gaps, or is as it is made without."""
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    long = [dim for dim in order if tensor.shape[dim] > 1]
    usual = tensor.is_contiguous() or long == sorted(long, reverse=True)
    return [] if usual or not tensor.permute(order).is_contiguous() else order


def check_dense(tensor: torch.Tensor, where: str) -> None:
    """Raise TypeError for a tensor that is not dense, because storing it would lose information."""
    reason = ""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        reason = f"it is a {type(tensor).__name__}"
    elif tensor.layout is not torch.strided:
        reason = f"its layout is {tensor.layout}"
    elif tensor.is_quantized:
        reason = "it is quantized"
    elif tensor.is_meta:
        reason = "it is on the meta device and has no values"
    if reason:
        raise TypeError(f"{where} cannot be stored: {reason}; store a dense torch.Tensor")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_depth(record: CaseRecord) -> None:
    level: list[Any] = [record.args, record.kwargs]
    for _ in range(_DEEPEST):
        level = [item for one in level if isinstance(one, dict | list) for item in _items(one)]
    if level:
        raise ValueError(f"arguments are nested more than {_DEEPEST} levels deep")


def _items(stored: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return stored.values() if isinstance(stored, dict) else stored


def _load(stored: Any, where: str) -> object:
    if isinstance(stored, list):
        return [_load(item, f"{where}[{position}]") for position, item in enumerate(stored)]
    if not isinstance(stored, dict):
        return stored
    if len(stored) != 1:
        raise ValueError(f"{where}: expected one of the keys {', '.join(_TAGS)}, got {_short(sorted(stored))}")
    [(tag, content)] = stored.items()
    if tag in _TORCH_NAMES:
        return _load_torch_name(tag, content, where)
    loader = _LOADERS.get(tag)
    if loader is None:
        raise ValueError(f"{where}: {tag!r} is none of {', '.join(_TAGS)}{did_you_mean(str(tag), _TAGS)}")
    return loader(content, where)


def _load_torch_name(tag: str, name: object, where: str) -> object:
    value = vars(torch).get(str(name))  # getattr would load a module for some names
    if not isinstance(value, _TORCH_NAMES[tag]):
        known = [each for each, one in vars(torch).items() if isinstance(one, _TORCH_NAMES[tag])]
        raise ValueError(f"{where}: torch has no {tag} {name!r}{did_you_mean(str(name), known, 0.0)}")
    return value


def _load_items(stored: Any, where: str) -> list[Any]:
    if not isinstance(stored, list):
        raise ValueError(f"{where}: expected a list, got {_short(stored)}")
    return cast("list[Any]", _load(stored, where))


def _load_mapping(stored: Any, where: str) -> dict[str, object]:
    if not isinstance(stored, dict):
        raise ValueError(f"{where}: expected a dict, got {_short(stored)}")
    return {key: _load(item, f"{where}[{key!r}]") for key, item in stored.items()}


def _load_float(stored: Any, where: str) -> float:
    if isinstance(stored, str) and stored in _NOT_FINITE:
        return _NOT_FINITE[stored]
    if isinstance(stored, int | float) and not isinstance(stored, bool):
        with contextlib.suppress(OverflowError):
            return float(stored)
    raise ValueError(f"{where}: {_short(stored)} is neither a number nor one of {', '.join(_NOT_FINITE)}")


def _load_complex(stored: Any, where: str) -> complex:
    if not isinstance(stored, list) or len(stored) != 2:
        raise ValueError(f"{where}: expected a complex number as [real, imaginary], got {_short(stored)}")
    return complex(_load_float(stored[0], where), _load_float(stored[1], where))


def _load_tensor(stored: Any, where: str) -> torch.Tensor:
    try:
        record = stored if isinstance(stored, TensorRecord) else msgspec.convert(stored, TensorRecord)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: not a stored tensor: {error}") from error
    dtype = cast(torch.dtype, _load_torch_name("dtype", record.dtype, where))
    if len(record.shape) > _MOST_DIMS:
        raise ValueError(f"{where}: {len(record.shape)} tensor dims; a tensor has {_MOST_DIMS} at most")
    if any(extent < 0 for extent in record.shape) or len(record.values) != math.prod(record.shape):
        raise ValueError(f"{where}: {len(record.values)} values do not fill a tensor of shape {record.shape}")
    values: list[Any] = record.values
    wide = dtype
    if dtype.is_complex:
        values, wide = [_load_complex(value, where) for value in values], torch.complex128
    elif dtype.is_floating_point:
        values, wide = [_load_float(value, where) for value in values], torch.float64
    else:
        # torch.tensor would silently cut 1.5 to 1.
        wanted = bool if dtype is torch.bool else int
        for value in values:
            if type(value) is not wanted:
                raise ValueError(f"{where}: {_short(value)} is no value of a tensor of dtype {record.dtype}")
    try:
        tensor = torch.tensor(values, dtype=wide).to(dtype).reshape(record.shape)
        if record.order:
            if sorted(record.order) != [*range(tensor.ndim)]:
                raise ValueError(f"{where}: order {record.order} does not have each of {tensor.ndim} dims once")
            back = [record.order.index(dim) for dim in range(tensor.ndim)]
            tensor = tensor.permute(record.order).contiguous().permute(back)
        elif record.strides:
            tensor = with_strides(tensor, _checked(record, where))
        elif not record.contiguous:
            tensor = _not_contiguous(tensor)
        if record.parameter:
            return nn.Parameter(tensor, requires_grad=record.requires_grad)
        return tensor.requires_grad_(record.requires_grad)
    except (RuntimeError, OverflowError, TypeError) as error:
        raise ValueError(f"{where}: not a tensor that torch can hold: {str(error).splitlines()[0]}") from error


def _checked(record: TensorRecord, where: str) -> list[int]:
    """Return the strides of a record; they may not ask for much more memory than the values need."""
    if not strides_fit(record):
        raise ValueError(f"{where}: strides {_short(record.strides)} do not fit a tensor of shape {record.shape}")
    return record.strides


def _not_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values in the memory order of the transposed tensor.

    A vector or a matrix with one row is contiguous in either order, so it gets gaps between its elements.
    """
    dims = tuple(reversed(range(tensor.ndim)))
    turned = tensor.permute(dims).contiguous().permute(dims)
    if turned.is_contiguous():
        turned = torch.empty_strided(tensor.shape, [2 * stride for stride in tensor.stride()], dtype=tensor.dtype)
        turned.copy_(tensor)
    return turned


def _load_placement(stored: Any, where: str) -> Placement:
    try:
        return parse_placement(str(stored))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _load_device(stored: Any, where: str) -> torch.device:
    try:
        return torch.device(str(stored))
    except RuntimeError as error:
        raise ValueError(f"{where}: no device of torch: {str(error).splitlines()[0]}") from error


def _load_size(stored: Any, where: str) -> torch.Size:
    try:
        return torch.Size(_load_items(stored, where))
    except (RuntimeError, OverflowError, TypeError) as error:
        raise ValueError(f"{where}: no sizes that torch can hold: {_short(stored)}") from error


_LOADERS: dict[str, Callable[[Any, str], object]] = {
    "tensor": _load_tensor,
    "placement": _load_placement,
    "device": _load_device,
    "tuple": lambda stored, where: tuple(_load_items(stored, where)),
    "size": _load_size,
    "dict": _load_mapping,
    "float": _load_float,
    "complex": _load_complex,
}
