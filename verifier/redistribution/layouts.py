"""Layouts: how a tensor lies on a mesh, with the exact indices that each rank holds. Needs no torch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from verifier.core.placement_text import BITWISE_REDUCTIONS, REDUCTIONS
from verifier.placements.bounds import shard_bounds
from verifier.redistribution.indices import Box, Indices, count, joined, positions, size_of, strided

__all__ = ["Layout", "Space", "parse_layout"]

_MOST_PIECES = 4096
"""Of a strided shard: a rank's set of indices has as many ranges."""


@dataclass(frozen=True, order=True)
class Layout:
    """Placements with shard order.

    Parameters
    ----------
    placements
        One per mesh dim, as DTensor prints it: ``R``, ``S(0)``, ``_S(0, 2)``, ``P(sum)``.
    positions
        For each mesh dim that shards, its position among the mesh dims that shard the same tensor dim; otherwise 0.

    >>> str(Layout(("S(0)", "S(0)"), (1, 0))), str(Layout(("S(0)", "R"), (0, 0))), str(Layout(("R",), (0,)))
    ('(S(0)[1], S(0)[0])', '(S(0), R)', 'R')
    """

    placements: tuple[str, ...]
    positions: tuple[int, ...]

    def __str__(self) -> str:
        texts = [
            text if self._in_order(mesh_dim) else f"{text}[{self.positions[mesh_dim]}]"
            for mesh_dim, text in enumerate(self.placements)
        ]
        return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"

    def _in_order(self, mesh_dim: int) -> bool:
        """Return whether the mesh dims that shard the same tensor dim as ``mesh_dim`` do so from left to right."""
        order = self.order(_tensor_dim(self.placements[mesh_dim]))
        return order == sorted(order)

    @property
    def default_order(self) -> bool:
        """Whether mesh dims shard from left to right, as a user gets it who names no order."""
        return all(map(self._in_order, range(len(self.placements))))

    def order(self, tensor_dim: int | None) -> list[int]:
        """Return the mesh dims that shard ``tensor_dim``, the first to shard it first."""
        if tensor_dim is None:
            return []
        dims = [d for d, text in enumerate(self.placements) if _tensor_dim(text) == tensor_dim]
        return sorted(dims, key=self.positions.__getitem__)

    def kind(self, mesh_dim: int) -> str:
        """Return ``R``, ``S`` or ``P``; a strided shard is ``S``."""
        return self.placements[mesh_dim].lstrip("_")[0]

    @property
    def partial_dims(self) -> tuple[int, ...]:
        """The mesh dims over which the tensor is Partial."""
        return tuple(d for d in range(len(self.placements)) if self.kind(d) == "P")

    def moved_to(self, placements: Sequence[str]) -> Layout:
        """Return the layout after a step to ``placements``: mesh dims that begin to shard a tensor dim do so last.

        >>> str(Layout.of(("R", "S(0)")).moved_to(("S(0)", "S(0)")))
        '(S(0)[1], S(0)[0])'
        """
        plain = Layout.of(placements)
        orders: dict[int, Sequence[int]] = {}
        for tensor_dim in {_tensor_dim(text) for text in placements}:
            if tensor_dim is not None:
                dims = plain.order(tensor_dim)
                stay = [d for d in self.order(tensor_dim) if d in dims and self.placements[d] == placements[d]]
                orders[tensor_dim] = [*stay, *(d for d in dims if d not in stay)]
        return Layout.of(placements, orders)

    @classmethod
    def of(cls, placements: Sequence[str], orders: Mapping[int, Sequence[int]] | None = None) -> Layout:
        """Return the layout of ``placements``; ``orders`` gives the order of mesh dims for tensor dims.

        >>> str(Layout.of(("S(1)", "S(1)"), {1: (1, 0)}))
        '(S(1)[1], S(1)[0])'
        """
        positions = [0] * len(placements)
        for tensor_dim in {_tensor_dim(text) for text in placements} - {None}:
            dims = [d for d, text in enumerate(placements) if _tensor_dim(text) == tensor_dim]
            for position, mesh_dim in enumerate((orders or {}).get(tensor_dim, dims)):  # type: ignore[arg-type]
                positions[mesh_dim] = position
        return cls(tuple(placements), tuple(positions))


def _tensor_dim(text: str) -> int | None:
    return int(text.partition("(")[2].partition(")")[0].partition(",")[0]) if text.lstrip("_").startswith("S") else None


_TOKEN = re.compile(r"(R|P(?:\(\w+\))?|S\(-?\d+\)|_S\(\d+, ?\d+\))(?:\[(\d)\])?[,\s]*")
_PARTIAL = "P(sum)"


