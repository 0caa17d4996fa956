"""Convolutions that are wrong in one way each: in what the rules claim, or in what DTensor's handlers do with them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rule_strategies import AVG, MAX, SUM, R, Rule
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, _tp_conv
from torch.distributed.tensor._ops import _conv_ops
from torch.distributed.tensor.placement_types import Placement

from verifier.torch_internals.caches import clear_caches
from verifier.torch_internals.registries import replaced_strategy

__all__ = ["HANDLERS", "RULES", "ConvMutant", "edit", "edited", "restore"]

aten = torch.ops.aten
FORWARD, BACKWARD = "aten.convolution.default", "aten.convolution_backward.default"
N, C, H, W = (Shard(dim) for dim in range(4))


@dataclass(frozen=True)
class ConvMutant:
    """A fault, and the context in which torch has it."""

    name: str
    op: str
    apply: Callable[[], AbstractContextManager[None]]


# --------------------------------------------------------------------------------------------------------------- rules
def forward(output: Placement, given: Placement, weight: Placement, bias: Placement) -> ConvMutant:
    """Return a rule of convolutions that does not hold, and takes the place of all others."""

    def rules(op: object, args: Any, kwargs: object) -> list[Rule]:
        return [[output, given, weight, *([] if args[2] is None else [bias])]]

    name = f"{given},{weight},{bias}->{output}"
    return ConvMutant(name, FORWARD, lambda: replaced_strategy(aten.convolution.default, rules))


def backward(
    results: tuple[Placement, Placement, Placement], gradient: Placement, given: Placement, weight: Placement
) -> ConvMutant:
    """Return a rule of the gradients of convolutions that does not hold, and takes the place of all others."""

    def rules(op: object, args: Any, kwargs: object) -> list[Rule]:
        bias = None if args[3] is None else results[2]
        return [[results[0], results[1], bias, gradient, given, weight]]

    name = f"{gradient},{given},{weight}->{','.join(map(str, results))}"
    return ConvMutant(name, BACKWARD, lambda: replaced_strategy(aten.convolution_backward.default, rules))


RULES = (
    forward(C, N, R, R),  # the batch cut called a cut of the channels
    forward(N, R, N, N),  # the output channels cut called a cut of the batch
    forward(C, R, N, N),  # true without groups only
    forward(SUM, C, C, R),  # the bias added on every rank
    forward(SUM, SUM, R, R),  # as above
    forward(H, H, R, R),  # no border from the neighbours
    forward(R, N, R, R),
    forward(MAX, MAX, R, R),
    backward((N, R, SUM), N, N, R),  # a gradient that is not reduced
    backward((N, SUM, R), N, N, R),
    backward((N, N, SUM), N, N, R),
    backward((N, AVG, SUM), N, N, R),
    backward((C, SUM, SUM), N, N, R),
    backward((R, SUM, SUM), N, N, R),
)


# ------------------------------------------------------------------------------------------------------------ handlers
@contextmanager
def edited(function: str, before: str, after: str) -> Iterator[None]:
    """Let torch's function for convolutions have ``after`` for the first ``before`` in its source."""
    module = next(one for one in (_tp_conv, _conv_ops) if function in vars(one))
    original = vars(module)[function]
    tree = ast.parse(textwrap.dedent(inspect.getsource(original)))
    tree.body[0].decorator_list = []  # type: ignore[attr-defined]
    source = ast.unparse(tree)
    assert before in source, before
    names = dict(vars(module))
    exec(compile(source.replace(before, after, 1), str(module.__file__), "exec"), names)
    kept = original.__code__
    original.__code__ = names[function].__code__  # the registries hold this object
    clear_caches()
    try:
        yield
    finally:
        original.__code__ = kept
        clear_caches()


_edits = ExitStack()


def edit(mesh: DeviceMesh, function: str, before: str, after: str) -> None:
    """As :func:`edited`, in this rank, until :func:`restore`."""
    _edits.enter_context(edited(function, before, after))


def restore(mesh: DeviceMesh) -> None:
    _edits.close()


def handler(name: str, op: str, function: str, before: str, after: str) -> ConvMutant:
    return ConvMutant(name, op, lambda: edited(function, before, after))


HANDLERS = (
    handler("batch_is_exchanged", FORWARD, "_requires_data_exchange", "dim_map[1:]", "dim_map"),
    handler("everything_is_exchanged", FORWARD, "_requires_data_exchange", "x == -1", "x != -1"),
    handler("forward_exchanges_always", FORWARD, "tp_convolution", "if not _requires", "if _requires"),
    handler("backward_exchanges_always", BACKWARD, "tp_convolution_backward", "if not _requires", "if _requires"),
)
"""Faults that show at layouts of which the handler is right otherwise."""
