"""Decides whether local tensors form the expected tensor: under given placements, or under any that fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from verifier.core.case import MeshSpec
from verifier.core.observation import DifferenceKind
from verifier.core.placement_text import format_placements
from verifier.modules.arguments import ModuleCase, fits
from verifier.modules.data import Held
from verifier.oracle.comparison import compare
from verifier.placements.algebra import local_shape, take_local
from verifier.torch_internals.placements import Placements, norm_order

__all__ = ["Match", "Matcher", "ModuleDifference", "Options", "TensorSite", "largest", "proves_nothing", "rounding"]

SLACK = 512
"""Units in the last place by which a value may differ, because rounding errors add up over the layers of a model."""

_ABSORBING = 2.0**64
"""Adding an ordinary number to one of this size changes nothing in any dtype."""

Options = tuple[tuple[Placement, ...], ...]
"""The placements to try on each mesh dim."""


@dataclass(frozen=True)
class ModuleDifference:
    """One tensor that differs from the local model's.

    Attributes
    ----------
    subject
        What differs: ``output``, ``loss 0``, ``gradient of layers.0.wq.weight``, ``output of layers.0.wq``.
    phase
        ``forward``, ``backward`` or ``step``.
    module
        The submodule of the tensor; empty for the model itself.
    rank
        The first rank that shows the difference; -1 if only all ranks together show it.
    likely
        A guess at the cause; empty if there is none.
    """

    kind: DifferenceKind
    subject: str
    phase: str
    module: str
    rank: int
    got: str
    expected: str
    index: tuple[int, ...] | None = None
    likely: str = ""

    def __str__(self) -> str:
        at = f" {list(self.index)}" if self.index else ""
        rank = f" on rank {self.rank}" if self.rank >= 0 else ""
        return f"{self.subject}{at}{rank}: got {self.got}, expected {self.expected}"


@dataclass(frozen=True)
class TensorSite:
    """Where in a model a tensor arises: the first fields of a :class:`ModuleDifference`."""

    subject: str
    phase: str
    module: str

    def difference(
        self,
        kind: DifferenceKind,
        rank: int,
        got: object,
        expected: object,
        index: tuple[int, ...] | None = None,
        likely: str = "",
    ) -> ModuleDifference:
        return ModuleDifference(
            kind, self.subject, self.phase, self.module, rank, str(got), str(expected), index, likely
        )


@dataclass(frozen=True)
class Match:
    """The placements under which the ranks hold a tensor, or the nearest ones and what differs under them."""

    placements: Placements
    found: ModuleDifference | None = None


class Matcher:
    """Compares the local tensors on the ranks of a mesh with global tensors.

    Parameters
    ----------
    eps
        The largest eps of the dtypes that values have had on the way.

    Attributes
    ----------
    compared
        How many tensors were compared.
    unchecked
        The tensors that could not be compared, with the reason.
    """

    def __init__(self, case: ModuleCase, eps: float) -> None:
        self.mesh = case.mesh
        self.eps = eps
        self.dim_names = case.dim_names
        self.compared = 0
        self.unchecked: list[str] = []

    @property
    def whole(self) -> Placements:
        """Replicated on every mesh dim."""
        return (Replicate(),) * self.mesh.ndim

    def options(self, helds: Sequence[Held | None], declared: Placements) -> Options:
        """Return the placements on each mesh dim: the DTensor's, or ``declared`` if it is not on the mesh dim."""
        return self._or_of_dtensor(helds, [(placement,) for placement in declared])

    def any_layout(self, helds: Sequence[Held | None], expected: Held) -> Options:
        """Return the placements on each mesh dim: the DTensor's, or all possible ones if it is not on the mesh dim."""
        free = (Replicate(), *(Shard(dim) for dim in range(expected.local.ndim)), Partial("sum"))
        return self._or_of_dtensor(helds, [free] * self.mesh.ndim)

    def _or_of_dtensor(self, helds: Sequence[Held | None], others: Sequence[tuple[Placement, ...]]) -> Options:
        return tuple(
            other if (placement := self.placement_on(helds, mesh_dim)) is None else (placement,)
            for mesh_dim, other in enumerate(others)
        )

    def placement_on(self, helds: Sequence[Held | None], mesh_dim: int) -> Placement | None:
        """Return the placement of a DTensor on a mesh dim; None if it is plain, or on a submesh without that dim."""
        first = helds[0]
        if first is None or first.placements is None:
            return None
        dims = self._mesh_dims(first)
        return first.placements[dims.index(mesh_dim)] if dims is not None and mesh_dim in dims else None

    def _mesh_dims(self, held: Held) -> tuple[int, ...] | None:
        """Return the mesh dims of a DTensor; None if its mesh is no submesh of ours."""
        if held.mesh_dims and set(held.mesh_dims) <= set(self.dim_names):
            return tuple(self.dim_names.index(name) for name in held.mesh_dims)
        # another mesh with the same number of dims: with another shape, the local tensors would not fit
        whole = held.placements is not None and len(held.placements) == self.mesh.ndim
        return tuple(range(self.mesh.ndim)) if whole else None

    def _why_unchecked(self, held: Held) -> str:
        if held.reason or held.placements is None:
            return held.reason
        if self._mesh_dims(held) is not None:
            return ""
        theirs = ", ".join(held.mesh_dims) or "without names"
        return f"it is on a mesh with the dims {theirs}, which are not among {', '.join(self.dim_names)}"

    def match(
        self,
        place: TensorSite,
        helds: Sequence[Held | None],
        expected: Held,
        options: Options,
        scale: float,
        factor: int = 1,
        away: torch.Tensor | None = None,
    ) -> Match:
        """Return the first placements in ``options`` under which the ranks hold ``expected``, or what differs.

        Each element may differ by that of ``away``, plus what rounding explains for values up to ``scale``.
        """

        def differs(kind: DifferenceKind, rank: int, got: object, wanted: object, likely: str = "") -> Match:
            return Match(self.whole, place.difference(kind, rank, got, wanted, None, likely))

        self.compared += 1
        present = [held for held in helds if held is not None]
        if len(present) < len(helds):
            return differs(DifferenceKind.STRUCTURE, helds.index(None), "none", f"a tensor of {list(expected.shape)}")
        texts = {
            format_placements(held.placements) if held.placements else "plain": r for r, held in enumerate(present)
        }
        if len(texts) > 1:
            (one, _), (other, rank) = list(texts.items())[:2]
            return differs(DifferenceKind.PLACEMENT, rank, other, f"{one} as on another rank")
        first = present[0]
        if reason := self._why_unchecked(first):
            self.unchecked.append(f"{place.subject}: {reason}")
            return Match(self.whole)
        if first.dtensor and first.shape != expected.shape:
            return differs(DifferenceKind.SHAPE, 0, list(first.shape), list(expected.shape))
        value = expected.local * factor if factor != 1 else expected.local
        exact = not (value.is_floating_point() or value.is_complex())
        absolute = 0.0 if exact else rounding(value.dtype, self.eps) * (scale * factor)
        best: tuple[int, Match] | None = None
        for placements in itertools.product(*options):
            if not self._fits(present, value, placements):
                continue
            wrong, found = self._compare(present, value, placements, absolute, away)
            if found is None:
                return Match(placements)
            if best is None or wrong < best[0]:
                kind, rank, got, wanted, index = found
                likely = _ratio(got, wanted)
                best = wrong, Match(placements, place.difference(kind, rank, got, wanted, index, likely))
        if best is not None:
            return best[1]
        promised = [format_placements(option) for option in itertools.islice(itertools.product(*options), 2)]
        part = f"{list(expected.shape)} as {promised[0]}" if len(promised) == 1 else f"a part of {list(expected.shape)}"
        halved = "does a submodule get only this rank's part of its input?" if len(promised) > 1 else ""
        return differs(DifferenceKind.SHAPE, 0, f"shape {list(first.local.shape)}", part, halved)

    def touched(self, helds: Sequence[Held | None], expected: Held) -> torch.Tensor:
        """Return a mask of the global tensor: true where its local tensor on some rank is not 0.

        A summand other than 0 counts, although the sum may be 0. If the placements are not known, all elements count.
        """
        mask = torch.zeros(expected.local.shape, dtype=torch.bool)
        numbers = torch.arange(mask.numel()).view(mask.shape)
        cut = tuple(Replicate() if one.is_partial() else one for (one,) in self.options(helds, self.whole))
        for rank, held in enumerate(helds):
            if held is None or self._why_unchecked(held):
                return torch.ones_like(mask)
            piece = take_local(numbers, cut, self.mesh.shape, self.mesh.coordinate(rank), seed=0)
            if piece.shape != held.local.shape:
                return torch.ones_like(mask)
            mask.view(-1)[piece[held.local != 0]] = True
        return mask

    def _fits(self, helds: Sequence[Held], value: torch.Tensor, placements: Placements) -> bool:
        return fits(placements, value.ndim) and all(
            tuple(held.local.shape) == local_shape(value.shape, placements, self.mesh.shape, self.mesh.coordinate(rank))
            for rank, held in enumerate(helds)
        )

    def value(self, helds: Sequence[Held], declared: Placements) -> torch.Tensor:
        """Return the local tensor of rank 0, reduced over the mesh dims on which it is Partial."""
        (placements,) = itertools.product(*self.options(helds, declared))
        group = self._groups(pending := _pending(placements))[0]
        parts = [helds[member].local for member in group]
        return _reduced(parts, placements, self.mesh) if pending else parts[0]

    def _compare(
        self,
        helds: Sequence[Held],
        value: torch.Tensor,
        placements: Placements,
        absolute: float,
        away: torch.Tensor | None,
    ) -> tuple[int, tuple[DifferenceKind, int, str, str, tuple[int, ...] | None] | None]:
        """Return how many ranks hold something else than ``placements`` imply, and the first of these differences."""
        pending = _pending(placements)
        cut = tuple(Replicate() if dim in pending else placement for dim, placement in enumerate(placements))
        wrong, first = 0, None
        for group in self._groups(pending):
            rank, parts = group[0], [helds[member].local for member in group]
            whole = _reduced(parts, placements, self.mesh) if pending else parts[0]
            piece = take_local(value, cut, self.mesh.shape, self.mesh.coordinate(rank), seed=0)
            if away is not None and whole.shape == piece.shape:
                free = take_local(away, cut, self.mesh.shape, self.mesh.coordinate(rank), seed=0)
                whole = torch.where((whole - piece).abs() <= free + absolute * len(group), piece.to(whole.dtype), whole)
            found = compare(whole, piece, absolute * len(group))
            if found is not None:
                wrong += len(group)
                first = first or (found[0], -1 if pending else rank, *found[1:])
        return wrong, first

    def _groups(self, pending: Sequence[int]) -> list[list[int]]:
        """Return the groups of ranks that reduce over the ``pending`` mesh dims."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.mesh.world_size):
            coordinate = self.mesh.coordinate(rank)
            groups.setdefault(tuple(c for dim, c in enumerate(coordinate) if dim not in pending), []).append(rank)
        return list(groups.values())


def _pending(placements: Placements) -> list[int]:
    return [dim for dim, placement in enumerate(placements) if placement.is_partial()]


def _reduced(parts: Sequence[torch.Tensor], placements: Placements, mesh: MeshSpec) -> torch.Tensor:
    """Return the reduction of Partial local tensors, or of norms; only sum and avg may occur in one tensor."""
    pending = [
        (p.reduce_op, extent) for p, extent in zip(placements, mesh.shape, strict=True) if isinstance(p, Partial)
    ]
    stacked = torch.stack(list(parts))
    if orders := {order for p in placements if (order := norm_order(p)) is not None}:
        (order,) = orders
        powers = stacked.abs() ** order
        return powers.sum(0) ** (1 / order)
    kinds = {kind for kind, _ in pending}
    if kinds <= {"sum", "avg"}:
        return stacked.sum(0) / math.prod(extent for kind, extent in pending if kind == "avg")
    (kind,) = kinds
    if kind == "product":
        return stacked.prod(0)
    return stacked.amax(0) if kind == "max" else stacked.amin(0)


def largest(tensors: Iterable[torch.Tensor]) -> float:
    """Return the largest finite magnitude in floating-point ``tensors``; 0 if there is none.

    A value that is so large that it would absorb the others counts as infinite, as in masks.

    >>> largest([torch.tensor([1.0, -2.0, -torch.inf, torch.finfo(torch.float32).min]), torch.tensor([7])])
    2.0
    """
    sizes = [t.abs().nan_to_num(0.0, 0.0) for t in tensors if t.numel() and (t.is_floating_point() or t.is_complex())]
    below = max((float(size.where(size < _ABSORBING, 0.0).max()) for size in sizes), default=0.0)
    return below or max((float(size.max()) for size in sizes), default=0.0)


def proves_nothing(expected: torch.Tensor) -> bool:
    """Return whether agreement with ``expected`` is vacuous: it is 0 or NaN everywhere.

    >>> proves_nothing(torch.tensor([0.0, torch.nan])), proves_nothing(torch.tensor([torch.inf, torch.nan]))
    (True, False)
    """
    return not bool(((expected != 0) & (expected == expected)).any())


def rounding(dtype: torch.dtype, coarsest: float = 0.0) -> float:
    """Return the largest error that rounding explains in values up to 1; ``coarsest`` is an eps they had on the way.

    In dtypes of few bits the slack alone would exceed the values, so that no value could be wrong.
    """
    eps = max(torch.finfo(dtype).eps, coarsest)
    return min(SLACK * eps, math.sqrt(eps))


def _ratio(got: str, wanted: str) -> str:
    try:
        ratio = float(got) / float(wanted)
    except (ValueError, ZeroDivisionError):
        return ""
    for count in range(2, 9):
        if abs(ratio - count) < 1e-4 * count:
            return f"it is {count} times what it should be: is it summed over ranks that hold the same?"
        if abs(ratio * count - 1) < 1e-4:
            return f"it is 1/{count} of what it should be: is it averaged over ranks, or one rank's part of a sum?"
    return ""
