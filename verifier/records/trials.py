"""Decides whether a stored trial can be run again, without torch as far as possible."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from verifier.core.case import MeshSpec
from verifier.core.placement_text import BITWISE_REDUCTIONS, REDUCTIONS, split_placements
from verifier.records.schema import TensorRecord, TrialRecord

__all__ = ["MOST_GAPS", "check_trial", "span_of", "strides_fit", "surely_loads"]

MOST_GAPS = 1 << 10
"""A tensor is stored with its gaps if its memory is at most so many times that of its elements."""
_FARTHEST = 1 << 40

_DEEPEST, _MOST_DIMS, _LARGEST = 30, 16, 1 << 40
"""Nesting, tensor dims and sizes that torch certainly accepts."""
_FLOATS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64")
_COMPLEX = ("complex64", "complex128")
_INTEGERS = {
    **{f"uint{bits}": range(1 << bits) for bits in (8, 16, 32, 64)},
    **{f"int{bits}": range(-(1 << bits - 1), 1 << bits - 1) for bits in (8, 16, 32, 64)},
}
_NAMES = {
    "dtype": ("bool", *_INTEGERS, *_FLOATS, *_COMPLEX),
    "layout": ("strided",),
    "memory_format": ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d"),
}
_DEVICE = re.compile("(cpu|cuda)(:[0-9])?")
_PLACEMENT = re.compile(
    rf"R|S\(-?[0-9]{{1,9}}\)|P\(({'|'.join((*REDUCTIONS, *BITWISE_REDUCTIONS))})\)"
    r"|_S\([0-9]{1,9}, [1-9][0-9]{0,8}\)|_NormP\([1-9][0-9]{0,8}(\.[0-9]{1,9})?\)"
)


def check_trial(trial: TrialRecord) -> None:
    """Check that a stored trial can be run again; raises as :func:`verifier.records.values.load_trial` does.

    Torch is loaded only for a trial in doubt; it then decides, and gives the reason.
    """
    if not surely_loads(trial):
        from verifier.records.values import load_trial  # loads torch

        load_trial(trial)


def surely_loads(trial: TrialRecord) -> bool:
    """Return True if :func:`load_trial` certainly accepts ``trial``; False means that it may."""
    try:
        MeshSpec.parse(trial.mesh, device=trial.device)
    except ValueError:
        return False
    placements = [*trial.combination, *(text for outputs in trial.cotangents for text in outputs)]
    return (
        abs(trial.seed) < 1 << 64
        and all(map(_are_placements, placements))
        and _holds(trial.case.args)
        and _holds(list(trial.case.kwargs.values()))
    )


def _are_placements(text: str) -> bool:
    parts = split_placements(text)
    return bool(parts) and all(map(_PLACEMENT.fullmatch, parts))


def _holds(stored: Any, levels: int = _DEEPEST) -> bool:
    """Return whether a stored argument can certainly be loaded."""
    if isinstance(stored, list):
        return levels > 0 and all(_holds(item, levels - 1) for item in stored)
    if not isinstance(stored, dict):
        return True
    if len(stored) != 1:
        return False
    [(tag, content)] = stored.items()
    match tag, content:
        case "tensor", dict():
            return _is_tensor(content)
        case "tuple", list():
            return _holds(content, levels)
        case "dict", dict():
            return _holds(list(content.values()), levels)
        case "size", list():
            return all(type(item) is int and 0 <= item < _LARGEST for item in content)
        case "float", _:
            return _is_float(content)
        case "complex", _:
            return _is_complex(content)
        case (("placement" | "device"), str()):
            return (_DEVICE if tag == "device" else _PLACEMENT).fullmatch(content) is not None
    return isinstance(content, str) and content in _NAMES.get(tag, ())


def _is_float(stored: Any) -> bool:
    if isinstance(stored, str):
        return stored in ("nan", "inf", "-inf")
    return type(stored) is float or (type(stored) is int and abs(stored) < 1 << 64)


def _is_complex(stored: Any) -> bool:
    return isinstance(stored, list) and len(stored) == 2 and all(map(_is_float, stored))


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements lie in memory from the first one of a tensor to its last one."""
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if math.prod(shape) else 0


def strides_fit(record: TensorRecord) -> bool:
    """Return whether there is a stride for each tensor dim, and memory need not be much larger than the values."""
    shape, strides = record.shape, record.strides
    if len(strides) != len(shape) or not all(0 <= stride < _FARTHEST for stride in strides):
        return False
    return span_of(shape, strides) <= MOST_GAPS * max(len(record.values), 1)


def _is_tensor(stored: dict[str, Any]) -> bool:
    try:
        tensor = msgspec.convert(stored, TensorRecord)
    except msgspec.ValidationError:
        return False
    shape, values, dtype = tensor.shape, tensor.values, tensor.dtype
    if len(shape) > _MOST_DIMS or min(shape, default=0) < 0 or math.prod(max(size, 1) for size in shape) > _LARGEST:
        return False
    if len(values) != math.prod(shape) or (tensor.order and sorted(tensor.order) != [*range(len(shape))]):
        return False
    if tensor.strides and not strides_fit(tensor):
        return False
    if dtype in _FLOATS:
        return all(map(_is_float, values))
    if dtype in _COMPLEX:
        return all(map(_is_complex, values))
    if tensor.requires_grad:
        return False
    if dtype == "bool":
        return all(type(value) is bool for value in values)
    return dtype in _INTEGERS and all(type(value) is int and value in _INTEGERS[dtype] for value in values)
