"""Ops that draw random numbers: programs that check what DTensor promises, or calls that have only one result.

``torch/distributed/tensor/_random.py`` (torch 2.13.0) promises: ranks that hold the same shard hold the same random
numbers, if every rank begins with the same seed. Different shards have different numbers only on devices with a
generator of DTensor's own. The CPU is not such a device, so differences are not checked.

Ops with a rule but without a promise are called with arguments that allow only one result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import torch

from strategies.opinfo.programs import called_twice, sampled
from verifier.core.case import OpCase

__all__ = ["CHECKED", "DETERMINED", "PROMISES", "RANDOM", "random_case"]

RANDOM = "random"
"""The tag of these cases, and the reason why their plain calls are left out."""

_BERNOULLI = (0.0, 1.0, 0.25, 0.1875**0.5, 7 / 3)
_SEVEN = (2.0, 1.75)  # deviation and kurtosis of seven integers in a row
_UNIFORM = 12**-0.5

_LOG_NORMAL = (0.0, math.inf, math.exp(0.125), (math.exp(0.5) - math.exp(0.25)) ** 0.5, 8.9)
_NORMAL = (-math.inf, math.inf, 2.0, 0.5, 3.0)
_EACH = (0.0, 1.0, "input", 0.1875**0.5, 7 / 3)

PROMISES: dict[str, tuple[list[object], tuple[float | str, ...]]] = {
    "aten.bernoulli.default": ([], _EACH),
    "aten.bernoulli.out": ([], _EACH),
    "aten.bernoulli.p": ([0.25], _BERNOULLI),
    "aten.bernoulli_.float": ([0.25], _BERNOULLI),
    "aten.exponential.out": ([2.0], (0.0, math.inf, 0.5, 0.5, 9.0)),
    "aten.exponential_.default": ([2.0], (0.0, math.inf, 0.5, 0.5, 9.0)),
    "aten.geometric.out": ([0.5], (1.0, math.inf, 2.0, 2**0.5, 9.5)),
    "aten.geometric_.default": ([0.5], (1.0, math.inf, 2.0, 2**0.5, 9.5)),
    "aten.log_normal.out": ([0.0, 0.5], _LOG_NORMAL),
    "aten.log_normal_.default": ([0.0, 0.5], _LOG_NORMAL),
    "aten.native_dropout.default": ([0.25, True], (0.0, 1.0, 0.75, 0.1875**0.5, 7 / 3)),
    "aten.normal.out": ([2.0, 0.5], _NORMAL),
    "aten.normal_.default": ([2.0, 0.5], _NORMAL),
    "aten.normal_functional.default": ([2.0, 0.5], _NORMAL),
    "aten.rand_like.default": ([], (0.0, 1.0, 0.5, _UNIFORM, 1.8)),
    "aten.randint_like.default": ([7], (0.0, 6.0, 3.0, *_SEVEN)),
    "aten.randint_like.low_dtype": ([-2, 5], (-2.0, 4.0, 1.0, *_SEVEN)),
    "aten.randint_like.low_dtype_out": ([-2, 5], (-2.0, 4.0, 1.0, *_SEVEN)),
    "aten.randn_like.default": ([], (-math.inf, math.inf, 0.0, 1.0, 3.0)),
    "aten.uniform.out": ([-1.0, 3.0], (-1.0, 3.0, 1.0, 4 * _UNIFORM, 1.8)),
    "aten.uniform_.default": ([-1.0, 3.0], (-1.0, 3.0, 1.0, 4 * _UNIFORM, 1.8)),
}
"""The arguments of each overload after the first, then range, mean, deviation and kurtosis of its random numbers."""


def _one_category(dtype: torch.dtype, rng: Random) -> dict[str, object]:
    """Return arguments of multinomial, with a weight for only one category of each row.

    Equal shapes have equal scalars, because DTensor's cache may leave scalars out of its key.
    """
    categories = rng.choice((4, 5, 8))
    chosen = [rng.randrange(categories) for _ in range(rng.choice((5, 7, 8)))]
    rows = torch.nn.functional.one_hot(torch.tensor(chosen), categories).to(dtype) * 2.5
    return {"self": rows if rng.random() < 0.75 else rows[0], "num_samples": categories - 3, "replacement": True}


def _one_slope(dtype: torch.dtype, rng: Random) -> dict[str, object]:
    """Return arguments of rrelu with only one possible slope for negative numbers."""
    shape = rng.choice(((7,), (5, 3), (4, 8)))
    generator = torch.Generator().manual_seed(rng.getrandbits(31))
    numbers = torch.randint(-8, 9, shape, generator=generator).to(dtype)
    return {
        "self": numbers.requires_grad_(), "noise": torch.zeros(shape, dtype=dtype), "lower": 0.25, "upper": 0.25,
        "training": rng.random() < 0.75,
    }  # fmt: skip


DETERMINED: dict[str, Callable[[torch.dtype, Random], dict[str, object]]] = {
    "aten.multinomial.default": _one_category,
    "aten.rrelu_with_noise.default": _one_slope,
    "aten.rrelu_with_noise_functional.default": _one_slope,
}
"""Functions that return arguments of an overload which allow only one result."""

CHECKED = frozenset({*PROMISES, *DETERMINED})
"""The overloads that :func:`random_case` takes."""

_TWICE = 1 / 3
"""Fraction of the calls that are repeated with another scalar."""
_SHAPES = ((72,), (8, 9), (5, 13), (3, 4, 6))


def random_case(op: str, dtype: torch.dtype, variant: int) -> OpCase:
    """Return a call of ``op``, one of :data:`CHECKED`, or of the program that checks its random numbers."""
    rng = Random(f"{op} {variant}")
    if op in DETERMINED:
        arguments, tags = DETERMINED[op](dtype, rng), frozenset({RANDOM})
        if "num_samples" in arguments and rng.random() < _TWICE:
            others = [["num_samples", rng.choice((7, 9))]]
            path = f"{called_twice.__module__}.{called_twice.__name__}"
            return OpCase(op, path, (op, others), arguments, "opinfo", tags=tags | {"second call"})
        return OpCase(op, f"torch.ops.{op}", (), arguments, "opinfo", tags=tags)
    shape = rng.choice(_SHAPES)
    generator = torch.Generator().manual_seed(rng.getrandbits(31))
    # numbers of equal variance that are also probabilities
    input = torch.where(torch.randint(2, shape, generator=generator) > 0, 0.25, 0.75).to(dtype)
    options, promise = PROMISES[op]
    return OpCase(
        op,
        f"{sampled.__module__}.{sampled.__name__}",
        (op, options, list(promise), rng.getrandbits(16)),
        {"input": input},
        "opinfo",
        exact=False,
        tags=frozenset({RANDOM}),
    )
