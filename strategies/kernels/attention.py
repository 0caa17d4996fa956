"""Attention on the CPU, as the fused CUDA kernels of torch 2.13.0 document it: flash, memory-efficient and cuDNN."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from strategies.kernels.registering import registered

__all__ = ["cudnn", "cudnn_backward", "efficient", "efficient_backward", "flash", "flash_backward"]

Tensor = torch.Tensor
Maybe = torch.Tensor | None

_LSE_ALIGNMENT = 32
"""The memory-efficient kernel fills logsumexp with infinities up to a multiple of this many queries."""
_DEBUG_KEYS = 128
"""The keys of a debug mask are a multiple of this."""


class _Call(NamedTuple):
    """The arguments that all variants have; ``key`` and ``value`` have as many heads as ``query``."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Maybe
    causal: bool
    scale: float
    group: int

    def scores(self) -> Tensor:
        """Return the scores, [batch, heads, queries, keys], with -inf for keys that a query must not see."""
        scores = self.query @ self.key.transpose(-1, -2) * self.scale
        if self.bias is not None:
            scores = scores + self.bias
        if self.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        return scores


def _call(
    query: Tensor, key: Tensor, value: Tensor, bias: Maybe, dropout_p: float, causal: bool, scale: float | None,
    grouped: bool = True,
) -> _Call:  # fmt: skip
    if dropout_p:
        raise RuntimeError(f"dropout_p={dropout_p}: the stand-in kernel draws no random numbers")
    heads, kept = query.shape[1], key.shape[1]
    if query.shape[0] != key.shape[0] or key.shape[:3] != value.shape[:3] or query.shape[-1] != key.shape[-1]:
        raise RuntimeError(
            f"query, key and value do not fit: {list(query.shape)}, {list(key.shape)}, {list(value.shape)}"
        )
    if heads != kept and not (grouped and kept and heads % kept == 0):
        raise RuntimeError(f"number of heads in key and value ({kept}) must divide number of heads in query ({heads})")
    if bias is not None and bias.shape != (*query.shape[:3], key.shape[2]):
        raise RuntimeError(f"attn_bias has shape {list(bias.shape)}, expected {[*query.shape[:3], key.shape[2]]}")
    group = heads // kept if kept else 1
    if group > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    return _Call(query, key, value, bias, causal, scale or 1 / math.sqrt(max(1, query.shape[-1])), group)


def _forward(call: _Call) -> tuple[Tensor, Tensor]:
    """Return the output and the logsumexp, [batch, heads, queries]."""
    scores = call.scores()
    return scores.softmax(-1) @ call.value, scores.logsumexp(-1)


def _backward(call: _Call, grad: Tensor, out: Tensor, logsumexp: Maybe) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and bias, from what the forward pass saved."""
    if logsumexp is None or (call.query.numel() and not logsumexp.numel()):
        raise RuntimeError("the backward pass needs logsumexp, which the forward pass did not compute")
    weights = (call.scores() - logsumexp.to(call.query.dtype).unsqueeze(-1)).exp()
    grad_value = weights.transpose(-1, -2) @ grad
    grad_scores = weights * (grad @ call.value.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True))
    grad_query = grad_scores @ call.key * call.scale
    grad_key = grad_scores.transpose(-1, -2) @ call.query * call.scale
    if call.group > 1:
        grad_key, grad_value = (_by_group(t, call.group) for t in (grad_key, grad_value))
    return grad_query, grad_key, grad_value, grad_scores


def _by_group(gradient: Tensor, group: int) -> Tensor:
    """Return the sum of the gradients of each ``group`` of heads, which share a head of key and value."""
    batch, heads, *rest = gradient.shape
    return gradient.reshape(batch, heads // group, group, *rest).sum(2)


def _opaque() -> tuple[Tensor, Tensor]:
    """Return the seed and the offset of a generator: numbers that no sum of several ranks' numbers gives back."""
    return torch.tensor(1009), torch.tensor(12)


def _by_heads_last(tensor: Tensor) -> Tensor:
    """Return the tensor in the memory format [batch, sequence, heads, width], with its dims as before.

    ``contiguous`` would keep the strides of dims of one element, which the kernel does not.
    """
    return tensor.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