def parse_layout(text: str, ndim: int, mesh_ndim: int) -> Layout:
    """Return the layout that ``text`` names, for a tensor of ``ndim`` dims on ``mesh_ndim`` mesh dims.

    The text is as the verifier prints it, ``(S(0)[1], S(0)[0])``, or as DTensor's debug mode does, ``S(0)[1]S(0)[0]``.

    Raises
    ------
    ValueError
        If the text is something else, or does not fit the tensor or the mesh.

    >>> str(parse_layout("S(0)S(2)", 3, 2)), str(parse_layout("(P, S(-1))", 3, 2))
    ('(S(0), S(2))', '(P(sum), S(2))')
    """
    inner, placements, given = text.strip(), [], list[int | None]()
    if inner.startswith("(") and inner.endswith(")"):
        inner = inner[1:-1]
    while inner:
        match = _TOKEN.match(inner)
        if match is None:
            raise ValueError(
                f"{text!r}: {inner[:40]!r} is no placement; write R, S(0), P(sum) or _S(0, 2) for each mesh dim, as "
                "'(S(0), R)', and a shard order as '(S(0)[1], S(0)[0])'"
            )
        placements.append(_checked(match[1], text, ndim))
        given.append(int(match[2]) if match[2] else None)
        inner = inner[match.end() :]
    if len(placements) != mesh_ndim:
        raise ValueError(f"{text!r} has placements for {len(placements)} mesh dims; the mesh has {mesh_ndim}")
    reductions = {one for one in placements if one.startswith("P")}
    if len(reductions) > 1:
        raise ValueError(f"{text!r} mixes {' and '.join(sorted(reductions))}; one reduction is supported")
    return Layout.of(placements, _orders(placements, given, text))


def _checked(placement: str, text: str, ndim: int) -> str:
    """Return ``placement`` as DTensor prints it, or raise ValueError."""
    if placement.startswith("P"):
        reduction = placement[2:-1] or "sum"
        if reduction not in (*REDUCTIONS, *BITWISE_REDUCTIONS):
            raise ValueError(f"{text!r}: {placement!r} is none of P({'|'.join((*REDUCTIONS, *BITWISE_REDUCTIONS))})")
        return f"P({reduction})"
    tensor_dim = _tensor_dim(placement)
    if tensor_dim is None:
        return placement
    if not -ndim <= tensor_dim < ndim:
        raise ValueError(f"{text!r}: {placement} names tensor dim {tensor_dim}, the shape has {ndim} dims")
    if placement.startswith("_"):
        factor = int(placement[:-1].rpartition(",")[2])
        if factor < 1:
            raise ValueError(f"{text!r}: {placement} has split factor {factor}; it is at least 1")
        if factor > _MOST_PIECES:
            raise ValueError(f"{text!r}: {placement} has split factor {factor}; at most {_MOST_PIECES:,} is judged")
        return f"_S({tensor_dim}, {factor})"
    return f"S({tensor_dim % ndim})"


def _orders(placements: Sequence[str], given: Sequence[int | None], text: str) -> dict[int, Sequence[int]]:
    orders: dict[int, Sequence[int]] = {}
    for tensor_dim in {_tensor_dim(one) for one in placements} - {None}:
        dims = [d for d, one in enumerate(placements) if _tensor_dim(one) == tensor_dim]
        positions = [given[d] for d in dims]
        if positions.count(None) == len(dims):
            continue
        if sorted(p for p in positions if p is not None) != list(range(len(dims))):
            raise ValueError(
                f"{text!r}: the order of the {len(dims)} shards of tensor dim {tensor_dim} is not 0 to n-1"
            )
        orders[tensor_dim] = sorted(dims, key=lambda d: given[d] or 0)  # type: ignore[index]
    stray = [one for one, position in zip(placements, given, strict=True) if position and _tensor_dim(one) is None]
    if stray:
        raise ValueError(f"{text!r}: {stray[0]} has no shard order")
    return orders


