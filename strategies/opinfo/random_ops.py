"""Ops that draw random numbers: what each promises of them, and calls of a program that checks it.

What DTensor promises of random numbers, by the documentation in ``torch/distributed/tensor/_random.py`` (torch 2.13.0):
ranks that hold the same shard hold the same numbers, if every rank begins with the same seed. Shards differ only on
devices with a generator of DTensor's own, which the CPU is not among; so that is not asked.
"""

from __future__ import annotations

import math
from random import Random

import torch

from strategies.opinfo.programs import sampled
from verifier.cases import OpCase

__all__ = ["PROMISES", "RANDOM", "random_case"]

RANDOM = "random"
"""The tag of these cases, and why the plain calls are left out."""

_BERNOULLI = (0.0, 1.0, 0.25, 0.1875**0.5, 7 / 3)
_SEVEN = (2.0, 1.75)  # deviation and kurtosis of seven integers in a row
_UNIFORM = 12**-0.5

PROMISES: dict[str, tuple[list[object], tuple[float | str, ...]]] = {
    "aten.bernoulli.default": ([], (0.0, 1.0, "input", 0.1875**0.5, 7 / 3)),
    "aten.bernoulli.p": ([0.25], _BERNOULLI),
    "aten.bernoulli_.float": ([0.25], _BERNOULLI),
    "aten.exponential_.default": ([2.0], (0.0, math.inf, 0.5, 0.5, 9.0)),
    "aten.geometric_.default": ([0.5], (1.0, math.inf, 2.0, 2**0.5, 9.5)),
    "aten.log_normal_.default": (
        [0.0, 0.5],
        (0.0, math.inf, math.exp(0.125), (math.exp(0.5) - math.exp(0.25)) ** 0.5, 8.9),
    ),
    "aten.native_dropout.default": ([0.25, True], (0.0, 1.0, 0.75, 0.1875**0.5, 7 / 3)),
    "aten.normal_.default": ([2.0, 0.5], (-math.inf, math.inf, 2.0, 0.5, 3.0)),
    "aten.rand_like.default": ([], (0.0, 1.0, 0.5, _UNIFORM, 1.8)),
    "aten.randint_like.default": ([7], (0.0, 6.0, 3.0, *_SEVEN)),
    "aten.randint_like.low_dtype": ([-2, 5], (-2.0, 4.0, 1.0, *_SEVEN)),
    "aten.randn_like.default": ([], (-math.inf, math.inf, 0.0, 1.0, 3.0)),
    "aten.uniform_.default": ([-1.0, 3.0], (-1.0, 3.0, 1.0, 4 * _UNIFORM, 1.8)),
}
"""For each overload its arguments after the first, then the range, mean, deviation and kurtosis of what it draws."""

_SHAPES = ((72,), (8, 9), (5, 13), (3, 4, 6))


def random_case(op: str, dtype: torch.dtype, variant: int) -> OpCase:
    """Return a call of the program that checks what ``op``, one of :data:`PROMISES`, draws."""
    rng = Random(f"{op} {variant}")
    shape = rng.choice(_SHAPES)
    generator = torch.Generator().manual_seed(rng.getrandbits(31))
    # probabilities of the same variance, which other ops take for any numbers
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
