"""Calls that tell something: results that are finite and not the same everywhere.

NaN everywhere, or 0, is what a wrong rule gives as well, and there is no gradient of it to compare.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from strategies.opinfo.calls.call import quiet
from strategies.opinfo.calls.op_facts import KEEP_VALUES
from strategies.opinfo.calls.op_names import base_of
from verifier.core.case import OpCase
from verifier.oracle.reference import make_reference
from verifier.torch_internals.names import pytree

__all__ = ["is_finite", "is_inexact", "is_telling", "more_telling"]

_DOMAINS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda tensor: tensor.abs() / 8 + 0.125,  # of a logarithm, a root, a probability, a sine
    lambda tensor: tensor.abs() + 1.5,  # of a hyperbolic cosine, a zeta function
)
"""Small numbers carried to where functions are defined that are not so everywhere; other magnitudes stay other ones."""


def is_inexact(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds real or complex floating numbers: what a gradient can be wanted of."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no element is infinite or NaN."""
    return not is_inexact(tensor) or bool(torch.isfinite(tensor).all())


def is_telling(case: OpCase, *, constant: bool = False) -> bool:
    """Return whether torch takes the call and no result of it is infinite, and not each is the same everywhere.

    With ``constant`` they may be so: a gradient tells something even of a call that fills with zeros.
    """
    reference = make_reference(case)
    outputs = [output.detach() for output in reference.outputs]
    if reference.raised is not None or not outputs or any(output.dtype == torch.complex32 for output in outputs):
        return False
    differ = constant or any(bool((t != t.reshape(-1)[0]).any()) for t in outputs if t.numel())
    return differ and all(map(is_finite, outputs))


def more_telling(case: OpCase) -> OpCase:
    """Return a plain call with other floating values if only these make it tell something, else as it is.

    So is one whose values belong together, as boundaries that are sorted: moved, they no longer do.
    """
    with quiet():
        if base_of(case.op).rstrip("_") in KEEP_VALUES or is_telling(case):
            return case
        moved = (_moved(case, domain) for domain in _DOMAINS)
        return next(filter(is_telling, moved), case)


def _moved(case: OpCase, domain: Callable[[torch.Tensor], torch.Tensor]) -> OpCase:
    def move(tensor: torch.Tensor) -> torch.Tensor:
        return domain(tensor) if tensor.is_floating_point() else tensor

    args, kwargs = pytree.tree_map_only(torch.Tensor, move, (case.args, dict(case.kwargs)))
    return replace(case, args=args, kwargs=kwargs, exact=False)
