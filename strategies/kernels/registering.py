"""Registers kernels for the CPU, for the life of the process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["registered", "registered_beside"]


def registered(name: str, kernel: Callable[..., object]) -> Any:
    """Return the overload ``aten.NAME.default``; ``kernel`` runs it on the CPU from now on if torch has no kernel."""
    if _torchs_kernel(name) is None:
        torch.library.impl(f"aten::{name}", "CPU", kernel)
    return getattr(torch.ops.aten, name).default


def registered_beside(name: str, kernel: Callable[..., object], covers: Callable[..., bool]) -> Any:
    """Return the overload; torch's kernel runs it on the CPU, and ``kernel`` runs calls that torch's kernel refuses.

    ``covers`` returns whether ``kernel`` takes a call.
    """
    torchs = _torchs_kernel(name)
    if torchs is None:
        return registered(name, kernel)

    def either(keys: Any, *args: object) -> object:
        try:
            return torchs.call_boxed(keys, *args)
        except (RuntimeError, ValueError):
            if covers(*args):
                return kernel(*args)
            raise

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that a kernel of its own is replaced
        _library.impl(name, either, "CPU", with_keyset=True)
    return getattr(torch.ops.aten, name).default


_library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


def _torchs_kernel(name: str) -> Any:
    """Return torch's own kernel for the CPU, or None."""
    try:
        return torch.library.get_kernel(f"aten::{name}", "CPU")
    except RuntimeError:
        return None
