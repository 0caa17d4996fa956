"""The stand-in kernels, held against the CUDA kernels whose place they take on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from strategies.kernels.attention import cudnn, cudnn_backward, efficient, efficient_backward, flash, flash_backward
from strategies.kernels.rms_norm import backward as rms_norm_backward
from strategies.kernels.scaled_mm import product

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="the CUDA kernels need a GPU, torch sees none"),
]

HALVES = (torch.float16, torch.bfloat16)
SMALLEST = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""How much results of a dtype may differ: the kernels round sums to it in another order."""


class Extents(NamedTuple):
    """The extents of query, key and value; ``group`` heads of the query share a head of key and value."""

    batch: int
    heads: int
    queries: int
    keys: int
    width: int
    group: int = 1

    def draw(self, dtype: torch.dtype, like_queries: bool, seed: int) -> list[torch.Tensor]:
        """Return query, key and value on the CPU; with ``like_queries`` there are as many keys as queries."""
        keys = self.queries if like_queries else self.keys
        shapes = [(self.heads * self.group, self.queries), (self.heads, keys), (self.heads, keys)]
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(self.batch, *shape, self.width, generator=generator).to(dtype) for shape in shapes]


SIZES = (
    Extents(2, 3, 7, 9, 8),
    Extents(3, 2, 40, 33, 64),
    Extents(1, 4, 64, 64, 32),
    Extents(2, 1, 130, 70, 128),
    Extents(2, 2, 33, 40, 16, group=3),
)
SCALES = (None, 0.75)


def on_gpu(values: Any) -> Any:
    """Return a list or tuple with its tensors on the GPU; of expanded and sliced tensors the strides stay."""
    return [value.cuda() if isinstance(value, torch.Tensor) else value for value in values]


def precise(values: Any) -> Any:
    """Return a list or tuple with its tensors of halves as float32, without a change of a value."""
    return [value.float() if isinstance(value, torch.Tensor) and value.dtype in HALVES else value for value in values]


def assert_close(real: Any, mine: Any, dtype: torch.dtype, what: str) -> None:
    """Check values in float64, relative to the largest one."""
    assert (real is None) == (mine is None), what
    if real is None or not real.numel():
        return
    got, wanted = real.detach().double().cpu(), mine.double()
    both = torch.isfinite(wanted)
    assert torch.equal(torch.isfinite(got), both), f"{what}: infinities stand at other places"
    assert torch.equal(got[~both], wanted[~both]), what
    scale = max(1.0, float(wanted[both].abs().max())) if bool(both.any()) else 1.0
    off = float((got[both] - wanted[both]).abs().max()) if bool(both.any()) else 0.0
    assert off <= SMALLEST[dtype] * scale, f"{what}: off by {off} of {scale}"


def assert_alike(real: Any, mine: Any, opaque: tuple[int, ...], what: str) -> None:
    """Check the shapes, dtypes and numbers of all results but the opaque ones; None is as good as an empty tensor."""
    assert len(real) == len(mine), what
    for place, pair in enumerate(zip(real, mine, strict=True)):
        if place not in opaque:
            theirs, ours = (None if isinstance(one, torch.Tensor) and not one.numel() else one for one in pair)
            assert _described(theirs) == _described(ours), f"{what}: result {place}"


def _described(result: Any) -> Any:
    return (tuple(result.shape), result.dtype) if isinstance(result, torch.Tensor) else result


class Call(NamedTuple):
    what: str
    size: Extents
    dtype: torch.dtype
    causal: bool
    scale: float | None


def calls(dtypes: tuple[torch.dtype, ...], grouped: bool) -> Iterator[Call]:
    for number, size in enumerate(SIZES):
        if size.group > 1 and not grouped:
            size = size._replace(group=1)
        for dtype in dtypes:
            for causal in (False, True):
                for scale in SCALES:
                    yield Call(f"{number}: {size}, {dtype}, {causal=}, {scale=}", size, dtype, causal, scale)


