"""Compares tensors, and compares local tensors with what their placements promise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from verifier.core.case import MeshSpec
from verifier.core.observation import Contribution, Difference, DifferenceKind
from verifier.core.placement_text import format_placements
from verifier.core.verdict import Phase
from verifier.core.wording import plural
from verifier.placements.algebra import local_shape, sharded_dim, view_local, with_arithmetic
from verifier.torch_internals.placements import Placements

__all__ = ["Spot", "check_full", "check_shards", "compare", "is_comparable", "tolerance"]


def tolerance(expected: torch.Tensor, terms: int, noise: float, coarsest: float = 0.0) -> float:
    """Return the largest absolute error that rounding explains in a reduction of ``terms`` terms.

    The worst-case error of summing n terms is about n units in the last place of their largest magnitude (Higham,
    Accuracy and Stability of Numerical Algorithms, 2002, section 4.2); at least 4 units cover the op's own rounding.

    Parameters
    ----------
    noise
        The magnitude of a Partial argument's local tensors: these cancel in the result, their rounding errors do not.
    coarsest
        The ``eps`` of the coarsest dtype in the call, which counts if it is larger than that of ``expected``.
    """
    if not (expected.dtype.is_floating_point or expected.dtype.is_complex):
        return 0.0
    values = with_arithmetic(expected.detach())
    finite = values[torch.isfinite(values)].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    return max(torch.finfo(expected.dtype).eps, coarsest) * max(4, terms) * (scale + noise)


def is_comparable(expected: torch.Tensor) -> bool:
    """Return whether values can be compared with those of ``expected``: torch cannot compare sparse tensors."""
    return expected.layout is torch.strided


def compare(
    got: torch.Tensor, expected: torch.Tensor, absolute: float
) -> tuple[DifferenceKind, str, str, tuple[int, ...] | None] | None:
    """Return how ``got`` differs from ``expected``: kind, both as text, and the first differing index; None if equal.

    ``absolute`` is the largest difference that is accepted; 0 compares bit for bit (NaN is equal to NaN).
    """
    if got.dtype != expected.dtype:
        return DifferenceKind.DTYPE, str(got.dtype), str(expected.dtype), None
    if got.shape != expected.shape:
        return DifferenceKind.SHAPE, str(list(got.shape)), str(list(expected.shape)), None
    if got.layout is not expected.layout:
        return DifferenceKind.STRUCTURE, str(got.layout), str(expected.layout), None
    got, expected = with_arithmetic(got), with_arithmetic(expected)
    if torch.equal(got, expected):
        return None
    same = (got == expected) | ((got != got) & (expected != expected))
    if absolute:
        same |= (got - expected).abs() <= absolute
    wrong = (~same).nonzero()
    if not len(wrong):
        return None
    index = tuple(int(i) for i in wrong[0])
    return DifferenceKind.VALUE, str(got[index].item()), str(expected[index].item()), index


def have_same_strides(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two tensors of one shape have the same strides, except along tensor dims of size 1."""
    if not expected.numel() or not is_comparable(expected):
        return True
    pairs = zip(got.shape, got.stride(), expected.stride(), strict=True)
    return all(size == 1 or one == other for size, one, other in pairs)


# --------------------------------------------------------------------------------------------------------------- ranks
@dataclass(frozen=True)
class Spot:
    """Where in a trial a value arose: the phase, the name of the value, and the backward pass if it is of one."""

    phase: Phase
    subject: str
    backward: int | None = None

    def difference(self, kind: DifferenceKind, got: object, expected: object, rank: int = -1) -> Difference:
        return Difference(kind, self.phase, self.subject, rank, str(got), str(expected), None, self.backward)


def check_full(
    locals_: Mapping[int, torch.Tensor], expected: torch.Tensor, absolute: float, spot: Spot
) -> list[Difference]:
    """Return the differences between each rank's tensor and the whole of ``expected``."""
    differences = []
    for rank, local in locals_.items():
        found = compare(local.cpu(), expected, absolute)
        if found is not None:
            kind, got, wanted, index = found
            differences.append(Difference(kind, spot.phase, spot.subject, rank, got, wanted, index, spot.backward))
    return differences


def check_shards(
    locals_: Mapping[int, torch.Tensor],
    placements: Placements,
    expected: torch.Tensor,
    absolute: float,
    mesh: MeshSpec,
    spot: Spot,
) -> tuple[list[Difference], list[Contribution]]:
    """Compare each rank's local tensor with the shard of ``expected`` that ``placements`` promise.

    A single local tensor of a Partial cannot be compared. It is returned as a contribution, and the oracle compares the
    reduction.
    """
    if len(placements) != mesh.ndim:
        text, wanted = format_placements(placements), f"a placement for each of {plural(mesh.ndim, 'mesh dim')}"
        return [spot.difference(DifferenceKind.PLACEMENT, text, wanted, rank) for rank in locals_], []
    cut = [sharded_dim(placement) for placement in placements]
    if any(dim is not None and dim >= expected.ndim for dim in cut):
        text, wanted = format_placements(placements), f"placements of a tensor with {plural(expected.ndim, 'dim')}"
        return [spot.difference(DifferenceKind.PLACEMENT, text, wanted, rank) for rank in locals_], []
    if any(placement.is_partial() for placement in placements):
        text, misshapen, parts = format_placements(placements), [], []
        for rank, local in locals_.items():
            shape = local_shape(expected.shape, placements, mesh.shape, mesh.coordinate(rank))
            if tuple(local.shape) != shape:
                misshapen.append(spot.difference(DifferenceKind.SHAPE, list(local.shape), list(shape), rank))
            elif local.layout is not expected.layout:
                misshapen.append(spot.difference(DifferenceKind.STRUCTURE, local.layout, expected.layout, rank))
            parts.append(Contribution(spot.phase, spot.subject, rank, text, local.to("cpu", copy=True), spot.backward))
        return misshapen, [] if misshapen else parts
    differences = []
    for rank, local in locals_.items():
        piece = view_local(expected, placements, mesh.shape, mesh.coordinate(rank), seed=0)
        differences += check_full({rank: local}, piece, absolute, spot)
    return differences, []