class Space:
    """All layouts of a tensor of ``shape`` on a mesh of ``mesh_shape``, and the exact indices of each rank.

    Parameters
    ----------
    mesh_shape, shape
        Sizes of the mesh dims and of the tensor dims. Ranks are numbered row-major.
    itemsize
        Bytes of an element.
    partial
        The reduction of Partial layouts.
    strided
        Strided shards that occur as well, such as ``_S(0, 2)``.

    >>> space = Space((2, 2), (5, 3))
    >>> len(space.layouts), space.local_bytes(parse_layout("(S(0), R)", 2, 2))
    (18, (36, 36, 24, 24))
    """

    def __init__(
        self,
        mesh_shape: Sequence[int],
        shape: Sequence[int],
        itemsize: int = 4,
        partial: str = "sum",
        strided: Sequence[str] = (),
    ) -> None:
        self.mesh_shape, self.shape, self.itemsize = tuple(mesh_shape), tuple(shape), itemsize
        self.partial, self.strided = partial, tuple(strided)
        self.coordinates = tuple(itertools.product(*map(range, mesh_shape)))
        self._indices: dict[tuple[int, tuple[tuple[int, str], ...]], tuple[Indices, ...]] = {}
        self._boxes: dict[Layout, tuple[Box, ...]] = {}
        self._groups: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}

    def __repr__(self) -> str:
        return f"Space({self.mesh_shape}, {self.shape})"

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """Every layout: placements with every shard order."""
        letters = ["R", *(f"S({d})" for d in range(len(self.shape))), f"P({self.partial})", *self.strided]
        return tuple(
            Layout.of(placements, orders)
            for placements in itertools.product(letters, repeat=len(self.mesh_shape))
            for orders in _all_orders(placements)
        )

    def boxes(self, layout: Layout) -> tuple[Box, ...]:
        """Return what each rank holds, in rank order. Partial summands count as held."""
        known = self._boxes.get(layout)
        if known is None:
            dims = [self._indices_of(dim, layout) for dim in range(len(self.shape))]
            boxes = [tuple(indices[rank] for indices in dims) for rank in range(len(self.coordinates))]
            known = self._boxes[layout] = tuple(box if all(box) else ((),) * len(dims) for box in boxes)
        return known

    def _indices_of(self, tensor_dim: int, layout: Layout) -> tuple[Indices, ...]:
        """Return the indices of ``tensor_dim`` that each rank holds."""
        cuts = tuple((mesh_dim, layout.placements[mesh_dim]) for mesh_dim in layout.order(tensor_dim))
        key = (tensor_dim, cuts)
        if key not in self._indices:
            by_index: dict[tuple[int, ...], Indices] = {}
            for coordinate in self.coordinates:
                at = tuple(coordinate[mesh_dim] for mesh_dim, _ in cuts)
                if at not in by_index:
                    by_index[at] = self._cut(self.shape[tensor_dim], cuts, at)
            self._indices[key] = tuple(by_index[tuple(c[mesh_dim] for mesh_dim, _ in cuts)] for c in self.coordinates)
        return self._indices[key]

    def _cut(self, size: int, cuts: Sequence[tuple[int, str]], at: Sequence[int]) -> Indices:
        indices = joined([(0, size)])
        for (mesh_dim, placement), index in zip(cuts, at, strict=True):
            extent = self.mesh_shape[mesh_dim]
            if placement.startswith("_"):
                factor = int(placement[:-1].rpartition(",")[2])
                indices = strided(indices, factor, extent, index)
            else:
                indices = positions(indices, *shard_bounds(count(indices), extent, index))
        return indices

    def local_bytes(self, layout: Layout) -> tuple[int, ...]:
        """Return the bytes of the local tensor of each rank, in rank order."""
        return tuple(size_of(box) * self.itemsize for box in self.boxes(layout))

    def largest(self, layout: Layout) -> int:
        """Return the bytes of the largest local tensor."""
        return max(self.local_bytes(layout))

    def groups(self, mesh_dims: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks along ``mesh_dims``: in a group, only the coordinates on these differ."""
        if mesh_dims not in self._groups:
            groups: dict[tuple[int, ...], list[int]] = {}
            for rank, coordinate in enumerate(self.coordinates):
                groups.setdefault(tuple(c for d, c in enumerate(coordinate) if d not in mesh_dims), []).append(rank)
            self._groups[mesh_dims] = tuple(map(tuple, groups.values()))
        return self._groups[mesh_dims]


def _all_orders(placements: Sequence[str]) -> Iterator[dict[int, Sequence[int]]]:
    """Yield every shard order of ``placements``, as orders of mesh dims by tensor dim."""
    dims: dict[int, list[int]] = {}
    for mesh_dim, text in enumerate(placements):
        if (tensor_dim := _tensor_dim(text)) is not None:
            dims.setdefault(tensor_dim, []).append(mesh_dim)
    for orders in itertools.product(*(itertools.permutations(mesh_dims) for mesh_dims in dims.values())):
        yield dict(zip(dims, orders, strict=True))
