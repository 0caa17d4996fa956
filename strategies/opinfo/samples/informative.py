"""Informative calls, whose results are finite and not equal everywhere.

Results that are NaN or 0 everywhere are uninformative: a wrong rule may return the same, and they have no gradient.
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
    lambda tensor: tensor.abs() / 8 + 0.125,  # for a logarithm, a root, a probability, a sine
    lambda tensor: tensor.abs() + 1.5,  # for a hyperbolic cosine, a zeta function
)
"""Maps of small numbers into the domains of functions; different magnitudes stay different."""


def is_inexact(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a real or complex floating dtype, so that it can require a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no element is infinite or NaN."""
    return not is_inexact(tensor) or bool(torch.isfinite(tensor).all())


def is_telling(case: OpCase, *, constant: bool = False) -> bool:
    """Return whether torch accepts the call, all results are finite, and one of them is not equal everywhere.

    If ``constant``, results may be equal everywhere: the gradient of a call that fills with zeros is informative.
    """
    reference = make_reference(case)
    outputs = [output.detach() for output in reference.outputs]
    if reference.raised is not None or not outputs or any(output.dtype == torch.complex32 for output in outputs):
        return False
    differ = constant or any(bool((t != t.reshape(-1)[0]).any()) for t in outputs if t.numel())
    return differ and all(map(is_finite, outputs))


def more_telling(case: OpCase) -> OpCase:
    """Return a plain call with other floating values if only these make it informative, else unchanged.

    A call whose values depend on each other, such as sorted boundaries, is also unchanged.
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
