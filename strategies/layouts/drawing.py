"""Draws which rank holds which chunks of a table: as text for a terminal, and as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

from markupsafe import Markup

from strategies.layouts.tables import TableLayout
from verifier.core.wording import plural
from verifier.report.pages import page_environment
from verifier.report.svg import MOST_RANKS_DRAWN, Held, LocalPart, parts_svg, ranks_left_out

__all__ = [
    "layout_lines",
    "layout_svg",
    "render_layouts",
]


def layout_lines(layout: TableLayout, summary: str = "") -> list[str]:
    """Return a layout as lines of text: the table with the rank that holds each part, then the chunks of each rank.

    Adjacent rows or columns that the same ranks hold share a line or column of text, so large tables take few lines.
    """
    rows, columns = layout.shape
    where = f"{plural(rows, 'row')}, {plural(columns, 'column')}, {plural(layout.ranks, 'rank')}"
    if layout.ranks_per_host:
        where += f", {layout.ranks_per_host} a host"
    lines = [f"{layout.name}: {where}" + (f"; {summary}" if summary else "")]
    bands = [_bands(layout, dim) for dim in (0, 1)]
    cells = [["", *(_range("columns", band) for band in bands[1])]]
    for band in bands[0]:
        cells.append([_range("rows", band), *(_owners(layout, (band[0], column[0])) for column in bands[1])])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        texts = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(f"  {texts[0]}  {' | '.join(texts[1:])}".rstrip())
    lines.append(f"  DTensor shows {layout.placement}")
    for rank, chunks in enumerate(layout.chunks):
        host = layout.host(rank)
        elements = sum(chunk.shape[0] * chunk.shape[1] for chunk in chunks)
        text = f"{', '.join(map(str, chunks))} ({plural(elements, 'element')})" if chunks else "nothing"
        lines.append(f"  rank {rank}{'' if host is None else f' on host {host}'}: {text}")
    return lines


def _bands(layout: TableLayout, dim: int) -> list[tuple[int, int]]:
    """Return the runs of rows (``dim`` 0) or columns (``dim`` 1) between edges of chunks of different ranks."""
    ranges = [(chunk.rows, chunk.columns) for chunks in layout.chunks for chunk in chunks]
    edges = [sorted({0, layout.shape[axis], *(edge for both in ranges for edge in both[axis])}) for axis in (0, 1)]
    others = edges[1 - dim][:-1]

    def owners(band: tuple[int, int]) -> list[str]:
        return [_owners(layout, (band[0], at) if dim == 0 else (at, band[0])) for at in others]

    merged = [list(group) for _, group in groupby(pairwise(edges[dim]), key=owners)]
    return [(group[0][0], group[-1][1]) for group in merged]


def _range(what: str, band: tuple[int, int]) -> str:
    first, last = band[0], band[1] - 1
    return f"{what[:-1]} {first}" if first == last else f"{what} {first}-{last}"


def _owners(layout: TableLayout, at: tuple[int, int]) -> str:
    row, column = at
    ranks = [
        rank
        for rank, chunks in enumerate(layout.chunks)
        if any(c.rows[0] <= row < c.rows[1] and c.columns[0] <= column < c.columns[1] for c in chunks)
    ]
    if not ranks:
        return "nobody"
    if len(ranks) == layout.ranks > 1:
        return "every rank"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def render_layouts(layouts: Sequence[tuple[TableLayout, str]]) -> str:
    """Return layouts, each with its summary, as one HTML page that loads nothing."""
    environment = page_environment("strategies.layouts")
    views = [
        (layout, summary, layout_svg(layout), ranks_left_out(layout.ranks), layout_lines(layout))
        for layout, summary in layouts
    ]
    return environment.get_template("layouts.html.jinja").render(views=views)


def layout_svg(layout: TableLayout) -> Markup:
    """Return an SVG of the chunks that each rank holds, with one row per host if hosts matter."""
    held = []
    for rank, chunks in enumerate(layout.chunks[:MOST_RANKS_DRAWN]):
        what = " ".join(f"[{', '.join(map(str, chunk.shape))}]" for chunk in chunks) or "empty"
        host = layout.host(rank)
        parts = tuple(LocalPart((chunk.rows, chunk.columns), pending=False) for chunk in chunks)
        held.append(Held(parts, what, "" if host is None else f" host {host}"))
    per_row = min(layout.ranks_per_host or layout.ranks, 8)
    longest = max(len(one.what) for one in held)
    label = f"table {list(layout.shape)}, {layout.name} on {layout.ranks} ranks"
    return parts_svg(label, layout.shape, (0, 1), held, per_row, max(90, 7 * longest))
