"""The backward pass of RMSNorm on the CPU, as its fused CUDA kernel documents it."""

from __future__ import annotations

import torch

from strategies.kernels.registering import registered

__all__ = ["backward"]


def _backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: list[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    output_mask: list[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    last = list(range(input.ndim - len(normalized_shape), input.ndim))
    if list(input.shape[last[0] :]) != list(normalized_shape):
        raise RuntimeError(f"input of shape {list(input.shape)} does not end in normalized_shape={normalized_shape}")
    normal = input * rstd
    grad = grad_out if weight is None else grad_out * weight
    grad_input = rstd * (grad - normal * (grad * normal).mean(last, keepdim=True)) if output_mask[0] else None
    grad_weight = None
    if weight is not None and output_mask[1]:
        outer = list(range(last[0]))
        grad_weight = (grad_out * normal).sum(outer) if outer else grad_out * normal
    return grad_input, grad_weight


backward = registered("_fused_rms_norm_backward", _backward)
