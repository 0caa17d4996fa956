"""Fourier transforms, quantiles, statistics and norms."""

from __future__ import annotations

import torch

from strategies.chains.building import Building
from strategies.chains.composites.table import composite


@composite
def _fourier(b: Building) -> None:
    """Transforms along one dim, of its own length and of another, in each normalisation."""
    rows, columns = b.size()
    dim = b.pick((-1, 0, 1))
    path = b.pick(("fft", "ifft", "rfft", "hfft", "irfft", "ihfft"))
    value = b.floats(rows, columns)
    if path in ("irfft", "hfft", "ifft"):
        value = b.call("torch.complex", value, b.floats(rows, columns))
    size = (rows, columns)[dim]
    length = b.pick((None, size, size + 1, 2 * size, max(1, size - 1)))
    b.call(f"torch.fft.{path}", value, length, dim, b.pick((None, "ortho", "forward")))
    b.call("torch.abs", f"step{len(b.steps)}") if b.chance(0.2) else None


@composite
def _fourier_of_several_dims(b: Building) -> None:
    shape = b.pick((b.size(), (2, *b.size())))
    path = b.pick(("fft2", "rfft2", "irfft2", "ifftn", "rfftn", "irfftn"))
    value = b.floats(*shape)
    if path.startswith("i"):
        value = b.call("torch.complex", value, b.floats(*shape))
    b.call(f"torch.fft.{path}", value, dim=b.pick(((-2, -1), (0, -1))), norm=b.pick((None, "ortho")))


@composite
def _shifted_frequencies(b: Building) -> None:
    b.call(b.pick(("torch.fft.fftshift", "torch.fft.ifftshift")), b.floats(*b.size()), b.pick((None, [0], [1], [-1])))


@composite
def _conjugated(b: Building) -> None:
    """Views of conjugates, whose elements are conjugated only when an op reads them."""
    ranks = b.mesh.world_size  # shards are even, or else ranks whose shards are padded wait for those that raise
    size = b.pick(((ranks, ranks), (ranks, 2 * ranks), (2, ranks, ranks)))
    parts = b.floats(*size), b.floats(*size)
    for part in parts:  # the gradient of a conjugate has no strategy
        b.tensors[part].requires_grad_(False)
    value = b.call("torch.complex", *parts)
    lazy = b.call(*b.way(("torch.conj", value), ("torch.adjoint", value)))
    dim = b.pick((0, 1, -1))
    name, *rest = b.way(
        ("torch.select", dim, b.pick((0, 1, -1))), ("torch.narrow", dim, 1, 1), ("torch.unbind", dim),
        ("torch.split", 1, dim), ("torch.swapaxes", 0, -1), ("torch.sum", dim), ("torch.flip", [dim]),
        ("torch.matmul", value) if size[-1] == ranks else ("torch.mul", lazy), ("torch.clone",), ("torch.ravel",),
    )  # fmt: skip
    made = b.call(name, lazy, *rest)
    b.call("torch.mul", made if isinstance(b.values[made], torch.Tensor) else f"{made}.0", 2)


@composite
def _quantile(b: Building) -> None:
    """Quantiles, with and without NaN among the numbers."""
    rows, columns = b.size()
    path = b.pick(("torch.quantile", "torch.nanquantile"))
    numbers = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(b.rng.getrandbits(16)))
    tensor = numbers.reshape(rows, columns).to(b.dtype) - 3
    if path == "torch.nanquantile" and rows > 1:
        tensor[0, 0] = float("nan")
    which: object = b.given(torch.tensor([0.25, 0.5], dtype=b.dtype)) if b.chance(0.5) else b.pick((0.5, 0.25, 1.0))
    interpolation = b.pick(("linear", "lower", "nearest", "midpoint"))
    value = b.given(tensor)
    b.call(path, value, which, b.pick((0, 1, -1, None)), b.chance(0.3), interpolation=interpolation)
    b.tensors[value].requires_grad_(path == "torch.quantile")


@composite
def _order_statistic(b: Building) -> None:
    rows, columns = b.size()
    numbers = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(b.rng.getrandbits(16)))
    value = b.given((numbers.reshape(rows, columns).to(b.dtype) - 3).requires_grad_())
    dim = b.pick((0, 1, -1))
    name, *rest = b.way(("median",), ("nanmedian",), ("kthvalue", 1), ("sort",), ("topk", 1), ("cummax",), ("argsort",))
    b.call(f"torch.{name}", value, *rest, dim)