def biases(size: Extents, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a bias whose rows begin at multiples of 16 elements, as the kernels want them."""
    wide = torch.randn(size.batch, size.heads * size.group, size.queries, -(-keys // 16) * 16).to(dtype)
    return wide[..., :keys]


def test_flash() -> None:
    for number, call in enumerate(calls(HALVES, grouped=False)):
        given = call.size.draw(call.dtype, call.causal, number)
        named = {} if call.scale is None else {"scale": call.scale}
        real = flash(*on_gpu(given), 0.0, call.causal, False, **named)
        mine = flash(*precise(given), 0.0, call.causal, False, **named)
        assert_alike(real, flash(*given, 0.0, call.causal, False, **named), (6, 7), call.what)
        assert_close(real[0], mine[0], call.dtype, f"{call.what}: output")
        assert_close(real[1], mine[1], torch.float32, f"{call.what}: logsumexp")
        grad = torch.randn(mine[0].shape).to(call.dtype)
        rest = (0.0, call.causal)
        theirs = flash_backward(
            grad.cuda(), *on_gpu(given), real[0], real[1], None, None, *real[4:6], *rest, *real[6:8], **named
        )
        ours = flash_backward(
            *precise([grad, *given]), mine[0], mine[1], None, None, *mine[4:6], *rest, *mine[6:8], **named
        )
        for name, one, other in zip("qkv", theirs, ours, strict=True):
            assert_close(one, other, call.dtype, f"{call.what}: gradient of {name}")
            assert one.dtype == call.dtype


def test_flash_with_groups_of_heads() -> None:
    """The stand-in takes fewer heads of key and value, as DTensor's rules do; the results are as of repeated heads."""
    size = SIZES[-1]
    query, key, value = size.draw(torch.float16, False, 3)
    mine = flash(*precise([query, key, value]))[0]
    real = flash(*on_gpu([query, key, value]))[0]
    assert_close(real, mine, torch.float16, "output")


@pytest.mark.parametrize("biased", [False, True])
def test_efficient(biased: bool) -> None:
    for number, call in enumerate(calls((torch.float32, *HALVES), grouped=False)):
        given = call.size.draw(call.dtype, call.causal, number)
        bias = biases(call.size, given[1].shape[2], call.dtype) if biased else None
        named = {} if call.scale is None else {"scale": call.scale}
        on = None if bias is None else _with_its_strides(bias)
        real = efficient(*on_gpu(given), on, True, 0.0, call.causal, **named)
        mine = efficient(*precise([*given, bias]), True, 0.0, call.causal, **named)
        assert_alike(real, efficient(*given, bias, True, 0.0, call.causal, **named), (2, 3), call.what)
        assert_close(real[0], mine[0], call.dtype, f"{call.what}: output")
        assert_close(real[1], mine[1], torch.float32, f"{call.what}: logsumexp")
        assert real[0].stride() == mine[0].stride(), f"{call.what}: strides of the output"
        grad = torch.randn(mine[0].shape).to(call.dtype)
        rest = (0.0, [True, True, True, biased], call.causal)
        theirs = efficient_backward(grad.cuda(), *on_gpu(given), on, *real, *rest, **named)
        ours = efficient_backward(*precise([grad, *given, bias]), *mine, *rest, **named)
        for name, one, other in zip(("q", "k", "v", "bias"), theirs, ours, strict=True):
            one = None if one is None or not one.numel() else one
            if name == "bias" and one is not None and call.causal:
                # the kernel leaves out blocks that the mask hides, and does not write the gradient there
                one, other = one.tril(), other.tril()
            assert_close(one, other, call.dtype, f"{call.what}: gradient of {name}")


def _with_its_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose rows stand apart on the GPU, as they do on the CPU."""
    wide = torch.zeros(*tensor.shape[:-1], tensor.stride(-2), dtype=tensor.dtype).cuda()
    wide[..., : tensor.shape[-1]] = tensor.cuda()
    return wide[..., : tensor.shape[-1]]


def test_efficient_without_logsumexp() -> None:
    given = SIZES[1].draw(torch.float16, False, 0)
    real, mine = efficient(*on_gpu(given), None, False), efficient(*precise(given), None, False)
    assert real[1].shape == mine[1].shape
    assert_close(real[0], mine[0], torch.float16, "output")


def test_causal_masks_begin_at_the_first_key() -> None:
    """With more keys or fewer than queries the first query sees the first key alone."""
    for size in SIZES[:2]:
        given = size.draw(torch.float16, False, 1)
        for kernel, saved in ((efficient, True), (cudnn, True)):
            real = kernel(*on_gpu(given), None, saved, 0.0, True)
            mine = kernel(*precise(given), None, saved, 0.0, True)
            assert_close(real[0], mine[0], torch.float16, f"{kernel}, {size}: output")


@pytest.mark.parametrize("biased", [False, True])
def test_cudnn(biased: bool) -> None:
    for number, call in enumerate(calls(HALVES, grouped=True)):
        if biased and call.causal:
            continue  # cuDNN takes one of them
        given = call.size.draw(call.dtype, call.causal, number)
        bias = biases(call.size, given[1].shape[2], call.dtype).contiguous() if biased else None
        named = {} if call.scale is None else {"scale": call.scale}
        on = None if bias is None else bias.cuda()
        real = cudnn(*on_gpu(given), on, True, 0.0, call.causal, False, **named)
        mine = cudnn(*precise([*given, bias]), True, 0.0, call.causal, False, **named)
        assert_alike(real, cudnn(*given, bias, True, 0.0, call.causal, False, **named), (6, 7, 8), call.what)
        assert_close(real[0], mine[0], call.dtype, f"{call.what}: output")
        assert_close(real[1], mine[1], torch.float16, f"{call.what}: logsumexp")
        grad = torch.randn(mine[0].shape).to(call.dtype)
        rest = (None, None, *real[4:6], 0.0, call.causal)
        theirs = cudnn_backward(grad.cuda(), *on_gpu(given), *real[:2], *real[6:8], on, *rest, **named)
        ours = cudnn_backward(*precise([grad, *given]), *mine[:2], *mine[6:8], *precise([bias]), *rest, **named)
        for name, one, other in zip("qkv", theirs, ours, strict=True):
            assert_close(one, other, call.dtype, f"{call.what}: gradient of {name}")


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_rms_norm_backward(dtype: torch.dtype) -> None:
    for shape, normalized in (((3, 5, 16), (16,)), ((7, 130), (130,)), ((2, 3, 4, 8), (4, 8))):
        value, grad = (torch.randn(shape).to(dtype) for _ in range(2))
        weight = torch.randn(normalized).to(dtype)
        last = list(range(len(shape) - len(normalized), len(shape)))
        rstd = (value.float().square().mean(last, keepdim=True) + 1e-5).rsqrt()
        real = rms_norm_backward(*on_gpu([grad, value, list(normalized), rstd, weight]), [True, True])
        mine = rms_norm_backward(*precise([grad, value, list(normalized), rstd, weight]), [True, True])
        for name, one, other in zip(("input", "weight"), real, mine, strict=True):
            assert one.shape == other.shape
            assert_close(one, other, dtype, f"{shape}, {dtype}: gradient of {name}")


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="cuBLAS takes scales for blocks of 128 elements on GPUs of compute capability 9.0 only",
)
@pytest.mark.parametrize("layout", ["one", "rows", "blocks", "blocks and squares", "squares and blocks"])
def test_scaled_products(layout: str) -> None:
    rows, inner, columns = 256, 512, 384  # four blocks along the inner dim: cuBLAS pads the scales of squares to fours
    a = torch.randn(rows, inner).to(torch.float8_e4m3fn)
    b = torch.randn(columns, inner).to(torch.float8_e4m3fn).t()
    shapes = {
        "one": ((1, 1), (1, 1)),
        "rows": ((rows, 1), (1, columns)),
        "blocks": ((rows, inner // 128), (inner // 128, columns)),
        "blocks and squares": ((rows, inner // 128), (inner // 128, columns // 128)),
        "squares and blocks": ((rows // 128, inner // 128), (inner // 128, columns)),
    }[layout]
    first, second = (torch.randint(1, 5, shape).float() for shape in shapes)
    mine = product(a, b, first, second, None, None, torch.bfloat16)
    if "blocks" in layout:
        # scales of blocks of 1 x 128 stand together along rows and columns, those of squares along the inner dim
        first = first.t().contiguous().t() if first.shape[0] == rows else first
        second = second if second.shape[1] == columns else second.t().contiguous().t()
    real = torch.ops.aten._scaled_mm.default(*on_gpu([a, b, first, second]), None, None, torch.bfloat16)
    assert_close(real, mine, torch.bfloat16, layout)


def test_grouped_products() -> None:
    """Torch's own CPU kernel takes this place; groups may be empty."""
    ends = torch.tensor([8, 8, 24, 40], dtype=torch.int32)
    for shapes, cut in (((40, 16), (4, 16, 24)), "rows"), (((4, 8, 16), (16, 40)), "columns"):
        a, b = (torch.randn(shape).to(torch.bfloat16) for shape in shapes)
        if b.ndim == 3 or cut == "columns":
            b = b.transpose(-1, -2).contiguous().transpose(-1, -2)
        mine = torch._grouped_mm(a, b, ends)
        real = torch._grouped_mm(*on_gpu([a, b, ends]))
        assert real.shape == mine.shape
        assert_close(real, mine, torch.bfloat16, cut)


def test_a_wrong_stand_in_is_told_from_the_kernel() -> None:
    """What is compared here shows a scale that is left out, and keys that a query must not see."""
    given = SIZES[0].draw(torch.float16, True, 0)
    real = flash(*on_gpu(given), 0.0, True, False)
    wrong = (flash(*precise(given), 0.0, True, False, scale=1.0), flash(*precise(given), 0.0, False, False))
    for out, logsumexp, *_ in wrong:
        with pytest.raises(AssertionError, match="off by"):
            assert_close(real[0], out, torch.float16, "output")
        with pytest.raises(AssertionError, match="off by"):
            assert_close(real[1], logsumexp, torch.float32, "logsumexp")
