"""How far a result may differ from its reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from verifier.core.case import Trial
from verifier.core.observation import Difference, DifferenceKind, Redistribution
from verifier.core.verdict import tensor_name
from verifier.oracle.comparison import Spot, is_comparable, tolerance
from verifier.oracle.conditioning import rounding_explains
from verifier.oracle.reference import Reference
from verifier.placements.algebra import reducing_rounds
from verifier.placements.partials import LARGEST_PART
from verifier.torch_internals.placements import Placements

__all__ = [
    "accepted_error",
    "case_tolerance",
    "unexplained",
]


def unexplained(
    differing: Callable[[float], list[Difference]],
    trial: Trial,
    reference: Reference,
    expected: torch.Tensor,
    steps: Sequence[Redistribution],
    spot: Spot,
    reduced: Placements = (),
) -> tuple[list[Difference], list[str]]:
    """Return the differences that rounding does not explain, or else why the comparison proves nothing.

    Parameters
    ----------
    differing
        Returns the differences beyond an absolute error.
    reduced
        The placements under which local tensors were combined for the comparison, if they were.
    """
    found = differing(0.0)  # most values are equal bit for bit, and a comparison is faster than a tolerance
    if found and (tolerated := case_tolerance(trial, reference, expected, steps, reduced)):
        found = differing(tolerated)
    if not found or any(difference.kind is not DifferenceKind.VALUE for difference in found):
        return found, []
    wide = rounding_explains(reference, spot, trial.seed, _noise(trial))
    if not wide or differing(wide):
        return found, []
    name = tensor_name(spot.phase, spot.subject)
    if reference.case.exact:
        return [], [f"{name}: a difference in the last places, which rounding explains"]
    return [], [f"{name}: a difference that rounding of the inputs explains, since the call is ill-conditioned"]


def accepted_error(trial: Trial, reference: Reference, expected: torch.Tensor, spot: Spot) -> float:
    """Return the largest absolute error at ``spot`` for which no finding is reported; see :func:`unexplained`."""
    if not is_comparable(expected):
        return 0.0
    within = case_tolerance(trial, reference, expected, ())
    return max(within, rounding_explains(reference, spot, trial.seed, _noise(trial)))


def case_tolerance(
    trial: Trial,
    reference: Reference,
    expected: torch.Tensor,
    steps: Sequence[Redistribution],
    reduced: Placements = (),
) -> float:
    """Return the largest absolute error that counts as equal to ``expected``: 0 if everything is exact.

    ``steps`` shows whether DTensor redistributed from Replicate to a Partial sum, which divides by the number of ranks.
    The division rounds unless that number is a power of two. Even then, a dtype of few digits may not hold a large
    value plus a fraction. A reduction of an average divides, and one of a norm takes a root: in ``steps``, and where
    the oracle combined the local tensors of ``reduced``.
    """
    uneven = any(extent & (extent - 1) for extent in trial.mesh.shape)
    narrow = expected.dtype.is_floating_point and expected.element_size() < 4
    rounded = (uneven or narrow) and any(step.collective is None and "P(" in step.target for step in steps)
    rounded |= any("NormP(" in step.source or (uneven and "P(avg)" in step.source) for step in steps)
    rounded |= bool(reduced) and reducing_rounds(reduced, trial.mesh.shape)
    if reference.case.exact and not rounded:
        return 0.0
    terms = sum(tensor.numel() for tensor in reference.inputs) + sum(o.numel() for o in reference.outputs)
    dtypes = {tensor.dtype for tensor in (*reference.inputs, *reference.outputs)}  # all are on a gradient's way
    coarsest = max((torch.finfo(d).eps for d in dtypes if d.is_floating_point or d.is_complex), default=0.0)
    return tolerance(expected, terms, _noise(trial), coarsest)


def _noise(trial: Trial) -> float:
    """Return the largest element of a Partial's local tensors in ``trial``; 0 if nothing is Partial."""
    placed = [*trial.combination, *(placements for one in trial.cotangents for placements in one)]
    return LARGEST_PART if any(p.is_partial() for placements in placed for p in placements) else 0.0
