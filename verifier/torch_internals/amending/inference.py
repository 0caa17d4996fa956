"""Amendments to what DTensor does in inference mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

from verifier.torch_internals.amending.registrations import handled_where
from verifier.torch_internals.ops import is_composite, registered_overloads

__all__ = ["composites_decomposed", "views_count_versions"]


def _gives_views(op: OpOverload) -> bool:
    aliases = [one.alias_info for one in op._schema.arguments if one.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


@contextlib.contextmanager
def views_count_versions() -> Iterator[None]:
    """Let views in inference mode of a DTensor from outside count versions, as those of plain tensors do."""

    def handler(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        outside = torch.is_inference_mode_enabled() and not args[0].is_inference()
        inference = torch.inference_mode(False) if outside else contextlib.nullcontext()
        with torch.no_grad(), inference:
            return op(*args, **kwargs)

    with handled_where(_gives_views, handler):
        yield


@contextlib.contextmanager
def composites_decomposed() -> Iterator[None]:
    """Let a composite op without a rule be decomposed by its kernel in every mode, before DTensor looks for a rule.

    Inside of a dispatch, kernels do not resolve what is lazily conjugated, negated or zero; here they do.
    """
    ruled = registered_overloads()

    def handler(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        left_out = torch._C._dispatch_tls_local_exclude_set()
        for key in (DispatchKey.Conjugate, DispatchKey.Negative, DispatchKey.ZeroTensor):
            left_out = left_out.remove(key)
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), left_out):
            return op._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)

    with handled_where(is_composite, handler, but=ruled):
        yield
