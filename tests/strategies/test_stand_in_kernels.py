"""The stand-in kernels, held against plain formulas, autograd and the shapes that torch documents."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from strategies.kernels import SCALED_MM, STAND_INS
from strategies.kernels.attention import cudnn, efficient, flash
from strategies.kernels.registering import registered
from strategies.kernels.rms_norm import backward
from strategies.kernels.scaled_mm import product
from strategies.opinfo.coverage import coverage
from strategies.opinfo.handmade import NO_CALLS, handmade_samples
from strategies.opinfo.source import SOURCE
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
    if causal and bias is not None:  # the math path takes one of them
        later = torch.ones(bias.shape[-2:], dtype=torch.bool).triu(1)
        bias, causal = bias.masked_fill(later, -math.inf), False
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
    assert query.shape[1] == key.shape[1]
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
        documented = pytree.tree_leaves(resolve(case.call)(*meta[0], **meta[1]))
        got = pytree.tree_leaves(run(case))
        assert len(got) == len(documented)
        for place, (mine, theirs) in enumerate(zip(got, documented, strict=True)):
            if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
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


def spread(scale: torch.Tensor, rows: int, inner: int) -> torch.Tensor:
    """Return the scale of each element, from scales of the format MX, element by element."""
    across = -(-inner // 128)
    return torch.tensor(
        [
            [
                float(
                    scale[(row // 128 * across + k // 128) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + k % 128 // 32]
                )
                for k in range(inner)
            ]
            for row in range(rows)
        ]
    )


def test_scaled_products_are_those_of_the_scaled_matrices() -> None:
    labels = set()
    for sample in handmade_samples("aten._scaled_mm.default", OPTIONS):
        if (case := sample.draw(0, 0)) is None or case.call != SCALED_MM:
            continue
        a, b, first, second, *_, dtype = case.args
        (rows, inner), columns = a.shape, b.shape[1]
        if first.ndim == 1:
            wide, tall = spread(first, rows, inner), spread(second, columns, inner).t()
        else:
            wide = torch.tensor(
                [[first[i * first.shape[0] // rows, k // 128].item() for k in range(inner)] for i in range(rows)]
            )
            tall = torch.tensor(
                [
                    [second[k // 128, j * second.shape[1] // columns].item() for j in range(columns)]
                    for k in range(inner)
                ]
            )
        assert torch.equal(product(*case.args), ((a.float() * wide) @ (b.float() * tall)).to(dtype))
        labels.add(sample.origin)
    assert len(labels) == 4


def test_scales_of_no_documented_layout_are_refused() -> None:
    a, b = torch.ones(4, 256).to(torch.float8_e4m3fn), torch.ones(256, 16).to(torch.float8_e4m3fn)
    for first, second in (((4, 3), (3, 16)), ((2, 2), (2, 16)), ((4, 2), (1, 16)), ((4,), (16,))):
        with pytest.raises(ValueError, match="Invalid scaling configuration"):
            product(a, b, torch.ones(first), torch.ones(second), None, None, torch.float32)


@pytest.mark.nightly
def test_every_overload_with_a_rule_has_samples_or_a_reason() -> None:
    assert set(coverage().missing) <= NO_CALLS.keys()


@pytest.mark.parametrize("op", NO_CALLS)
def test_an_overload_without_calls_says_why(op: str) -> None:
    (target,) = SOURCE.select([op])
    assert [sample.not_testable for sample in SOURCE.samples(target, OPTIONS)] == [NO_CALLS[op]]


def test_a_kernel_of_torch_s_stays() -> None:
    def never(*args: object) -> None:
        raise AssertionError("called instead of torch's kernel")

    assert registered("relu", never)(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]
    a, b = torch.ones(4, 16).to(torch.float8_e4m3fn), torch.ones(16, 8).to(torch.float8_e4m3fn)
    one = torch.tensor(2.0)
    assert torch.equal(product(a, b, one, one, None, None, torch.float32), torch.full((4, 8), 64.0))
