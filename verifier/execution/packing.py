"""Bytes between processes: calls, tensors and placements, without pickle's code."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import nn

from verifier.records.values import check_dense

__all__ = [
    "pack",
    "unpack",
]


def pack(obj: object) -> bytes:
    """Return ``obj`` as bytes for a pipe between processes of one run; :func:`unpack` is the inverse.

    Any picklable object, with tensors anywhere in it. Tensors keep dtype, shape, strides (by copying the memory
    between their first and last element), ``requires_grad`` and whether they are parameters, and these their own
    attributes, such as marks for an optimiser; they come back as leaves on the CPU. A tensor object that occurs twice
    comes back as one object.

    Not a format for files: it is a pickle, and only what the same version wrote in the same run may be read.

    Raises
    ------
    TypeError
        If ``obj`` holds a tensor that is not dense, such as a sparse tensor or a ``DTensor``.

    >>> unpack(pack([torch.ones(2, 3).T, "text"]))[0].stride()
    (1, 3)
    """
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(obj)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """Return the object that :func:`pack` was given."""
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    """Pickle, except for tensors. Placements go the usual way: pickle keeps them equal and takes 2 us for one."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        check_dense(obj, "the tensor")
        tensor = obj.detach().resolve_conj().resolve_neg().cpu()
        raw = bytearray()
        if tensor.numel():
            span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            # Bytes, because NumPy has no bfloat16; a bytearray, because torch reads only writable buffers in place.
            raw = bytearray(tensor.as_strided((span,), (1,)).view(torch.uint8).numpy())
        plain = (obj.dtype, tuple(obj.shape), tensor.stride(), raw, obj.requires_grad, isinstance(obj, nn.Parameter))
        if isinstance(obj, nn.Parameter) and obj.__dict__:
            return _restore_tensor, plain, dict(obj.__dict__), None, None, _restore_attributes
        return _restore_tensor, plain


def _restore_attributes(parameter: nn.Parameter, attributes: dict[str, object]) -> None:
    parameter.__dict__.update(attributes)


def _restore_tensor(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    raw: bytearray,
    requires_grad: bool,
    parameter: bool,
) -> torch.Tensor:
    # Owns its memory and is no view, as a tensor that an op may resize or write to in place has to be.
    tensor = torch.empty_strided(shape, stride, dtype=dtype)
    if raw:
        flat = torch.frombuffer(raw, dtype=dtype)
        tensor.as_strided(flat.shape, (1,)).copy_(flat)
    if parameter:
        return nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)
