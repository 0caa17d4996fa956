"""How large a difference rounding explains for ops that amplify rounding errors.

A tolerance that counts terms is right for sums. An op with a large derivative, as a logarithm near 0, amplifies an
error in the last place, and a kernel and its decomposition then differ by more. Such a difference proves nothing
against a rule.
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
"""The largest error of a call whose exact results were an accident, in last places of its largest result."""
_FINEST = 2.0**-12
"""The smallest difference between two results of a call that is exact on small integers and quarters."""
_SAFETY = 8.0
"""The factor by which rounding inside an op may exceed that of its inputs."""
_OTHER_ORDER = 4.0
"""The factor by which the error of the sharded call may exceed that of the local one, which rounds in another order."""
_LEAST_COTANGENT = 1.0
"""The smallest element of a cotangent. The parts of a Partial one are larger, and so are their errors."""


def rounding_explains(reference: Reference, spot: Spot, seed: int, noise: float) -> float:
    """Return the largest error at ``spot`` that errors in the last place of the inputs explain, or 0.

    The call is repeated on inputs moved by one unit in the last place; the result is based on the largest change. An
    error in the last place of the largest input is explained in any case, because intermediate values may be as large:
    ``log_softmax`` near 0 adds up what cancels. At a step, as of ``floor`` at an integer, any move changes the result
    much and explains nothing. An error beyond ``sqrt(eps)``, relative to the largest result, is therefore not
    explained, unless the local call itself is about as far from its result in float64. In an exact call, only the last
    places of its largest result are explained: sums and products of small integers and quarters differ by more or not
    at all.

    Parameters
    ----------
    noise
        The magnitude of a Partial argument's local tensors, whose rounding errors the inputs carry; 0 if no argument
        is Partial.
    """
    expected = expected_value(reference, spot, seed)
    if expected is None or not (expected.is_floating_point() or expected.is_complex()):
        return 0.0
    expected = expected.detach()
    finite = torch.isfinite(expected)
    if not bool(finite.any()):
        return 0.0
    if reference.case.exact:
        return last_places(expected.dtype, float(expected[finite].abs().max()))
    largest = _last_place_of_inputs(reference, expected)
    for moved in _moved(reference.case, noise):
        try:
            value = expected_value(moved, spot, seed)
        except (RuntimeError, IndexError):  # for example if the result no longer depends on the input
            continue
        if value is None or value.shape != expected.shape:
            continue
        change = (value.detach() - expected)[finite].abs()
        change = change[torch.isfinite(change)]
        largest = max(largest, float(change.max()) if change.numel() else 0.0)
    limit: float = torch.finfo(expected.dtype).eps ** 0.5 * (float(expected[finite].abs().max()) + noise)
    if _SAFETY * largest > limit:
        parts = max(1.0, noise / _LEAST_COTANGENT) if spot.backward is not None else 1.0
        limit = max(limit, _OTHER_ORDER * parts * _own_error(reference, spot, seed, expected, finite))
    return min(_SAFETY * largest, limit)


def _last_place_of_inputs(reference: Reference, expected: torch.Tensor) -> float:
    """Return a unit in the last place of the largest input of the dtype of the result, unless that dtype is narrow.

    Kernels for narrow dtypes compute in wider ones.
    """
    if torch.finfo(expected.dtype).bits < 32:
        return 0.0
    found = [tensor.detach().abs() for tensor in reference.inputs if tensor.dtype == expected.dtype and tensor.numel()]
    sizes = [float(one[torch.isfinite(one)].max()) for one in found if bool(torch.isfinite(one).any())]
    return torch.finfo(expected.dtype).eps * max(sizes, default=0.0)


def _own_error(reference: Reference, spot: Spot, seed: int, expected: torch.Tensor, finite: torch.Tensor) -> float:
    """Return how far ``expected`` itself is from what the same call returns in float64; 0 if there is no such call."""
    wider = {torch.float32: torch.float64, torch.complex64: torch.complex128}
    if expected.dtype not in wider:
        return 0.0

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(wider.get(tensor.dtype, tensor.dtype)).requires_grad_(tensor.requires_grad)

    args, kwargs = pytree.tree_map_only(torch.Tensor, widen, (reference.case.args, dict(reference.case.kwargs)))
    exact = make_reference(replace(reference.case, args=args, kwargs=kwargs))
    if exact.raised is not None or len(exact.outputs) != len(reference.outputs):
        return 0.0
    value = expected_value(exact, spot, seed)
    if value is None or value.shape != expected.shape:
        return 0.0
    error = (value.detach() - expected)[finite].abs()
    error = error[torch.isfinite(error)]
    return float(error.max()) if error.numel() else 0.0


def last_places(dtype: torch.dtype, largest: float) -> float:
    """Return the largest error that rounding alone causes in an exact call whose results are at most ``largest``.

    >>> last_places(torch.float64, 4.0) < 1e-14, last_places(torch.int64, 4.0)
    (True, 0.0)
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return min(_FINEST, _LAST_PLACES * torch.finfo(dtype).eps * largest)


def _moved(case: OpCase, noise: float) -> Iterator[Reference]:
    """Yield references of the call on slightly moved inputs, except those on which it raises."""
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
