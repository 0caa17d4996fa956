"""The map of a mesh: all placements in a grid by their kinds, and routes of redistributions between them, as SVG."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from verifier.redistribution.graph import Path
from verifier.redistribution.layouts import Layout

__all__ = ["map_svg"]

_COLUMN, _ROW, _TOP, _RIGHT, _LETTER = 66.0, 54.0, 58.0, 22.0, 7.0
"""Distances of columns and rows, height of the headings, the margin, width of a letter, in CSS pixels."""
_DOT = 9.0

Place = tuple[str, ...]
"""The kinds of placements on all mesh dims, as ``P``, ``S(0)``, ``_S(0)``, ``R``: a node of the map."""
Point = tuple[float, float]


@dataclass(frozen=True)
class _Grid:
    """The nodes of a map: mesh dim 0 goes across, and the other mesh dims down."""

    columns: tuple[str, ...]
    rows: tuple[Place, ...]

    @property
    def left(self) -> float:
        """Width of the headings of the rows."""
        return 24 + _LETTER * max(len(", ".join(row)) for row in self.rows) if self.rows != ((),) else 24

    @property
    def width(self) -> float:
        return self.left + _COLUMN * len(self.columns) + _RIGHT

    @property
    def height(self) -> float:
        return _TOP + _ROW * len(self.rows) + 10

    def at(self, place: Place) -> Point:
        column, row = self.columns.index(place[0]), self.rows.index(place[1:])
        return self.left + _COLUMN * (column + 0.5), _TOP + _ROW * (row + 0.5)


def map_svg(mesh: str, routes: Sequence[tuple[Path, Path | None]]) -> Markup:
    """Return the map of a mesh with a group for each route: the path that ran, and the best one if that is another.

    Each group has its number as ``data-route``; the first is shown, and the page's script shows others. Steps have the
    numbers by which the page lists them.
    """
    grid = _grid([path for pair in routes for path in pair if path is not None])
    parts = [
        f'<svg class="map" width="{grid.width:.0f}" height="{grid.height:.0f}" '
        f'viewBox="0 0 {grid.width:.0f} {grid.height:.0f}" role="img" '
        f'aria-label="placements on mesh {escape(mesh)}, and the paths of the redistribution that is chosen">'
    ]
    parts += _headings(grid)
    for place in itertools.product(grid.columns, grid.rows):
        x, y = grid.at((place[0], *place[1]))
        name = escape(f"({', '.join((place[0], *place[1]))})" if place[1] else place[0])
        parts.append(f'<circle class="node" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{name}</title></circle>')
    for number, (ran, best) in enumerate(routes):
        hidden = "" if number == 0 else ' style="display:none"'
        parts.append(f'<g class="route" data-route="{number}"{hidden}>{_route(grid, ran, best)}</g>')
    return Markup("".join([*parts, "</svg>"]))


def _grid(paths: Sequence[Path]) -> _Grid:
    places = {_place(layout) for path in paths for layout in path.layouts}
    ndim = max(map(len, places), default=1)
    kinds = [sorted({place[dim] for place in places}, key=_order) for dim in range(ndim)]
    columns = tuple(kinds[0]) if kinds else ()
    if ndim == 2:
        return _Grid(columns, tuple((kind,) for kind in kinds[1]))
    return _Grid(columns, tuple(sorted({place[1:] for place in places}, key=lambda row: [*map(_order, row)])))


def _place(layout: Layout) -> Place:
    return tuple(_kind(text) for text in layout.placements)


def _kind(text: str) -> str:
    """Return the kind of a placement: reductions and split factors are left out.

    >>> _kind("P(max)"), _kind("_S(0, 2)"), _kind("S(1)"), _kind("R")
    ('P', '_S(0)', 'S(1)', 'R')
    """
    return "P" if text.startswith("P") else f"{text.partition(',')[0].rstrip(')')})" if "S" in text else text


def _order(kind: str) -> tuple[int, str]:
    return ("P", "S", "_", "R").index(kind[0]), kind


def _headings(grid: _Grid) -> list[str]:
    parts = [f'<text class="axis" x="{grid.width:.0f}" y="12" text-anchor="end">mesh dim 0 →</text>']
    for number, column in enumerate(grid.columns):
        x = grid.left + _COLUMN * (number + 0.5)
        parts.append(f'<text class="heading" x="{x:.1f}" y="32" text-anchor="middle">{escape(column)}</text>')
        parts.append(f'<path class="rail" d="M{x:.1f} {_TOP:.0f}V{_TOP + _ROW * len(grid.rows):.0f}"/>')
    if len(grid.rows[0]) == 0:
        return parts
    others = "mesh dim 1" if len(grid.rows[0]) == 1 else "mesh dims 1, 2"
    parts.append(f'<text class="axis" x="2" y="12">{others} ↓</text>')
    for number, row in enumerate(grid.rows):
        y = _TOP + _ROW * (number + 0.5)
        text = escape(", ".join(row))
        parts.append(f'<text class="heading" x="{grid.left - 10:.1f}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        parts.append(f'<path class="rail" d="M{grid.left:.1f} {y:.1f}H{grid.width - _RIGHT:.1f}"/>')
    return parts


def _route(grid: _Grid, ran: Path, best: Path | None) -> str:
    parts = _line(grid, ran, "ran", -1.0)
    if best is not None and best.layouts != ran.layouts:
        parts += _line(grid, best, "best", 1.0)
    for layout in sorted({*ran.layouts, *(best.layouts if best else ())} - {ran.source, ran.target}):
        x, y = grid.at(_place(layout))
        parts.insert(
            0, f'<circle class="via" cx="{x:.1f}" cy="{y:.1f}" r="6"><title>{escape(str(layout))}</title></circle>'
        )
    (x, y), (u, v) = grid.at(_place(ran.source)), grid.at(_place(ran.target))
    parts.append(f'<circle class="from" cx="{x:.1f}" cy="{y:.1f}" r="{_DOT}"><title>from {ran.source}</title></circle>')
    parts.append(f'<circle class="to" cx="{u:.1f}" cy="{v:.1f}" r="{_DOT}"><title>to {ran.target}</title></circle>')
    return "".join(parts)


def _line(grid: _Grid, path: Path, style: str, side: float) -> list[str]:
    """Return the arrows of a path with the numbers of its steps; ``side`` is where they bend: -1 left, 1 right."""
    places = [grid.at(_place(layout)) for layout in path.layouts]
    parts = []
    for number, (step, begin, end) in enumerate(zip(path.steps, places, places[1:], strict=False), 1):
        control, middle = _bend(begin, end, side)
        start, tip = _toward(begin, control, _DOT + 1), _toward(end, control, _DOT + 2)
        angle = math.atan2(tip[1] - control[1], tip[0] - control[0])
        wings = [(tip[0] - 9 * math.cos(angle + s), tip[1] - 9 * math.sin(angle + s)) for s in (0.4, -0.4)]
        head = " ".join(f"{x:.1f},{y:.1f}" for x, y in (tip, *wings))
        what = escape(f"{number}. {step}")
        parts.append(
            f'<g class="{style}{" local" * step.is_local}"><title>{what}</title>'
            f'<path class="wire" d="M{start[0]:.1f} {start[1]:.1f}Q{control[0]:.1f} {control[1]:.1f} '
            f'{tip[0]:.1f} {tip[1]:.1f}"/><polygon points="{head}"/>'
            f'<circle class="stop" cx="{middle[0]:.1f}" cy="{middle[1]:.1f}" r="8"/>'
            f'<text class="stop" x="{middle[0]:.1f}" y="{middle[1] + 4:.1f}" text-anchor="middle">{number}</text></g>'
        )
    return parts


def _bend(begin: Point, end: Point, side: float) -> tuple[Point, Point]:
    """Return the control point of the arrow from ``begin`` to ``end``, and its middle.

    An arrow bends so far that it passes by the nodes between its ends. A step that changes the shard order alone is a
    loop.
    """
    (x, y), (u, v) = begin, end
    if begin == end:
        return (x + side * 50, y - 44), (x + side * 27, y - 24)
    dx, dy = u - x, v - y
    length = math.hypot(dx, dy)
    bend = side * (14 + 0.16 * length)
    control = ((x + u) / 2 - dy / length * bend * 1.4, (y + v) / 2 + dx / length * bend * 1.4)
    return control, ((x + 2 * control[0] + u) / 4, (y + 2 * control[1] + v) / 4)


def _toward(center: Point, toward: Point, gap: float) -> Point:
    dx, dy = toward[0] - center[0], toward[1] - center[1]
    length = math.hypot(dx, dy) or 1.0
    return center[0] + dx / length * gap, center[1] + dy / length * gap