@composite
def _statistic(b: Building) -> None:
    rows, columns = b.size()
    value = b.floats(rows, columns)
    name, options = b.way(
        ("torch.cov", {"correction": 0}),
        ("torch.corrcoef", {}),
        ("torch.var_mean", {"dim": b.pick((0, 1, -1)), "correction": b.pick((0, 1))}),
        ("torch.std_mean", {"dim": b.pick((0, 1, -1)), "keepdim": True, "correction": 0}),
        ("torch.nansum", {"dim": b.pick((0, 1))}),
        ("torch.nanmean", {"dim": b.pick((0, 1))}),
        ("torch.logcumsumexp", {"dim": b.pick((0, -1))}),
        ("torch.cumulative_trapezoid", {"dim": b.pick((0, -1))}),
        ("torch.trapezoid", {"dim": b.pick((0, -1))}),
        ("torch.diff", {"dim": b.pick((0, -1)), "n": b.pick((1, 2))}),
        ("torch.aminmax", {"dim": b.pick((0, 1))}),
        ("torch.renorm", {"p": 2, "dim": b.pick((0, 1, -1)), "maxnorm": 3.0}),
    )
    b.call(name, value, **options)


@composite
def _vector_norm(b: Building) -> None:
    """Norms by each function, order, dims and dtype."""
    value = b.floats(*b.pick((b.size(), (2, *b.size()))))
    order = b.pick((2, 1, 0.5, 3, 0, float("inf"), float("-inf"), -1))
    dims = b.pick((None, 0, -1, (0, 1)))
    path = b.pick(("torch.linalg.vector_norm", "torch.linalg.vector_norm", "torch.norm"))
    if path == "torch.norm":
        b.call(path, value, order, **({} if dims is None else {"dim": dims}))
    else:
        b.call(path, value, order, dims, b.chance(0.3), dtype=b.pick((None, None, torch.float64)))


@composite
def _lone_special_value(b: Building) -> None:
    """Reductions of numbers of which one is a NaN or an infinity, so that one rank alone has met it."""
    rows, columns = b.size()
    numbers = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(b.rng.getrandbits(16)))
    tensor = numbers.to(b.dtype) - 3
    tensor[b.pick(range(len(tensor)))] = b.pick((float("nan"), float("nan"), float("inf"), float("-inf")))
    b.special = True
    value = b.given(tensor.reshape(rows, columns))
    dim = b.pick((0, 1, -1))
    name, *rest = b.way(
        ("torch.max",), ("torch.min",), ("torch.amax", (0, 1)), ("torch.amin", dim), ("torch.aminmax",),
        ("torch.max", dim), ("torch.min", dim), ("torch.sum",), ("torch.mean", dim), ("torch.nansum", dim),
        ("torch.linalg.vector_norm", float("inf")), ("torch.linalg.vector_norm", float("-inf"), dim),
        ("torch.linalg.vector_norm", 2, dim), ("torch.norm", 1), ("torch.softmax", dim), ("torch.logsumexp", dim),
        ("torch.cumsum", dim), ("torch.cummax", dim), ("torch.prod", dim), ("torch.any", dim),
    )  # fmt: skip
    b.call(name, value, *rest)


@composite
def _large_numbers(b: Building) -> None:
    """Norms and means of numbers of 16 bits that hold the result, and not the squares of the numbers."""
    shape = b.pick((b.size(), (2, *b.size())))
    value = b.floats(*shape, dtype=b.pick((torch.float16, torch.float16, torch.bfloat16)))
    order = b.pick((2, 2, 3, 1, float("inf")))
    path = b.pick(("torch.linalg.vector_norm", "torch.norm", "torch._foreach_norm", "torch.mean"))
    b.exact = False
    tensor = b.tensors[value].detach() * 100
    b.tensors[value], b.values[value] = tensor, tensor.clone()
    if path == "torch.mean":
        b.call(path, value, b.pick((0, -1)))
    elif path == "torch._foreach_norm":
        b.call(path, [value], order)
    else:
        b.call(path, value, order, b.pick((0, -1)))


@composite
def _matrix_norm(b: Building) -> None:
    value = b.floats(*b.pick((b.size(), (2, *b.size()))))
    b.call(
        "torch.linalg.matrix_norm", value, b.pick(("fro", "nuc", 1, -1, float("inf"), 2)), b.pick(((-2, -1), (-1, 0)))
    )
