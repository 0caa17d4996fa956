"""Which placements the ranks' results represent: one look at them answers for every output placement at once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from verifier.core.case import MeshSpec
from verifier.core.placement_text import format_placements
from verifier.core.verdict import VerdictKind
from verifier.core.wording import plural
from verifier.oracle.comparison import compare, tolerance
from verifier.oracle.conditioning import last_places
from verifier.placements.algebra import Disagreement, combine, local_shape, reducing_rounds
from verifier.placements.alphabet import Alphabet
from verifier.placements.bounds import shard_bounds
from verifier.torch_internals.placements import Placements

__all__ = ["Expected", "Mismatch"]


@dataclass(frozen=True)
class Mismatch:
    """How results differ from what placements promise.

    ``clear`` is False for a difference so small that the conditioning of the op may explain it. ``raised`` is the type
    of the exception, if the op raised one.
    """

    kind: VerdictKind
    message: str
    clear: bool = True
    raised: str = ""


_OPERATIONS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]
_OPERATIONS = {"sum": torch.add, "avg": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}


class Expected:
    """One result of the call on global values, and what every placement promises of it on a mesh of one dim.

    Parameters
    ----------
    value
        The result.
    parts
        Number of ranks.
    exact
        Compare bit for bit.
    terms, noise
        For the tolerance where ``exact`` is False: the number of terms that a reduction may have, and the size of the
        parts of a Partial argument. Rounding errors grow as the square root of the number of terms (Higham and Mary,
        SIAM J. Sci. Comput. 41, 2019); the parts count only once :meth:`expect_parts` says that there are some.
    """

    def __init__(self, value: torch.Tensor, parts: int, exact: bool, terms: int, noise: float) -> None:
        self.value = value.detach()
        self.shape = value.shape
        self.dtype = value.dtype
        self.parts = parts
        self._exact, self._noise = exact, noise
        self._terms = 4 * math.isqrt(max(1, terms))
        self.absolute = self.doubtful = 0.0
        self.letters: tuple[Placement, ...] = Alphabet().placements(value.ndim, value.dtype)
        self._numbers = {letter: number for number, letter in enumerate(self.letters)}
        inexact = value.dtype.is_floating_point or value.dtype.is_complex
        self.finite = not inexact or bool(torch.isfinite(self.value).all())
        finite = self.value if self.finite else self.value[torch.isfinite(self.value)]
        self._scale = float(finite.abs().max()) if inexact and finite.numel() else 0.0
        self._limits: dict[bool, tuple[float, float]] = {}
        if exact:
            self.doubtful = last_places(self.dtype, self._scale)
        self.expect_parts(False)
        # The bits that shards can have, by the shapes of all ranks' tensors: most results are settled by these alone.
        self._by_shapes: dict[tuple[torch.Size, ...], list[tuple[int, list[torch.Tensor]]]] = {}
        for dim in range(value.ndim):
            bounds = [shard_bounds(value.shape[dim], parts, index) for index in range(parts)]
            pieces = [self.value.narrow(dim, start, stop - start) for start, stop in bounds]
            shapes = tuple(piece.shape for piece in pieces)
            self._by_shapes.setdefault(shapes, []).append((1 << self._numbers[Shard(dim)], pieces))
        self._whole = (self.shape,) * parts
        self._replicated = 1 << self._numbers[Replicate()]
        self._partial = {
            p.reduce_op: 1 << n for n, p in enumerate(self.letters) if isinstance(p, Partial) and type(p) is Partial
        }

    def expect_parts(self, some: bool) -> None:
        """Set the tolerance for results of a call with or without Partial arguments, whose parts are large."""
        if self._exact:
            return
        if some not in self._limits:
            noise = self._noise if some else 0.0
            # two bytes leave little between rounding and a wrong result: without parts the kernels do the same work
            terms = 8 if not some and self.dtype.itemsize == 2 else self._terms
            absolute = tolerance(self.value, terms, noise)
            # an error of sqrt(eps) is what an ill-conditioned op may make of rounding; a wrong rule makes more
            eps = torch.finfo(self.dtype).eps if absolute else 0.0
            self._limits[some] = absolute, absolute / max(4, terms) / eps**0.5 if eps else 0.0
        self.absolute, self.doubtful = self._limits[some]

    def decisive(self, share: float) -> bool:
        """Return whether the tolerance is at most this share of the largest element, or agreement tells nothing."""
        return not self.absolute or self.absolute <= share * self._scale

    def same(self, got: torch.Tensor, wanted: torch.Tensor) -> bool:
        """Return whether ``got`` is ``wanted``, of the same shape and dtype, within the tolerance; NaN equals NaN."""
        if torch.equal(got, wanted):
            return True
        if self.absolute and self.finite:
            return bool(((got - wanted).abs() <= self.absolute).all())
        if self.finite:
            return False
        return compare(got, wanted, self.absolute) is None

    def represented(self, results: Sequence[torch.Tensor], within: int = -1) -> int:
        """Return the placements that the ranks' results represent, as bits in the order of :attr:`letters`.

        Only those in ``within`` are looked at.
        """
        shapes = tuple(result.shape for result in results)
        for result in results:
            if result.dtype is not self.dtype:
                return 0
        found = 0
        for bit, pieces in self._by_shapes.get(shapes, ()):
            if bit & within and all(self.same(a, b) for a, b in zip(results, pieces, strict=True)):
                found |= bit
        if shapes == self._whole:
            found |= self._represented_whole(results, within)
        return found

    def _represented_whole(self, results: Sequence[torch.Tensor], within: int) -> int:
        found = 0
        same, value = self.same, self.value
        if self._replicated & within and all(same(result, value) for result in results):
            found |= self._replicated
        for reduction, bit in self._partial.items():
            if bit & within:
                whole = functools.reduce(_OPERATIONS[reduction], results)
                if same(whole / self.parts if reduction == "avg" else whole, value):
                    found |= bit
        return found

    def bit(self, placement: Placement) -> int:
        """Return the bit of a placement; 0 if it is none of :attr:`letters`."""
        number = self._numbers.get(placement)
        return 0 if number is None or type(placement) not in (Replicate, Shard, Partial) else 1 << number

    def mismatch(self, results: Sequence[torch.Tensor], placements: Placements, mesh: MeshSpec) -> Mismatch | None:
        """Return how the ranks' results differ from what ``placements`` promise on ``mesh``; None if they do not."""
        text = format_placements(placements)
        for rank, result in enumerate(results):
            if result.dtype is not self.dtype:
                return Mismatch(VerdictKind.WRONG_DTYPE, f"rank {rank} has {result.dtype}, expected {self.dtype}")
            try:
                shape = local_shape(self.shape, placements, mesh.shape, mesh.coordinate(rank))
            except IndexError:
                return Mismatch(VerdictKind.WRONG_SHAPE, f"{text} of a result with {plural(len(self.shape), 'dim')}")
            if tuple(result.shape) != shape:
                got, wanted = list(result.shape), list(shape)
                return Mismatch(VerdictKind.WRONG_SHAPE, f"rank {rank} has shape {got}, expected {wanted} of {text}")
        try:
            whole = combine(results, placements, mesh.shape, self.shape)
        except Disagreement as error:
            difference = max((_distance(results[0], other) for other in results[1:]), default=float("inf"))
            return Mismatch(VerdictKind.WRONG_VALUE, f"{text}: {error}", not difference <= self.doubtful)
        if self.same(whole, self.value):
            return None
        absolute = self.absolute
        if not absolute and reducing_rounds(placements, mesh.shape):
            absolute = tolerance(self.value, self._terms, self._noise)
        found = compare(whole, self.value, absolute)
        if found is None:
            return None
        _, mine, reference, index = found
        message = f"{list(index or ())}: got {mine} once put together under {text}, expected {reference}"
        return Mismatch(VerdictKind.WRONG_VALUE, message, not _distance(whole, self.value) <= self.doubtful)


def _distance(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest difference of two tensors of one shape; infinite where it cannot be told."""
    if left.shape != right.shape or not (left.dtype.is_floating_point or left.dtype.is_complex):
        return float("inf")
    gap = (left - right).abs()
    gap = gap[~((left == right) | ((left != left) & (right != right)))]
    if not gap.numel():
        return 0.0
    largest = float(gap.max())
    return largest if largest == largest else float("inf")
