"""Convolutions, forward and backward: those of which DTensor's handler does something else, and equal sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from strategies.opinfo.handmade.sample import Draw, Way

__all__ = ["WAYS"]

_BATCH = (4, 3, 6, 5, 2)
"""By size. DTensor's rules cut batches evenly, so each number of ranks up to 3 divides some of these."""
_WIDTH = (6, 9, 8, 5, 7)
"""By size: even and uneven shards, of which each is at least as wide as the border of a neighbour."""
_HEIGHT = (8, 6, 4, 10, 9)
"""By size, mostly even: where shards of the height differ, torch's handler sends messages of another size than it
receives, which ends the process of a rank."""


@dataclass(frozen=True)
class _Convolution:
    """Arguments of a convolution, with one number for each spatial dim.

    Parameters
    ----------
    channels
        Of the input and of the output, both divisible by ``groups``.
    equal
        Whether batch, channels and spatial dims all have the same size, so that a mix-up of dims shows in values alone.
    """

    label: str
    kernel: tuple[int, ...]
    padding: tuple[int, ...]
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    channels: tuple[int, int] = (4, 3)
    bias: bool = True
    transposed: bool = False
    output_padding: int = 0
    equal: bool = False

    @property
    def row(self) -> str:
        """The OpInfo of the function that users call."""
        return f"nn.functional.conv{'_transpose' * self.transposed}{len(self.kernel)}d"

    def tensors(self, draw: Draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return input [batch, channels, ...], weight and bias."""
        given, made = self.channels
        sizes = (given,) * 3 if self.equal else (_BATCH[draw.size], _HEIGHT[draw.size], _WIDTH[draw.size])
        batch, height, width = sizes
        heights = (height,) * (len(self.kernel) - 1)
        first, second = (given, made) if self.transposed else (made, given)
        weight = draw.values(first, second // self.groups, *self.kernel)
        return draw.values(batch, given, *heights, width), weight, draw.values(made) if self.bias else None

    @property
    def options(self) -> tuple[object, ...]:
        ndim = len(self.kernel)
        return (
            [self.stride] * ndim, list(self.padding), [self.dilation] * ndim, self.transposed,
            [self.output_padding] * ndim, self.groups,
        )  # fmt: skip

    def forward(self, draw: Draw) -> tuple[object, ...]:
        return (*self.tensors(draw), *self.options)

    def backward(self, mask: tuple[bool, bool, bool], draw: Draw) -> tuple[object, ...]:
        given, weight, bias = self.tensors(draw)
        made = torch.ops.aten.convolution.default(given, weight, bias, *self.options)
        sizes = None if bias is None else list(bias.shape)
        return (draw.values(*made.shape), given, weight, sizes, *self.options, list(mask))


_PLANE = _Convolution("borders exchanged", (3, 3), (1, 1))
_CONVOLUTIONS = (
    _PLANE,
    replace(_PLANE, label="borders exchanged, no bias", kernel=(3, 5), padding=(1, 2), bias=False),
    replace(_PLANE, label="equal sizes", channels=(4, 4), equal=True),
    replace(_PLANE, label="groups", groups=2, channels=(4, 6)),
    replace(_PLANE, label="a group for each channel", groups=4, channels=(4, 8), bias=False),
    replace(_PLANE, label="equal sizes in groups", groups=2, channels=(4, 4), equal=True),
    replace(_PLANE, label="stride", stride=2),
    replace(_PLANE, label="dilation", dilation=2, padding=(2, 2)),
    replace(_PLANE, label="no padding", padding=(0, 0)),
    replace(_PLANE, label="padding of the last dim alone", padding=(0, 1)),
    replace(_PLANE, label="padding of all dims but the last", padding=(1, 0), bias=False),
    replace(_PLANE, label="an even kernel", kernel=(2, 2)),
    replace(_PLANE, label="patches", kernel=(2, 2), padding=(0, 0), stride=2),
    replace(_PLANE, label="transposed", transposed=True, stride=2, output_padding=1),
    replace(_PLANE, label="transposed, groups", transposed=True, groups=2, channels=(4, 6), bias=False),
    replace(_PLANE, label="transposed, equal sizes", transposed=True, channels=(4, 4), equal=True),
    _Convolution("borders exchanged", (3,), (1,)),
    _Convolution("groups and stride", (3,), (1,), stride=2, groups=2, channels=(4, 6), bias=False),
    _Convolution("equal sizes", (3,), (1,), channels=(4, 4), equal=True),
    _Convolution("transposed", (3,), (1,), transposed=True),
    _Convolution("borders exchanged", (1, 3, 3), (0, 1, 1)),
    _Convolution("dilation and groups", (1, 2, 2), (0, 1, 1), dilation=2, groups=2, channels=(4, 4), bias=False),
    _Convolution("transposed", (1, 2, 2), (0, 0, 0), transposed=True, stride=2),
)
_MASKS = ((True, True, True), (False, True, True), (True, False, False))
"""Which gradients are asked for, of the input, the weight and the bias; in turn, and all of them every other time."""


def _ways() -> Iterator[Way]:
    for number, one in enumerate(_CONVOLUTIONS):
        label, tags = f"{one.row.rpartition('.')[2]}, {one.label}", frozenset({f"convolution: {one.label}"})
        yield Way("aten.convolution.default", label, one.forward, row=one.row, tags=tags)
        masks = dict.fromkeys((_MASKS[0], _MASKS[number % len(_MASKS)]))
        for wanted in masks:
            mask = (*wanted[:2], wanted[2] and one.bias)
            text = f"{label}, gradients {''.join('01'[each] for each in mask)}"

            def make(draw: Draw, one: _Convolution = one, mask: tuple[bool, bool, bool] = mask) -> tuple[object, ...]:
                return one.backward(mask, draw)

            yield Way("aten.convolution_backward.default", text, make, row=one.row, tags=tags)


WAYS = tuple(_ways())
