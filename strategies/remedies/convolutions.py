"""The remedies for convolutions: of their handlers, and of what their kernels return."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from verifier.execution.remedies import Remedy
from verifier.placements.bounds import shard_bounds
from verifier.torch_internals.amending.handlers import HandledCall, as_rules_ask, borders_returned, unasked_left_out

__all__ = ["REMEDIES"]

aten = torch.ops.aten


def _is_exchanged(images: Any, placements: object, weight: Any, options: tuple[Any, ...]) -> bool:
    """Return whether ranks that cut the last dim of ``images`` only need the borders that the handler exchanges.

    An output column has to be on the rank of the input column at its centre; no border may be wider than a shard.
    """
    stride, padding, dilation, transposed = options[:4]
    last = images.ndim - 1
    if placements != (Shard(last),) or transposed or len(stride) != images.ndim - 2 or len(padding) != len(stride):
        return False
    border, width, ranks = padding[-1], images.shape[last], images.device_mesh.size()
    shards = [shard_bounds(width, ranks, rank) for rank in range(ranks)]
    centred = (stride[-1], dilation[-1], weight.shape[-1]) == (1, 1, 2 * border + 1)
    return bool(border and centred and min(stop - start for start, stop in shards) >= border)


def _forward(call: HandledCall) -> bool:
    images, weight, _, *options = call.args
    given, *others = call.placements
    whole = all(placements == (Replicate(),) for placements in others)
    return whole and call.on_whole_world and _is_exchanged(images, given, weight, tuple(options))


def _backward(call: HandledCall) -> bool:
    gradient, images, weight, _, *options = call.args
    _, given, parameters = call.placements
    # the handler counts the dims of images of height and width alone
    plane = images.ndim == 4 and gradient.placements == given and parameters == (Replicate(),)
    return plane and call.on_whole_world and _is_exchanged(images, given, weight, tuple(options))


@contextmanager
def _mended() -> Iterator[None]:
    forward = as_rules_ask(aten.convolution.default, _forward)
    with borders_returned(), forward, as_rules_ask(aten.convolution_backward.default, _backward):
        yield


REMEDIES = (
    Remedy(
        "convolution-handler",
        "convolution_handler and convolution_backward_handler (_tp_conv.py): redistribute the arguments as the "
        "strategies in _ops/_conv_ops.py ask, but ask convolution_rules where an exchange of borders is enough; and "
        "return the gradient from _ring_send_recv_aggregate",
        _mended,
        ("aten.convolution*", "aten.conv*", "aten.*conv*"),
    ),
    Remedy(
        "gradients-not-asked-for",
        "leave out a result of the local kernel for which there is no spec because the call has not asked for it "
        "(OpDispatcher.wrap in _dispatch.py)",
        unasked_left_out,
        ("aten.convolution_backward.*", "aten.conv*"),
        frozenset({"CRASH"}),
    ),
)
