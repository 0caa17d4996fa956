"""The redistribution graph as inline SVG, with a drawing for each number of mesh dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import networkx as nx  # type: ignore[import-untyped]
from markupsafe import Markup

from verifier.core.placement_text import split_placements
from verifier.core.wording import bytes_text, plural
from verifier.records.schema import EdgeRecord, GraphRecord
from verifier.runs.graph import LOCAL

__all__ = ["Drawing", "collective_class", "draw_graph", "placement_order"]

_COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", LOCAL)
_FONT = 7.3
"""Width of a character of the nodes' 12 px monospaced font, in CSS pixels."""
_NODE_HEIGHT = 24.0

Point = tuple[float, float]


def collective_class(collective: str) -> str:
    """Return the CSS class with a collective's colour and dashes."""
    return f"c{_COLLECTIVES.index(collective)}" if collective in _COLLECTIVES else "c5"


def placement_order(text: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key for placements, by mesh dim: R, then S by tensor dim, then Partial, then the rest.

    >>> sorted(["P(sum)", "S(10)", "S(2)", "R"], key=placement_order)
    ['R', 'S(2)', 'S(10)', 'P(sum)']
    """
    return tuple(
        (0 if part == "R" else 1 if part.startswith("S(") else 2 if part.startswith("P(") else 3, part.rjust(12))
        for part in split_placements(text)
    )


@dataclass(frozen=True)
class Drawing:
    """The graph of all meshes with ``mesh_ndim`` mesh dims: its picture, and its edges for a table."""

    mesh_ndim: int
    svg: Markup
    collectives: tuple[str, ...]
    edges: tuple[EdgeRecord, ...]
    steps: int
    bytes: int


def draw_graph(record: GraphRecord) -> list[Drawing]:
    """Return a drawing for each number of mesh dims in ``record``, fewest first; the result is deterministic.

    On one mesh dim the nodes are on a circle. On several, a node's column is its placement on the first mesh dim, and
    its row has the other placements. So a step on one mesh dim runs along a row or a column.
    """
    drawings = []
    for mesh_ndim in sorted({len(split_placements(node)) for node in record.nodes}):
        nodes = sorted((n for n in record.nodes if len(split_placements(n)) == mesh_ndim), key=placement_order)
        inside = set(nodes)
        edges = sorted(
            (edge for edge in record.edges if edge.source in inside),
            key=lambda e: (-e.count, placement_order(e.source), placement_order(e.target), e.mesh, e.mesh_dim),
        )
        used = {edge.collective for edge in edges}
        collectives = [name for name in _COLLECTIVES if name in used] + sorted(used.difference(_COLLECTIVES))
        positions = _circle(nodes) if mesh_ndim == 1 else _grid(nodes)
        drawings.append(
            Drawing(
                mesh_ndim,
                _svg(positions, edges),
                tuple(collectives),
                tuple(edges),
                sum(edge.count for edge in edges),
                sum(edge.bytes for edge in edges),
            )
        )
    return drawings


# ------------------------------------------------------------------------------------------------------------- layout
def _circle(nodes: Sequence[str]) -> dict[str, Point]:
    """Place nodes on an ellipse, the first node at the top."""
    graph = nx.Graph()
    graph.add_nodes_from(nodes)
    radius = 60.0 + 20.0 * len(nodes)
    # Two nodes are side by side, so that the picture stays flat.
    turn = 0.0 if len(nodes) == 2 else math.pi / 2
    placed = {}
    for node, (x, y) in nx.circular_layout(graph).items():
        angle = math.atan2(y, x) - turn if len(nodes) > 1 else 0.0
        placed[node] = (1.5 * radius * math.cos(angle), radius * math.sin(angle))
    return placed


def _grid(nodes: Sequence[str]) -> dict[str, Point]:
    split = {node: split_placements(node) for node in nodes}
    columns = sorted({parts[0] for parts in split.values()}, key=placement_order)
    rows = sorted({parts[1:] for parts in split.values()}, key=lambda parts: [placement_order(part) for part in parts])
    step = max(len(node) for node in nodes) * _FONT + 84
    return {node: (columns.index(parts[0]) * step, rows.index(parts[1:]) * 92.0) for node, parts in split.items()}


# ------------------------------------------------------------------------------------------------------------ drawing
def _half_width(node: str) -> float:
    return (len(node) * _FONT + 18) / 2


def _leave(center: Point, toward: Point, node: str, gap: float) -> Point:
    """Return the point ``gap`` pixels after a line from ``center`` to ``toward`` leaves the node's box."""
    dx, dy = toward[0] - center[0], toward[1] - center[1]
    length = math.hypot(dx, dy) or 1.0
    to_side = _half_width(node) / abs(dx / length) if dx else math.inf
    to_top = _NODE_HEIGHT / 2 / abs(dy / length) if dy else math.inf
    reach = min(to_side, to_top) + gap
    return center[0] + dx / length * reach, center[1] + dy / length * reach


@dataclass(frozen=True)
class _Curve:
    """A quadratic Bézier curve."""

    begin: Point
    control: Point
    end: Point

    def at(self, t: float) -> Point:
        """Return the point at ``t`` from 0 to 1."""
        a, b, c = (1 - t) ** 2, 2 * t * (1 - t), t**2
        x, y = (a * p + b * q + c * r for p, q, r in zip(self.begin, self.control, self.end, strict=True))
        return x, y


def _curve(source: str, target: str, place: dict[str, Point], lane: int) -> _Curve:
    """Return an edge's curve from box to box.

    Each edge bends to its left, so that the reverse edge does not cover it; ``lane`` bends parallel edges further.
    """
    (x0, y0), (x1, y1) = place[source], place[target]
    if source == target:
        return _Curve((x0 - 12, y0 - 12.0), (x0, y0 - 62.0 - 14 * lane), (x0 + 12, y0 - 15.0))
    dx, dy = x1 - x0, y1 - y0
    length = math.hypot(dx, dy)
    across = abs(dy) / length * 0.32 + 0.16  # nodes are wider than high, so an upright curve bends further
    bend = 18 + across * length
    if abs(dy) > 0.8 * length and length > 100:  # its middle must not touch the nodes in between
        bend = max(bend, 2 * (max(map(_half_width, place)) + 12))
    bend += 26 * lane
    control = ((x0 + x1) / 2 + dy / length * bend, (y0 + y1) / 2 - dx / length * bend)
    return _Curve(_leave((x0, y0), control, source, 2), control, _leave((x1, y1), control, target, 4))


def _edge_svg(curve: _Curve, css: str, width: float, spoken: str) -> str:
    """Return an edge's line with its arrowhead."""
    (x0, y0), (x1, y1), end = curve.begin, curve.control, curve.end
    angle = math.atan2(end[1] - y1, end[0] - x1)
    head = 6.0 + width
    wings = [(end[0] - head * math.cos(angle + s), end[1] - head * math.sin(angle + s)) for s in (0.42, -0.42)]
    neck = (end[0] - 0.8 * head * math.cos(angle), end[1] - 0.8 * head * math.sin(angle))
    triangle = " ".join(f"{x:.1f},{y:.1f}" for x, y in (end, *wings))
    return (
        f'<g class="edge-group {css}"><title>{escape(spoken)}</title><path class="wire" stroke-width="{width:.1f}" '
        f'd="M{x0:.1f} {y0:.1f}Q{x1:.1f} {y1:.1f} {neck[0]:.1f} {neck[1]:.1f}"/><polygon points="{triangle}"/></g>'
    )


def _label_spot(curve: _Curve, half: float, taken: list[tuple[Point, float, float]]) -> Point:
    """Return the place nearest to the middle of ``curve`` where a label overlaps nothing in ``taken``, and take it.

    A label leaves the middle for this, because two adjacent numbers read as one.
    """
    spots = [curve.at(t) for t in (0.5, 0.43, 0.57, 0.36, 0.64, 0.29, 0.71, 0.22, 0.78)]

    def free(spot: Point) -> bool:
        return all(abs(spot[0] - x) > half + w + 3 or abs(spot[1] - y) > 7 + h for (x, y), w, h in taken)

    spot = next(filter(free, spots), spots[0])
    taken.append((spot, half, 7.0))
    return spot


def _svg(place: dict[str, Point], edges: Sequence[EdgeRecord]) -> Markup:
    groups: dict[tuple[str, str, str], list[EdgeRecord]] = {}
    for edge in edges:
        groups.setdefault((edge.source, edge.target, edge.collective), []).append(edge)
    counts = {ends: sum(edge.count for edge in group) for ends, group in groups.items()}
    most = max(counts.values(), default=0) or 1
    lanes: dict[tuple[str, str], int] = {}
    curves, labels, points = [], [], list(place.values())
    taken = [(center, _half_width(node), _NODE_HEIGHT / 2) for node, center in place.items()]
    for (source, target, collective), group in groups.items():
        lane = lanes.get((source, target), 0)
        lanes[source, target] = lane + 1
        curve = _curve(source, target, place, lane)
        count = counts[source, target, collective]
        size = bytes_text(sum(edge.bytes for edge in group))
        spoken = f"{source} to {target}: {collective}, {plural(count, 'step')}, {size}"
        css = collective_class(collective)
        curves.append(_edge_svg(curve, css, 1.2 + 3.3 * math.sqrt(count / most), spoken))
        x, y = _label_spot(curve, len(f"{count:,}") * 3.3, taken)
        labels.append(f'<text class="count {css}" x="{x:.1f}" y="{y + 3.5:.1f}">{count:,}</text>')
        points.append(curve.at(0.5))
    boxes = []
    for node, (x, y) in place.items():
        half = _half_width(node)
        points += [(x - half, y), (x + half, y)]
        boxes.append(
            f'<g class="node"><rect x="{x - half:.1f}" y="{y - _NODE_HEIGHT / 2:.1f}" width="{2 * half:.1f}" '
            f'height="{_NODE_HEIGHT:.0f}" rx="5"/><text x="{x:.1f}" y="{y + 4:.1f}">{escape(node)}</text></g>'
        )
    left, top = (min(point[axis] for point in points) for axis in (0, 1))
    right, bottom = (max(point[axis] for point in points) for axis in (0, 1))
    margins = (12.0, 24.0)
    width, height = right - left + 2 * margins[0], bottom - top + 2 * margins[1]
    label = f"redistributions between {plural(len(place), 'placement')}, {plural(len(groups), 'kind')} of step"
    return Markup(
        f'<svg class="graph" role="img" aria-label="{label}" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="{left - margins[0]:.1f} {top - margins[1]:.1f} {width:.1f} {height:.1f}">'
        f"{''.join(curves)}{''.join(boxes)}{''.join(labels)}</svg>"
    )