# --------------------------------------------------------------------------------------------------------------- flash
def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]:  # fmt: skip
    call = _call(query, key, value, None, dropout_p, is_causal, scale)
    _same_lengths(call)
    out, logsumexp = _forward(call)
    keys = -(-key.shape[2] // _DEBUG_KEYS) * _DEBUG_KEYS
    mask = query.new_ones((*query.shape[:3], keys) if return_debug_mask else (0,))
    state, unused = torch.tensor([1009, 12], dtype=torch.uint64), torch.tensor(0, dtype=torch.uint64)
    return out, logsumexp.float(), None, None, query.shape[2], key.shape[2], state, unused, mask


def _flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Maybe,
    cum_seq_k: Maybe, max_q: int, max_k: int, dropout_p: float, is_causal: bool, philox_seed: Tensor,
    philox_offset: Tensor, *, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    call = _call(query, key, value, None, dropout_p, is_causal, scale)
    _same_lengths(call)
    return _backward(call, grad_out, out, logsumexp)[:3]


def _same_lengths(call: _Call) -> None:
    if call.causal and call.query.shape[2] != call.key.shape[2]:
        raise RuntimeError("flash attention with is_causal needs as many queries as keys")


# ----------------------------------------------------------------------------------------------------------- efficient
def _efficient(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Maybe, compute_log_sumexp: bool, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    call = _call(query, key, value, attn_bias, dropout_p, is_causal, scale, grouped=False)
    out, logsumexp = _forward(call)
    length = -(-query.shape[2] // _LSE_ALIGNMENT) * _LSE_ALIGNMENT if compute_log_sumexp else 0
    padded = torch.full((*query.shape[:2], length), math.inf)
    if compute_log_sumexp:
        padded[..., : query.shape[2]] = logsumexp
    return _by_heads_last(out), padded, *_opaque()


def _efficient_backward(
    grad_out_: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Maybe, out: Tensor, logsumexp: Tensor,
    philox_seed: Tensor, philox_offset: Tensor, dropout_p: float, grad_input_mask: list[bool], is_causal: bool = False,
    *, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Maybe]:  # fmt: skip
    call = _call(query, key, value, attn_bias, dropout_p, is_causal, scale, grouped=False)
    *grads, grad_bias = _backward(call, grad_out_, out, logsumexp[..., : query.shape[2]])
    grad_query, grad_key, grad_value = map(_by_heads_last, grads)
    return grad_query, grad_key, grad_value, grad_bias if attn_bias is not None and grad_input_mask[3] else None


# --------------------------------------------------------------------------------------------------------------- cuDNN
def _cudnn(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Maybe, compute_log_sumexp: bool, dropout_p: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, Maybe, None, None, int, int, Tensor, Tensor, None]:  # fmt: skip
    call = _call(query, key, value, attn_bias, dropout_p, is_causal, scale)
    out, logsumexp = _forward(call)
    saved = logsumexp.float().unsqueeze(-1) if compute_log_sumexp else None
    return out, saved, None, None, query.shape[2], key.shape[2], *_opaque(), None


def _cudnn_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Maybe, philox_seed: Tensor,
    philox_offset: Tensor, attn_bias: Maybe, cum_seq_q: Maybe, cum_seq_k: Maybe, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, *, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    call = _call(query, key, value, attn_bias, dropout_p, is_causal, scale)
    return _backward(call, grad_out, out, None if logsumexp is None else logsumexp.squeeze(-1))[:3]


_ATTENTION = "_scaled_dot_product_{}_attention"
flash = registered(_ATTENTION.format("flash"), _flash)
flash_backward = registered(_ATTENTION.format("flash") + "_backward", _flash_backward)
efficient = registered(_ATTENTION.format("efficient"), _efficient)
efficient_backward = registered(_ATTENTION.format("efficient") + "_backward", _efficient_backward)
cudnn = registered(_ATTENTION.format("cudnn"), _cudnn)
cudnn_backward = registered(_ATTENTION.format("cudnn") + "_backward", _cudnn_backward)
