"""A stored call as text: its tensors by name, its values, and the call in Python's syntax."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from verifier.records.schema import FindingRecord, TensorRecord

__all__ = ["NamedTensor", "call_text", "dtype_text", "named_tensors", "tensors_in", "values_text"]

_SHORT_DTYPES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "complex64": "c64",
    "complex128": "c128",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "bool",
}
_MOST_VALUES = 240
"""Most values of a tensor that a page shows; run.json has all."""


@dataclass(frozen=True)
class NamedTensor:
    """A tensor argument of a finding's smallest case, with its placements as text, or empty if none are stored."""

    name: str
    placements: str
    tensor: TensorRecord

    @property
    def type_text(self) -> str:
        """Return dtype and shape, as ``f64[5, 2]``."""
        return f"{dtype_text(self.tensor.dtype)}{self.tensor.shape}"


def dtype_text(dtype: str) -> str:
    """Return the short name of a dtype.

    >>> dtype_text("torch.float64"), dtype_text("float8_e4m3fn")
    ('f64', 'float8_e4m3fn')
    """
    name = dtype.removeprefix("torch.")
    return _SHORT_DTYPES.get(name, name)


def _as_tensor(value: object) -> TensorRecord | None:
    if isinstance(value, dict) and "tensor" in value:
        inner = value["tensor"]
        return inner if isinstance(inner, TensorRecord) else msgspec.convert(inner, TensorRecord)
    return None


def tensors_in(value: object) -> Iterator[TensorRecord]:
    """Yield the tensors in a stored argument, in the order of a pytree walk."""
    tensor = _as_tensor(value)
    if tensor is not None:
        yield tensor
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def named_tensors(finding: FindingRecord) -> list[NamedTensor]:
    """Return the tensor arguments of the smallest case of ``finding``.

    Names come from the finding's input placements if these are complete. Placements come from the trial.
    """
    trial = finding.trial
    tensors = list(tensors_in([trial.case.args, trial.case.kwargs]))
    names = list(finding.input_placements)
    if len(names) != len(tensors):
        names = [f"tensor {position}" for position in range(len(tensors))]
    placements = [*trial.combination, *[""] * len(tensors)]
    return [NamedTensor(*entry) for entry in zip(names, placements, tensors, strict=False)]


# --------------------------------------------------------------------------------------------------------------- text
def values_text(tensor: TensorRecord) -> str:
    """Return the values of ``tensor`` as nested rows; each line is a row of the last tensor dim.

    >>> print(values_text(TensorRecord("float64", [2, 3], [1.0, 2.0, "nan", 4.0, -5.5, 6.0])))
    [[1,    2, nan],
     [4, -5.5,   6]]
    """
    if 0 in tensor.shape:
        return "(no elements)"
    shown = [_number(value) for value in tensor.values[:_MOST_VALUES]]
    if not tensor.shape:
        return shown[0]
    columns = tensor.shape[-1]
    padded = shown
    # A column is as wide as its widest entry, so that a large value does not widen other columns.
    if len(tensor.shape) > 1:
        widths = [max(len(text) for text in shown[column::columns]) for column in range(min(columns, len(shown)))]
        padded = [text.rjust(widths[position % columns]) for position, text in enumerate(shown)]
    rows = [", ".join(padded[begin : begin + columns]) for begin in range(0, len(padded), columns)]
    left = len(tensor.values) - len(shown)
    lines = _nest(rows, tensor.shape[:-1], closed=not left)
    return lines + (f"\n… {left:,} more values in run.json" if left else "")


def _nest(rows: list[str], outer: list[int], closed: bool) -> str:
    """Put brackets around rows: a row has one opening bracket for each outer dim that begins with it."""
    depth, lines = len(outer), []
    for number, row in enumerate(rows):
        begins, ends, block = 0, 0, 1
        for extent in reversed(outer):
            block *= extent
            begins += number % block == 0
            ends += (number + 1) % block == 0
        after = "]" * (ends + 1) + ("," if ends < depth else "")
        if number == len(rows) - 1 and not closed:
            after = ","
        lines.append(f"{' ' * (depth - begins)}{'[' * (begins + 1)}{row}{after}")
    return "\n".join(lines)


def _number(value: object) -> str:
    if isinstance(value, list | tuple) and len(value) == 2:
        return f"{_number(value[0])}+{_number(value[1])}j".replace("+-", "-")
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value)) if value or str(value)[0] != "-" else "-0.0"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def call_text(finding: FindingRecord) -> str:
    """Return the smallest case's call in one line; tensors are shown by name, dtype, shape and placements."""
    tensors = iter(named_tensors(finding))

    def text(value: Any) -> str:
        if _as_tensor(value) is not None:
            named = next(tensors)
            return f"{named.name}: {named.type_text} {named.placements}".rstrip()
        if isinstance(value, dict):
            if len(value) == 1:  # a value with its kind, such as {"dtype": "float32"}
                (inner,) = value.values()
                return text(inner)
            return "{" + ", ".join(f"{key}: {text(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(text, value))}]"
        return repr(value)

    case = finding.trial.case
    arguments = [text(value) for value in case.args]
    for name, value in case.kwargs.items():
        written = text(value)
        arguments.append(written if written.startswith(f"{name}: ") else f"{name}={written}")
    return f"{case.call}({', '.join(arguments)})"
