"""Paths as inline SVG: one lane for each, from the same source to the same target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from markupsafe import Markup

from verifier.core.wording import bytes_text
from verifier.redistribution.graph import Path
from verifier.redistribution.steps import Step

__all__ = ["lanes_svg", "stacked_svg"]

_FONT = 7.3
"""Width of a character of the nodes' 12 px monospaced font, in CSS pixels."""
_ARROW, _LANE, _TOP, _NODE = 176.0, 74.0, 40.0, 24.0
"""Length of an arrow, height of a lane, the middle of the first lane, height of a node."""
_HEADING, _LETTER = 28.0, 6.8
"""Height of the title of a picture among others, and width of a letter of it."""


def lanes_svg(lanes: Sequence[tuple[str, Path]], css: Callable[[str], str] = lambda kind: kind) -> Markup:
    """Return a picture of paths with equal ends, each below its title.

    A node is a layout, and an arrow a step with its bytes. Arrows can be reached by the tab key, and say all about
    their step. ``css`` gives the class of a collective.
    """
    width, height = _extent(lanes)
    return Markup("".join([_opened(width, height, _all_spoken(lanes)), *_drawn(lanes, 0.0, css), "</svg>"]))


def stacked_svg(pictures: Sequence[tuple[str, Sequence[tuple[str, Path]]]]) -> Markup:
    """Return pictures as those of :func:`lanes_svg`, one below the other, each below its title."""
    extents = [_extent(lanes) for _, lanes in pictures]
    titled = max(len(title) for title, _ in pictures) * _LETTER + 24
    width = max(titled, *(width for width, _ in extents))
    height = sum(height + _HEADING for _, height in extents)
    spoken = ". ".join(f"{title}: {_all_spoken(lanes)}" for title, lanes in pictures)
    parts, top = [_opened(width, height, spoken)], 0.0
    for (title, lanes), (_, each) in zip(pictures, extents, strict=True):
        place = f'x="12" y="{top + 20:.0f}" font-size="12" font-weight="bold" fill="currentColor"'
        parts.append(f"<text {place}>{escape(title)}</text>")
        parts += _drawn(lanes, top + _HEADING, lambda kind: kind)
        top += each + _HEADING
    return Markup("".join([*parts, "</svg>"]))


def _opened(width: float, height: float, spoken: str) -> str:
    return (
        f'<svg class="graph" xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(spoken)}">'
    )


def _all_spoken(lanes: Sequence[tuple[str, Path]]) -> str:
    return " and ".join(f"{title}: {_spoken(path)}" for title, path in lanes)


def _wide(lanes: Sequence[tuple[str, Path]]) -> float:
    return max(len(str(layout)) for _, path in lanes for layout in path.layouts) * _FONT + 18


def _extent(lanes: Sequence[tuple[str, Path]]) -> tuple[float, float]:
    """Return width and height of a picture."""
    wide, reach = _wide(lanes), max(len(path.steps) for _, path in lanes)
    return reach * (wide + _ARROW) + wide + 24, _TOP + _LANE * len(lanes) - 26


def _drawn(lanes: Sequence[tuple[str, Path]], top: float, css: Callable[[str], str]) -> list[str]:
    """Return the elements of a picture that begins at ``top``."""
    wide, reach, parts = _wide(lanes), max(len(path.steps) for _, path in lanes), list[str]()
    for number, (title, path) in enumerate(lanes):
        middle = top + _TOP + number * _LANE
        stretch = reach / len(path.steps) if path.steps else 1.0
        places = [12 + position * stretch * (wide + _ARROW) for position in range(len(path.layouts))]
        size = f"{title}, {bytes_text(path.bytes)}"
        parts.append(f'<text x="12" y="{middle - 20:.0f}" font-size="11" fill="currentColor">{escape(size)}</text>')
        for step, left, right in zip(path.steps, places, places[1:], strict=False):
            parts.append(_arrow(step, left + wide, right, middle, css))
        parts += [_node(str(layout), left, middle, wide) for layout, left in zip(path.layouts, places, strict=True)]
    return parts


def _node(text: str, left: float, middle: float, width: float) -> str:
    return (
        f'<g class="node"><rect x="{left:.1f}" y="{middle - _NODE / 2:.1f}" width="{width:.1f}" height="{_NODE:.0f}" '
        f'rx="4" fill="none" stroke="currentColor"/><text x="{left + width / 2:.1f}" y="{middle + 4:.1f}" '
        f'text-anchor="middle" font-family="monospace" font-size="12" fill="currentColor">{escape(text)}</text></g>'
    )


def _arrow(step: Step, left: float, right: float, middle: float, css: Callable[[str], str]) -> str:
    """Return a step's arrow, with what it does above and its bytes below."""
    dims = ",".join(map(str, step.mesh_dims))
    name = f"{step.kind} {dims}" if dims else f"{step.kind}, local"
    spoken = f"{step}; {bytes_text(step.bytes)} received by all ranks, {bytes_text(step.busiest)} by the busiest"
    center, style = (left + right) / 2, css("none (local)" if step.is_local else step.kind)
    tip = right - 3
    return (
        f'<g class="edge-group {escape(style)}" tabindex="0" role="img" aria-label="{escape(spoken)}">'
        f"<title>{escape(spoken)}</title>"
        f'<path class="wire" stroke="currentColor" stroke-width="2" d="M{left + 2:.1f} {middle:.1f}H{tip - 7:.1f}"/>'
        f'<polygon points="{tip:.1f},{middle:.1f} {tip - 9:.1f},{middle - 4:.1f} {tip - 9:.1f},{middle + 4:.1f}"/>'
        f'<text class="count" x="{center:.1f}" y="{middle - 7:.1f}" text-anchor="middle" font-size="10.5" '
        f'fill="currentColor">{escape(name)}</text>'
        f'<text class="count" x="{center:.1f}" y="{middle + 17:.1f}" text-anchor="middle" font-size="10.5" '
        f'fill="currentColor">{bytes_text(step.bytes)}</text></g>'
    )


def _spoken(path: Path) -> str:
    return ", then ".join(f"{step.kind} to {step.target}" for step in path.steps) or "nothing"
