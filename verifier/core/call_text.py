"""A call as one line of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.distributed.tensor.placement_types import Placement

from verifier.core.arguments import unsupported_reason
from verifier.core.case import OpCase
from verifier.core.ops import parameter_names
from verifier.core.placement_text import format_placements

__all__ = [
    "describe_call",
    "kind_of_call",
]

_SHORT_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c", "bool": "b"}
_MOST_ITEMS = 6


def describe_call(case: OpCase, rows: Sequence[tuple[str, str]] | None) -> str:
    """Return the call on one line: ``weight=f64[17, 4] S(0), indices=i64[5] R, padding_idx=3``.

    At most six items of a list are shown. Arguments that are None are left out, except in lists.

    Parameters
    ----------
    rows
        Name and placements of each tensor argument that is distributed, as ``combination_rows`` returns them; None to
        leave out placements.

    >>> x, w = torch.zeros(3, 4), torch.zeros(2, 4)
    >>> cat = OpCase("aten.cat.default", "torch.ops.aten.cat.default", ([x, w], 0))
    >>> describe_call(cat, [("tensors[0]", "S(0)"), ("tensors[1]", "R")])
    'tensors=[f32[3, 4] S(0), f32[2, 4] R], dim=0'
    """
    known = parameter_names(case.call)
    names = [known[i] if i < len(known) else f"argument {i}" for i in range(len(case.args))]
    placements = None if rows is None else iter([placements for _, placements in rows])
    arguments = [*zip(names, case.args, strict=True), *case.kwargs.items()]
    texts = [(name, _brief(value, placements)) for name, value in arguments if value is not None]
    return ", ".join(f"{name}={text}" for name, text in texts)


def kind_of_call(case: OpCase) -> str:
    """Return the call without the sizes of its tensors: what decides about sharding rules, as far as text can say it.

    A tensor is its kind of dtype, and for each dim whether its size is 0, 1 or another, ``n``. Arguments that are None
    are left out.

    >>> x, w = torch.zeros(3, 4), torch.zeros(1, 4, dtype=torch.int64)
    >>> kind_of_call(OpCase("aten.cat.default", "torch.ops.aten.cat.default", ([x, w], 0)))
    'tensors=[f[n, n], i[1, n]], dim=0'
    """
    known = parameter_names(case.call)
    names = [known[i] if i < len(known) else f"argument {i}" for i in range(len(case.args))]
    arguments = [*zip(names, case.args, strict=True), *case.kwargs.items()]
    return ", ".join(f"{name}={_kind(value)}" for name, value in arguments if value is not None)


def _kind(value: object) -> str:
    match value:
        case torch.Tensor():
            number = "c" if value.is_complex() else "f" if value.is_floating_point() else "i"
            kind = "b" if value.dtype == torch.bool else number
            return f"{kind}[{', '.join(str(size) if size < 2 else 'n' for size in value.shape)}]"
        case list() | tuple():
            return f"[{', '.join(map(_kind, value))}]"
        case _:
            return _brief(value, None)


def _brief(value: object, placements: Iterator[str] | None) -> str:
    """Return an argument as short text; each tensor that is distributed takes the next of ``placements``."""
    match value:
        case torch.Tensor():
            dtype = str(value.dtype).removeprefix("torch.")
            letters = dtype.rstrip("0123456789")
            text = f"{_SHORT_DTYPES.get(letters, letters)}{dtype[len(letters) :]}{list(value.shape)}"
            return text if placements is None or unsupported_reason(value) is not None else f"{text} {next(placements)}"
        case list() | tuple():
            items = [_brief(item, placements) for item in value]  # all of them, to keep step with placements
            more = [f"{len(items) - _MOST_ITEMS} more"] if len(items) > _MOST_ITEMS else []
            return f"[{', '.join([*items[:_MOST_ITEMS], *more])}]"
        case dict():
            return f"{{{', '.join(f'{key}: {_brief(item, placements)}' for key, item in value.items())}}}"
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(value).removeprefix("torch.")
        case Placement():
            return format_placements((value,))
        case bool() | int() | float() | complex() | str() | None:
            return repr(value)
        case torch.device():
            return str(value)
        case _:
            return f"a {type(value).__name__}"
