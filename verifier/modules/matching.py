"""Whether ranks hold a tensor: under the placements that they have or declare, or under any that fits."""

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
from verifier.modules.arguments import ModuleCase
from verifier.modules.data import Held
from verifier.oracle.comparison import compare
from verifier.placements.algebra import local_shape, sharded_dim, take_local
from verifier.torch_internals.placements import Placements, norm_order

__all__ = ["Match", "Matcher", "ModuleDifference", "Options", "TensorSite", "largest", "proves_nothing", "rounding"]

SLACK = 512
"""Units in the last place by which a value may differ: errors of rounding add up over the layers of a model."""

_ABSORBING = 2.0**64
"""To this, a number that is not large itself can be added in any dtype, and nothing changes."""

Options = tuple[tuple[Placement, ...], ...]
"""The placements to try on each mesh dim."""


@dataclass(frozen=True)
class ModuleDifference:
    """One tensor that is not what the local model has.

    Attributes
    ----------
    subject
        What differs: ``output``, ``loss 0``, ``gradient of layers.0.wq.weight``, ``output of layers.0.wq``.
    phase
        ``forward``, ``backward`` or ``step``.
    module
        The submodule that it belongs to; empty for the model itself.
    rank
        The first rank on which it shows; -1 where it takes all ranks to see it.
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
        """Return what differs here."""
        return ModuleDifference(
            kind, self.subject, self.phase, self.module, rank, str(got), str(expected), index, likely
        )


@dataclass(frozen=True)
class Match:
    """The placements under which the ranks hold a tensor, or, with the nearest ones, what differs."""

    placements: Placements
    found: ModuleDifference | None = None


class Matcher:
    """Compares what the ranks of a mesh hold with whole tensors.

    Parameters
    ----------
    eps
        That of the coarsest dtype that values have had on the way.

    Attributes
    ----------
    compared
        How many tensors were compared.
    unchecked
        What could not be, with the reason.
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
        """Return the placements on each mesh dim: those of the DTensor, and ``declared`` on dims that it is not on."""
        return tuple(
            (placement,) if (placement := self._placement_on(helds, mesh_dim)) is not None else (declared[mesh_dim],)
            for mesh_dim in range(self.mesh.ndim)
        )

    def any_layout(self, helds: Sequence[Held | None], expected: Held) -> Options:
        """Return the placements on each mesh dim: those of the DTensor, and all that there are on the others."""
        free = (Replicate(), *(Shard(dim) for dim in range(expected.local.ndim)), Partial("sum"))
        return tuple(
            (placement,) if (placement := self._placement_on(helds, mesh_dim)) is not None else free
            for mesh_dim in range(self.mesh.ndim)
        )

    def has_placement(self, helds: Sequence[Held | None], mesh_dim: int) -> bool:
        """Return whether a tensor is a DTensor on a mesh dim."""
        return self._placement_on(helds, mesh_dim) is not None

    def _placement_on(self, helds: Sequence[Held | None], mesh_dim: int) -> Placement | None:
        """Return the placement of a DTensor on a mesh dim; None if it is plain, or on a submesh without that dim."""
        first = helds[0]
        if first is None or first.placements is None:
            return None
        dims = self._mesh_dims(first)
        return first.placements[dims.index(mesh_dim)] if dims is not None and mesh_dim in dims else None

    def _mesh_dims(self, held: Held) -> tuple[int, ...] | None:
        """Return the mesh dims that the placements of a DTensor are on; None if its mesh is no part of ours."""
        if held.mesh_dims and set(held.mesh_dims) <= set(self.dim_names):
            return tuple(self.dim_names.index(name) for name in held.mesh_dims)
        # another mesh of as many dims: all ranks in another shape would not fit the local tensors
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
        """Return the first placements out of ``options`` under which the ranks hold ``expected``, or what differs.

        Each element may be off by that of ``away``, besides what rounding explains in values up to ``scale``.
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
        absolute = self._allowed(value, scale * factor)
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
        """Return where a tensor that ranks hold as they should is not 0 on some rank, as a mask of the whole.

        Of a part of a sum that is not 0 the sum may be; where the placements are not known all of it counts.
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
        if any((dim := sharded_dim(p)) is not None and dim >= value.ndim for p in placements):
            return False
        return all(
            tuple(held.local.shape) == local_shape(value.shape, placements, self.mesh.shape, self.mesh.coordinate(rank))
            for rank, held in enumerate(helds)
        )

    def _allowed(self, expected: torch.Tensor, scale: float) -> float:
        """Return the largest error that rounding explains, in a section of a model whose values go up to ``scale``."""
        if not (expected.is_floating_point() or expected.is_complex()):
            return 0.0
        return rounding(expected.dtype, self.eps) * scale

    def value(self, helds: Sequence[Held], declared: Placements) -> torch.Tensor:
        """Return what ranks hold together: what the parts of rank 0 and of those that belong to it reduce to."""
        (placements,) = itertools.product(*self.options(helds, declared))
        _, group = next(iter(self._groups(pending := _pending(placements))))
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
        """Return how many ranks hold something else than ``placements`` promise, and what the first of them does."""
        pending = _pending(placements)
        cut = tuple(Replicate() if dim in pending else placement for dim, placement in enumerate(placements))
        wrong, first = 0, None
        for rank, group in self._groups(pending):
            parts = [helds[member].local for member in group]
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

    def _groups(self, pending: Sequence[int]) -> Iterable[tuple[int, list[int]]]:
        """Yield each rank, or the first of those whose parts belong together, with all of these."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.mesh.world_size):
            coordinate = self.mesh.coordinate(rank)
            groups.setdefault(tuple(c for dim, c in enumerate(coordinate) if dim not in pending), []).append(rank)
        return ((group[0], group) for group in groups.values()) if pending else (
            (rank, [rank]) for rank in range(self.mesh.world_size)
        )  # fmt: skip


def _pending(placements: Placements) -> list[int]:
    return [dim for dim, placement in enumerate(placements) if placement.is_partial()]


def _reduced(parts: Sequence[torch.Tensor], placements: Placements, mesh: MeshSpec) -> torch.Tensor:
    """Return what parts under Partial, or their norms, reduce to; only sums and averages may meet in one tensor."""
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

    Beside smaller ones, what is so large that it would absorb them stands for infinity, as in masks.

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
    """Return the largest error that rounding explains, of values up to 1 that were of a dtype with ``coarsest`` eps.

    In dtypes of few bits the slack would be more than the values themselves, and nothing could be wrong.
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
