"""Calls of the fused attention ops: grouped heads, bias, causal, other widths of values, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from strategies.opinfo.handmade.sample import Draw, Way
from verifier.core.ops import resolve

__all__ = ["WAYS"]


class _Extents(NamedTuple):
    """The extents of query, key and value; ``heads`` are those of key and value."""

    batch: int
    heads: int
    queries: int
    keys: int
    width: int


# all extents differ, so that a mix-up of dims shows; then one head; then all are equal, so that a mix-up is silent
_SIZES = (
    _Extents(5, 6, 7, 9, 4),
    _Extents(3, 2, 5, 4, 8),
    _Extents(4, 4, 4, 4, 4),
    _Extents(6, 5, 4, 3, 8),
    _Extents(2, 8, 5, 7, 4),
)


@dataclass(frozen=True)
class _Kind:
    """How a call of attention is made.

    Parameters
    ----------
    group
        Heads of the query for each head of key and value.
    heads
        Heads of key and value, instead of those of the size.
    bias_gradient
        Whether the backward pass is asked for the gradient of the bias.
    everything
        Whether what DTensor does not claim of the forward pass is tried, too.
    """

    label: str
    group: int = 1
    heads: int | None = None
    causal: bool = False
    bias: bool = False
    bias_gradient: bool = True
    scale: float | None = None
    logsumexp: bool = True
    debug: bool = False
    everything: bool = False
    wide: bool = False

    def inputs(self, draw: Draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return query, key, value and bias; ``causal`` has as many queries as keys."""
        size = _SIZES[draw.size]
        keys = size.queries if self.causal else size.keys
        heads = self.heads or size.heads
        query = draw.small(size.batch, heads * self.group, size.queries, size.width)
        key = draw.small(size.batch, heads, keys, size.width)
        value = draw.values(size.batch, heads, keys, size.width + 4 * self.wide)
        bias = draw.values(*query.shape[:3], keys) if self.bias else None
        return query, key, value, bias

    def named(self, draw: Draw) -> dict[str, object]:
        return {} if self.scale is None else {"scale": self.scale}


_TOGETHER = "what the forward pass saved belongs together: only what DTensor claims is tried"
_VARIATION = "a variation of a call of which everything is tried: only what DTensor claims is tried"
_PLAIN = _Kind("plain", everything=True)
_BIASED = _Kind("bias", bias=True, everything=True)
_CAUSAL = _Kind("causal, scale", causal=True, scale=4.0)
_PAIRS = replace(_CAUSAL, label="causal, scale, groups of 2 heads", group=2)
# 3 heads for 12 of the query: on 2 ranks no shards of heads belong together, and yet all shards have legal sizes
_FOURS = _Kind("groups of 4 heads", group=4, heads=3)
_SHORT, _DEBUG = _Kind("no logsumexp", logsumexp=False), _Kind("debug mask", debug=True)
_KINDS: dict[str, tuple[_Kind, ...]] = {
    "flash": (_PLAIN, _PAIRS, _FOURS, _DEBUG),
    "efficient": (
        _PLAIN, _BIASED, replace(_CAUSAL, label="causal, scale, bias, wide values", wide=True, bias=True), _SHORT,
        _Kind("bias without a gradient", bias=True, bias_gradient=False),
    ),
    "cudnn": (_PLAIN, _BIASED, _PAIRS, _FOURS, _SHORT, _DEBUG),
}  # fmt: skip


def _forward_arguments(name: str, kind: _Kind, draw: Draw) -> tuple[object, ...]:
    query, key, value, bias = kind.inputs(draw)
    if name == "flash":
        return query, key, value, 0.0, kind.causal, kind.debug
    given = (query, key, value, bias, kind.logsumexp, 0.0, kind.causal)
    return (*given, kind.debug) if name == "cudnn" else given


def _backward_arguments(name: str, kind: _Kind, draw: Draw) -> tuple[object, ...]:
    """Return the arguments of the backward op, with what the forward op saves for it."""
    args: tuple[Any, ...] = _forward_arguments(name, kind, draw)
    forward: Any = resolve(f"strategies.kernels.attention.{name}")
    saved = forward(*args, **kind.named(draw))
    out, logsumexp = saved[:2]
    query, key, value = args[:3]
    bias = None if name == "flash" else args[3]
    grad = draw.values(*out.shape)
    if name == "efficient":
        mask = [True, True, True, bias is not None and kind.bias_gradient]
        return grad, query, key, value, bias, out, logsumexp, *saved[2:4], 0.0, mask, kind.causal
    _, _, cum_q, cum_k, max_q, max_k, seed, offset, _ = saved
    if name == "flash":  # no collective of gloo takes uint64
        seed, offset = seed.to(torch.int64), offset.to(torch.int64)
        return grad, query, key, value, out, logsumexp, cum_q, cum_k, max_q, max_k, 0.0, kind.causal, seed, offset
    return grad, query, key, value, out, logsumexp, seed, offset, bias, cum_q, cum_k, max_q, max_k, 0.0, kind.causal


Arguments = Callable[[str, _Kind, Draw], tuple[object, ...]]


def _ways() -> Iterator[Way]:
    def made(arguments: Arguments, name: str, kind: _Kind) -> Callable[[Draw], tuple[object, ...]]:
        return lambda draw: arguments(name, kind, draw)

    for name, kinds in _KINDS.items():
        op = f"aten._scaled_dot_product_{name}_attention"
        for kind in kinds:
            if kind.bias_gradient:
                forward = made(_forward_arguments, name, kind)
                limit = "" if kind.everything else _VARIATION
                yield Way(f"{op}.default", kind.label, forward, kind.named, claims_only=limit)
            if kind.logsumexp and not kind.debug:
                backward = made(_backward_arguments, name, kind)
                yield Way(f"{op}_backward.default", kind.label, backward, kind.named, claims_only=_TOGETHER)


WAYS = tuple(_ways())
