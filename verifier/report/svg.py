"""Pictures of sharded tensors: one small drawing per rank, arranged like the mesh."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from verifier.core.case import MeshSpec
from verifier.core.placement_text import split_placements
from verifier.placements.bounds import shard_bounds

__all__ = [
    "MOST_RANKS_DRAWN",
    "Held",
    "LocalPart",
    "drawn_text",
    "local_part",
    "parts_svg",
    "ranks_left_out",
    "sharding_svg",
]

MOST_RANKS_DRAWN = 32
_LONGEST = 66.0
"""Longest side of a drawn tensor, in CSS pixels."""
_CELL = 13.0
_SHORTEST = 9.0


@dataclass(frozen=True)
class LocalPart:
    """A rank's part of a global tensor: a half-open range for each tensor dim.

    ``pending`` is True if the local values are a contribution that still has to be reduced.
    """

    bounds: tuple[tuple[int, int], ...]
    pending: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(end - begin for begin, end in self.bounds)


def local_part(shape: Sequence[int], placements: str, mesh: MeshSpec, rank: int) -> LocalPart | None:
    """Return the part of ``rank`` of a tensor of ``shape``; None for placements without contiguous parts.

    >>> local_part([5, 2], "S(0)", MeshSpec((4,)), 2)
    LocalPart(bounds=((4, 5), (0, 2)), pending=False)
    >>> local_part([5], "_S(0, 2)", MeshSpec((4,)), 2) is None
    True
    """
    bounds = [(0, extent) for extent in shape]
    pending = False
    parts = split_placements(placements)
    if len(parts) != mesh.ndim:
        return None
    for text, extent, index in zip(parts, mesh.shape, mesh.coordinate(rank), strict=True):
        if match := re.fullmatch(r"S\((\d+)\)", text):
            dim = int(match[1])
            if dim >= len(bounds):
                return None
            begin, end = bounds[dim]
            low, high = shard_bounds(end - begin, extent, index)
            bounds[dim] = (begin + low, begin + high)
        elif re.match(r"_?\w*P\w*\(", text):
            pending = True
        elif text != "R":
            return None
    return LocalPart(tuple(bounds), pending)


def _drawn_dims(shape: Sequence[int], placements: str) -> tuple[int | None, int | None]:
    """Return the tensor dims that go down and across: sharded dims first, in ascending order."""
    cut = [int(dim) for dim in re.findall(r"\bS\((\d+)\)", placements)]
    order = sorted(range(len(shape)), key=lambda dim: (dim not in cut, dim))
    chosen = sorted(order[:2])
    if not chosen:
        return None, None
    return (chosen[0], chosen[1]) if len(chosen) == 2 else (None, chosen[0])


def _side(extent: int) -> float:
    return min(max(extent * _CELL, _SHORTEST), _LONGEST)


def _rank_drawing(parts: Sequence[LocalPart], shape: Sequence[int], down: int | None, across: int | None) -> str:
    """Return the drawing of a rank, with its upper left corner at the origin."""
    rows, columns = (1 if dim is None else shape[dim] for dim in (down, across))
    height, width = _side(rows), _side(columns)
    dy, dx = height / max(rows, 1), width / max(columns, 1)
    out = [f'<rect class="all" width="{width:.1f}" height="{height:.1f}"/>']
    drawn = [part for part in parts if 0 not in part.shape]
    for part in drawn:
        (top, bottom), (left, right) = ((0, 1) if dim is None else part.bounds[dim] for dim in (down, across))
        box = (
            f'x="{left * dx:.1f}" y="{top * dy:.1f}" '
            f'width="{(right - left) * dx:.1f}" height="{(bottom - top) * dy:.1f}"'
        )
        out.append(f'<rect class="{"pending" if part.pending else "own"}" {box}/>')
        if part.pending:
            out.append(f'<rect class="hatch" {box} fill="url(#hatch)"/>')
    if drawn and dy >= 5:
        out += [f'<path class="grid" d="M0 {i * dy:.1f}H{width:.1f}"/>' for i in range(1, rows)]
    if drawn and dx >= 5:
        out += [f'<path class="grid" d="M{i * dx:.1f} 0V{height:.1f}"/>' for i in range(1, columns)]
    out.append(f'<rect class="edge" width="{width:.1f}" height="{height:.1f}"/>')
    return "".join(out)


@dataclass(frozen=True)
class Held:
    """The parts of a rank, and the text beside them."""

    parts: tuple[LocalPart, ...]
    what: str
    where: str = ""


def parts_svg(
    label: str,
    shape: Sequence[int],
    dims: tuple[int | None, int | None],
    held: Sequence[Held],
    per_row: int,
    least_step: float,
) -> Markup:
    """Return the drawings of all ranks, ``per_row`` in a row, each at least ``least_step`` wide."""
    height, width = (_side(1 if dim is None else shape[dim]) for dim in dims)
    step_x, step_y = max(width + 14, least_step), height + 42
    drawings = []
    for rank, one in enumerate(held):
        x, y = rank % per_row * step_x + 1, rank // per_row * step_y + 14
        drawings.append(
            f'<g transform="translate({x:.1f} {y:.1f})"><text class="rank" y="-4">rank {rank}'
            f'<tspan class="at">{one.where}</tspan></text>{_rank_drawing(one.parts, shape, *dims)}'
            f'<text class="local" y="{height + 12:.1f}">{one.what}</text></g>'
        )
    rows = -(-len(held) // per_row)
    total_width, total_height = per_row * step_x + 8, rows * step_y - 8
    spoken = ", ".join(f"rank {rank} {one.what}" for rank, one in enumerate(held))
    return Markup(
        f'<svg class="shards" role="img" aria-label="{escape(f"{label}: {spoken}", quote=True)}" '
        f'width="{total_width:.0f}" height="{total_height:.0f}" '
        f'viewBox="0 0 {total_width:.0f} {total_height:.0f}">{"".join(drawings)}</svg>'
    )


def sharding_svg(name: str, shape: Sequence[int], placements: str, mesh: MeshSpec) -> Markup | None:
    """Return an SVG of each rank's part; None for placements without contiguous parts.

    The picture is arranged like the mesh: mesh dim 0 goes down, the others across; a 1-d mesh is one row. A rank's part
    is filled, or hatched if it has to be reduced. A rank without elements says so.
    """
    held = []
    for rank in range(min(mesh.world_size, MOST_RANKS_DRAWN)):
        part = local_part(shape, placements, mesh, rank)
        if part is None:
            return None
        what = "empty" if 0 in part.shape else f"[{', '.join(map(str, part.shape))}]"
        held.append(Held((part,), what, f" ({','.join(map(str, mesh.coordinate(rank)))})" if mesh.ndim > 1 else ""))
    per_row = min(mesh.world_size // mesh.shape[0] if mesh.ndim > 1 else mesh.world_size, 8)
    label = f"{name} {list(shape)} as {placements} on mesh {mesh}"
    least_step = 64 if mesh.ndim == 1 else 74 + 12 * (mesh.ndim - 1)
    return parts_svg(label, shape, _drawn_dims(shape, placements), held, per_row, least_step)


def drawn_text(shape: Sequence[int], placements: str, mesh: MeshSpec) -> str:
    """Return a line on the omissions of the picture; empty if it shows everything."""
    down, across = _drawn_dims(shape, placements)
    notes = []
    if len(shape) > 2:
        notes.append(f"tensor dim {down} goes down, {across} across; the others are not drawn")
    if missing := ranks_left_out(mesh.world_size):
        notes.append(missing)
    return "; ".join(notes)


def ranks_left_out(ranks: int) -> str:
    """Return which ranks a picture of ``ranks`` ranks leaves out; empty if it shows all ranks.

    >>> ranks_left_out(32), ranks_left_out(64)
    ('', 'ranks 32 to 63 are not drawn')
    """
    return f"ranks {MOST_RANKS_DRAWN} to {ranks - 1} are not drawn" if ranks > MOST_RANKS_DRAWN else ""
