"""Messages from a rank to the controller as bytes: reports of trials, of which there are thousands, and the few others.

A report is MessagePack, which takes a tenth of the time of a pickle on both sides; all other messages are pickles.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from verifier.core.observation import ProcessReport
from verifier.execution.packing import pack, unpack

__all__ = ["pack_message", "pack_report", "unpack_message"]


class _Reported(msgspec.Struct, frozen=True, array_like=True):
    kind: str
    trial: int
    report: ProcessReport


def _pack_tensor(value: object) -> object:
    assert isinstance(value, torch.Tensor), f"a report with a {type(value).__name__} in it"
    if _is_plain(value):
        flat = value.as_strided((value.numel(),), (1,))  # along a dim of size 1 a contiguous tensor has any stride
        return str(value.dtype)[6:], value.shape, flat.view(torch.uint8).numpy().tobytes()
    return pack(value)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether dtype, shape and bytes are all there is of ``tensor``; most parts of a Partial are such."""
    simple = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
    lazy = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    return simple and tensor.is_contiguous() and not (lazy or tensor.requires_grad)


def _unpack_untyped(wanted: type, data: Any) -> object:
    if wanted is not torch.Tensor:
        return data  # what a task returned, which is None here
    if isinstance(data, bytes):
        return unpack(data)
    dtype, shape, raw = data
    if not raw:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack_tensor)
_decoder = msgspec.msgpack.Decoder(_Reported, dec_hook=_unpack_untyped)
_PICKLE = b"\x80"
"""How every pickle begins since its protocol 2; an array of MessagePack begins with another byte."""


def pack_message(kind: str, trial: int, payload: object) -> bytes:
    """Return a message, of any payload that :func:`verifier.execution.packing.pack` takes, as bytes."""
    return pack((kind, trial, payload))


def pack_report(kind: str, trial: int, report: ProcessReport) -> bytes:
    """Return a message with a report as bytes.

    Raises
    ------
    TypeError
        If a contribution is no dense tensor, or if a task returned what cannot be pickled.
    """
    if report.returned is None:
        try:
            return _encoder.encode(_Reported(kind, trial, report))
        except UnicodeEncodeError:  # an exception whose message has half a surrogate pair: MessagePack is UTF-8
            pass
    return pack_message(kind, trial, report)


def unpack_message(data: bytes) -> tuple[str, int, Any]:
    """Return a message as ``(kind, trial, payload)``."""
    if data.startswith(_PICKLE):
        kind, trial, payload = unpack(data)
        return kind, trial, payload
    message = _decoder.decode(data)
    return message.kind, message.trial, message.report
