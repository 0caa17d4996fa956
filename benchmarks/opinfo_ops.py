"""Torch's database of ops as its test_dtensor_ops takes it, and each op at a path of its own: ``opinfo_ops.op_17``.

Many ops of the database are lambdas, which ranks could not import. They, the threads and the controller make the same
samples, each in its own process: a sample is one of the n-th op whatever holds it.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch

from verifier.torch_internals.opinfo import opinfo_entries, opinfo_samples, opinfo_sizes

SIZES = {"L": 24, "M": 12, "S": 4, "XS": 2}
"""Those of test_dtensor_ops: most dims are then sharded evenly by 4 ranks."""
SEED = 1234
"""Before each sample, as in torch's tests; there it is a number made of the test's name."""
DROPOUTS = ("dropout", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
"""Of ``torch.nn.functional``; dropped out is nothing, as there, since no two ranks would drop the same."""


@dataclass(frozen=True)
class Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def names() -> dict[int, str]:
    """Return the names of all ops that take float32, by their place in the database."""
    return {
        place: f"{entry.name} {entry.variant_test_name}".rstrip()
        for place, entry in enumerate(opinfo_entries())
        if torch.float32 in entry.supported_dtypes("cpu") and not entry.name.startswith("_foreach")
    }


def calls_of(place: int, most: int | None = None) -> tuple[list[Call], str]:
    """Return the calls of an op's samples, or of the first ``most``, and what ended them early, if anything did."""
    entry = opinfo_entries()[place]
    made: list[Call] = []
    with opinfo_sizes(SIZES, ()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            samples = opinfo_samples(entry, torch.float32, requires_grad=True)
            while most is None or len(made) < most:
                _seed()
                sample = next(samples, None)
                if sample is None:
                    break
                made.append(_without_dropout(entry, Call(entry.op, (sample.input, *sample.args), dict(sample.kwargs))))
        except Exception as error:  # noqa: BLE001 - a generator that cannot work at these sizes, whatever it raises
            return made, f"{type(error).__name__}: {error}"
    return made, ""


def _seed() -> None:
    torch.manual_seed(SEED)
    random.seed(SEED)
    numpy.random.seed(SEED)


def _without_dropout(entry: Any, call: Call) -> Call:
    if entry.name.removeprefix("nn.functional.") in DROPOUTS:
        return replace(call, kwargs={**call.kwargs, "p": 0.0})
    if entry.name == "nn.functional.multi_head_attention_forward" and len(call.args) > 10:
        return replace(call, args=(*call.args[:10], 0.0, *call.args[11:]))
    return call


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("op_"):
        function: Callable[..., Any] = opinfo_entries()[int(name.removeprefix("op_"))].op
        return function
    raise AttributeError(name)


opinfo_entries()  # now, since it takes seconds, and not in the first trial
