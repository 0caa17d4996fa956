"""The stand-in kernels, held against plain formulas, autograd and the shapes that torch documents."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from strategies.kernels import STAND_INS
from strategies.kernels.attention import cudnn, efficient, flash
from strategies.kernels.rms_norm import backward
from strategies.kernels.scaled_mm import product
from strategies.opinfo.handmade import handmade_samples
from verifier.core.case import OpCase
from verifier.core.ops import resolve
from verifier.rules.samples import SampleOptions
from verifier.torch_internals.names import pytree

OPTIONS = SampleOptions()
ATTENTION = sorted(op for op in STAND_INS if "attention" in op)


def cases(op: str) -> list[OpCase]:
    return [case for s in handmade_samples(op, OPTIONS) for size in range(3) if (case := s.draw(size, 0)) is not None]


def run(case: OpCase, args: tuple[Any, ...] | None = None) -> Any:
    return resolve(case.call)(*(case.args if args is None else args), **case.kwargs)


def math_path(query: Any, key: Any, value: Any, bias: Any, causal: bool, scale: float | None) -> torch.Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return scaled_dot_product_attention(
            query, key, value, bias, is_causal=causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )


@pytest.mark.parametrize("op", [op for op in ATTENTION if "backward" not in op])
def test_attention_and_its_gradients_are_those_of_the_math_path(op: str) -> None:
    for case in cases(op):
        query, key, value, *rest = case.args
        bias, causal = (None, rest[1]) if "flash" in op else (rest[0], rest[3])
        given = [t.clone().requires_grad_() for t in (query, key, value, bias) if t is not None]
        if "cudnn" in op and bias is not None:
            given[3] = given[3].detach()  # cuDNN gives the bias no gradient
        again = [t.clone().requires_grad_() for t in given]
        out = run(case, (*given[:3], *([given[3]] if bias is not None else []), *rest[len(given) - 3 :]))[0]
        expected = math_path(*again[:3], again[3] if bias is not None else None, causal, case.kwargs.get("scale"))
        torch.testing.assert_close(out, expected)
        if "flash" in op or rest[1]:  # the backward pass needs logsumexp
            cotangent = torch.arange(1.0, 1 + out.numel(), dtype=out.dtype).view(out.shape) / out.numel()
            wanted = [i for i, tensor in enumerate(given) if tensor.requires_grad]
            got = torch.autograd.grad(out, [given[i] for i in wanted], cotangent)
            true = torch.autograd.grad(expected, [again[i] for i in wanted], cotangent)
            torch.testing.assert_close(got, true, rtol=1e-5, atol=1e-5)  # logsumexp is saved as float32


@pytest.mark.parametrize("op", [op for op in ATTENTION if "backward" not in op])
def test_logsumexp_is_that_of_the_scores(op: str) -> None:
    case = cases(op)[0]
    query, key, *_ = case.args
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    saved = run(case)[1]
    length = query.shape[2]
    saved = saved.squeeze(-1) if "cudnn" in op else saved
    torch.testing.assert_close(saved[..., :length], scores.logsumexp(-1).float())
    assert bool(saved[..., length:].isinf().all())


@pytest.mark.parametrize("op", sorted(STAND_INS))
def test_results_have_the_shapes_and_dtypes_that_torch_documents(op: str) -> None:
    undocumented = {"aten._scaled_dot_product_cudnn_attention.default": 1}
    for case in cases(op):
        meta = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), (case.args, dict(case.kwargs)))
        if op == "aten._scaled_mm.default" and case.args[2].numel() > 1 and case.args[2].shape[1] > 1:
            continue  # its shapes are checked for CUDA only
        documented = pytree.tree_leaves(resolve(case.call)(*meta[0], **meta[1]))
        got = pytree.tree_leaves(run(case))
        assert len(got) == len(documented)
        for place, (mine, theirs) in enumerate(zip(got, documented, strict=True)):
            if isinstance(mine, torch.Tensor) and theirs.dtype != torch.uint64 and mine.dtype != torch.int64:
                assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), (op, place)
            elif not isinstance(mine, torch.Tensor) and undocumented.get(op) != place:
                assert mine == theirs


def test_attention_refuses_what_the_kernels_refuse() -> None:
    query, key = torch.zeros(2, 6, 4, 8), torch.zeros(2, 4, 4, 8)
    for call in (lambda: flash(query, key, key), lambda: cudnn(query, key, key, None, True)):
        with pytest.raises(RuntimeError, match="must divide number of heads in query"):
            call()
    with pytest.raises(RuntimeError, match="must divide"):  # this kernel knows no groups
        efficient(query, key[:, :3], key[:, :3], None, True)
    with pytest.raises(RuntimeError, match="draws no random numbers"):
        flash(query, query, query, 0.5)
    with pytest.raises(RuntimeError, match="attn_bias has shape"):
        efficient(query, query, query, torch.zeros(1, 1, 4, 4), True)


def test_gradients_of_rms_norm_are_those_of_autograd() -> None:
    value = torch.linspace(-2, 3, 60, dtype=torch.float64).view(3, 4, 5).requires_grad_()
    weight = torch.linspace(1, 2, 5, dtype=torch.float64).requires_grad_()
    cotangent = torch.linspace(-1, 1, 60, dtype=torch.float64).view(3, 4, 5)
    true = torch.autograd.grad(rms_norm(value, (5,), weight, 1e-5), (value, weight), cotangent)
    rstd = (value.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    got = backward(cotangent, value.detach(), [5], rstd.detach(), weight.detach(), [True, True])
    torch.testing.assert_close(tuple(got), true)


def test_scaled_products_are_those_of_the_scaled_matrices() -> None:
    case = next(case for case in cases("aten._scaled_mm.default") if case.args[2].ndim == 2 < case.args[2].numel())
    a, b, first, second, *_ = case.args
    wide = first.repeat_interleave(a.shape[1] // first.shape[1], 1)
    tall = second.repeat_interleave(b.shape[0] // second.shape[0], 0)
    assert torch.equal(product(*case.args), (a.float() * wide) @ (b.float() * tall))
    with pytest.raises(RuntimeError, match="scale_a of shape"):
        product(a, b, first[:, :-1].repeat(1, 5), second, None, None, torch.float32)
