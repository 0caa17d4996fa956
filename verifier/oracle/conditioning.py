"""How much of a difference rounding explains, where an op makes more of it than its number of terms.

A tolerance that counts terms is right for sums. An op whose derivative is large, as that of a logarithm near 0, makes
much of an error in the last place, and a kernel and its decomposition then differ by more. Such a difference proves
nothing against a rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from verifier.core.case import OpCase
from verifier.oracle.comparison import Spot
from verifier.oracle.reference import Reference, expected_value, make_reference
from verifier.torch_internals.names import pytree

__all__ = ["last_places", "rounding_explains"]

_MOVES = 3
_LAST_PLACES = 4.0
"""How many units in the last place of its largest result a call is off at most that was exact by accident."""
_FINEST = 2.0**-12
"""No two results of a call that is exact on small integers and quarters differ by less."""
_SAFETY = 8.0
"""By how much rounding inside an op may exceed that of its inputs."""


def rounding_explains(reference: Reference, spot: Spot, seed: int, noise: float) -> float:
    """Return the largest error of what is at ``spot`` that errors in the last place of the inputs explain, or 0.

    The call is repeated on inputs moved by one unit in the last place, and the results' largest change counts. At a
    step, as that of ``floor`` at an integer, any move changes much and explains nothing: an error beyond
    ``sqrt(eps)``, relative to the largest result, is never explained. Of a call that is exact, nothing is explained but
    the last places of its largest result: sums and products of small integers and quarters differ by more, if they do.

    Parameters
    ----------
    noise
        The magnitude of the parts of a Partial argument, whose rounding is what the inputs' values carry; 0 if there
        is none.
    """
    where = spot.phase, spot.subject.removeprefix("gathered "), spot.backward
    expected = expected_value(reference, *where, seed)
    if expected is None or not (expected.is_floating_point() or expected.is_complex()):
        return 0.0
    expected = expected.detach()
    finite = torch.isfinite(expected)
    if not bool(finite.any()):
        return 0.0
    if reference.case.exact:
        return last_places(expected.dtype, float(expected[finite].abs().max()))
    largest = 0.0
    for moved in _moved(reference.case, noise):
        try:
            value = expected_value(moved, *where, seed)
        except (RuntimeError, IndexError):  # as where the result no longer depends on the input
            continue
        if value is None or value.shape != expected.shape:
            continue
        change = (value.detach() - expected)[finite].abs()
        change = change[torch.isfinite(change)]
        largest = max(largest, float(change.max()) if change.numel() else 0.0)
    limit: float = torch.finfo(expected.dtype).eps ** 0.5 * (float(expected[finite].abs().max()) + noise)
    return min(_SAFETY * largest, limit)


def last_places(dtype: torch.dtype, largest: float) -> float:
    """Return the largest error, in results that are ``largest`` at most, that rounding alone makes of an exact call.

    >>> last_places(torch.float64, 4.0) < 1e-14, last_places(torch.int64, 4.0)
    (True, 0.0)
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return min(_FINEST, _LAST_PLACES * torch.finfo(dtype).eps * largest)


def _moved(case: OpCase, noise: float) -> Iterator[Reference]:
    """Yield what the call gives on inputs that are moved a little, where it does not raise."""
    for number in range(_MOVES):
        generator = torch.Generator().manual_seed(number)

        def move(tensor: torch.Tensor, generator: torch.Generator = generator) -> torch.Tensor:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                return tensor
            sign = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
            eps = torch.finfo(tensor.dtype).eps
            values = tensor.detach() + (tensor.detach().abs() + noise) * eps * sign
            return values.to(tensor.dtype).requires_grad_(tensor.requires_grad)

        args, kwargs = pytree.tree_map_only(torch.Tensor, move, (case.args, dict(case.kwargs)))
        reference = make_reference(replace(case, args=args, kwargs=kwargs))
        if reference.raised is None:
            yield reference
