"""Overloads, decompositions and definitions of ops."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import TypeVar, TypeVarTuple

import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._decompositions import DecompShardingStrategy
from torch.utils import _pytree as pytree

from verifier.torch_internals.registries import registries_of_rules

__all__ = [
    "cache_by_rules",
    "definition_of",
    "fake_tensors",
    "has_decomposition",
    "has_gradient_formula",
    "is_composite",
    "load_compiler",
    "registered_overloads",
    "selected_overload",
    "written_tensors",
]


Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


def written_tensors(op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> list[torch.Tensor]:
    """Return the tensors that a call writes to, in place or as ``out=``, those in lists among them."""
    named = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | dict(kwargs)
    written = [
        named.get(argument.name)
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, torch.Tensor)]


def cache_by_rules(function: Callable[[*Arguments], Result]) -> Callable[[*Arguments], Result]:
    """Return ``function``, which remembers results for as long as the same ops have rules.

    A process may prepare before it runs a user's file, and the file may register a rule for an op that had none.
    """

    @cache
    def results(_: frozenset[OpOverload], *args: *Arguments) -> Result:
        return function(*args)

    @wraps(function)
    def remembering(*args: *Arguments) -> Result:
        # sizes and what came last tell, at little cost, whether a registry has changed
        state = tuple((len(ops), next(reversed(ops), None)) for ops in registries_of_rules())
        return results(_registered_at(state), *args)

    return remembering


@cache
def _registered_at(_: tuple[tuple[int, OpOverload | None], ...], /) -> frozenset[OpOverload]:
    return registered_overloads()


def registered_overloads() -> frozenset[OpOverload]:
    """Return the overloads for which DTensor has a rule in any of its registries."""
    _, *rules = registries_of_rules()
    return frozenset().union(*rules, DTensor._op_dispatcher._random_ops)


def selected_overload(op: object, args: Sequence[object], kwargs: Mapping[str, object]) -> OpOverload | None:
    """Return the overload that a call of ``op`` runs, where ``op`` is a packet such as ``torch.ops.aten.sum``.

    ``op`` may also be a function made a custom op. The result is None for any other object, or if no overload fits.
    """
    if isinstance(op, CustomOpDef):
        return op._opoverload
    if not isinstance(op, OpOverloadPacket):
        return None
    names: list[str] = op.overloads()  # type: ignore[no-untyped-call]
    if len(names) > 1:
        try:
            names = [torch._C._jit_resolve_packet(op._qualified_op_name, *args, **kwargs) or "default"]
        except RuntimeError:  # no overload fits; the call itself will report it
            return None
    overload: OpOverload = getattr(op, names[0])
    return overload


def definition_of(op: OpOverload) -> Callable[..., object] | str:
    """Return the function that was made a custom op, or the file that registers an operator of a library."""
    name = op._schema.name
    if (made := OPDEFS.get(name)) is not None:
        function: Callable[..., object] = made._init_fn
        return function
    found = re.search(r"^debug: registered at (.*):\d+$", torch._C._dispatch_dump(name), re.MULTILINE)
    return found[1] if found else ""


def has_decomposition(op: OpOverload) -> bool:
    """Return whether DTensor can derive the sharding of ``op`` from a decomposition."""
    return bool(DecompShardingStrategy.has_decomp(op))


def is_composite(op: OpOverload) -> bool:
    """Return whether autograd decomposes ``op``, so that DTensor sees the op itself only in inference mode."""
    name: str = op.name()  # type: ignore[no-untyped-call]
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


def has_gradient_formula(op: OpOverload) -> bool:
    """Return whether autograd knows ``op``, or decomposes it; else what its kernel is made of may have gradients."""
    name: str = op.name()  # type: ignore[no-untyped-call]
    keys = ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)


def load_compiler() -> None:
    """Load torch's compiler, as the first fake tensor of a process does; takes half a second."""
    importlib.import_module("torch._dynamo")


@contextmanager
def fake_tensors() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Yield a function that returns a tensor without values for a tensor; ops in the block run their fake kernels.

    What one of them raises goes to the caller alone: torch logs it with its traceback, too.
    """
    mode, log = FakeTensorMode(), logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        with mode:
            yield mode.from_tensor
    finally:
        log.disabled = before
