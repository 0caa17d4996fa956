"""What the page of a run shows of the redistributions on each mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from verifier.core.case import MeshSpec
from verifier.core.wording import bytes_text
from verifier.records.schema import EdgeRecord, RunRecord
from verifier.redistribution.graph import Path
from verifier.redistribution.recorded import Executed
from verifier.report.paths.issued import issued_lines, took_text
from verifier.report.paths.map import map_svg
from verifier.report.paths.run import JudgedRun, Waste, judge_run, model_for, waste_across_ops, waste_without_rules
from verifier.report.paths.words import ratio_text, step_text

__all__ = ["MeshRegion", "RouteView", "mesh_regions"]

_MOST_ROUTES, _MOST_COMPARED = 24, 8
"""Routes of a mesh on the page, and those for which the best path is looked for, which takes time."""


@dataclass(frozen=True)
class RouteView:
    """Redistributions between the same placements that took the same path; ``worst`` is furthest beyond its bound.

    ``count`` and the bytes are of all of them, ``ops`` the ops that did them. ``best`` is the fastest path, None if it
    was not looked for, and ``others`` those that need less memory than it.
    """

    worst: Executed
    count: int
    received: int
    bound: int
    ops: tuple[str, ...]
    best: Path | None
    others: tuple[Path, ...]

    @property
    def ratio(self) -> str:
        if self.received == self.bound:
            return "1x"
        return ratio_text(self.received / self.bound if self.bound else float("inf"))

    @property
    def issued(self) -> tuple[str, ...]:
        """The collectives that the worst of them really issued, and their bytes."""
        return tuple(issued_lines(self.worst.record))

    @property
    def took(self) -> str:
        """The seconds and the peak of the worst of them; empty if they were not measured."""
        return took_text(self.worst.record)

    @property
    def paths(self) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
        """For each path its class, its title, and its steps as text."""
        ran = self.worst.path
        if self.best is None or self.best.layouts == ran.layouts:
            same = ", and no path is faster" if self.best is not None else ""
            listed = [("ran", f"ran{same}", ran)]
        else:
            listed = [("ran", "ran", ran), ("best", "fastest", self.best)]
        listed += [("other", "slower, with less memory", path) for path in self.others]
        return tuple(
            (style, f"{title}: {bytes_text(path.bytes)}", tuple(map(step_text, path.steps)))
            for style, title, path in listed
        )


@dataclass(frozen=True)
class MeshRegion:
    """The redistributions on one mesh: their sums, the map with the routes, the waste by kind, and all steps.

    ``more`` counts the routes that are not shown.
    """

    mesh: str
    count: int
    received: int
    bound: int
    routes: tuple[RouteView, ...]
    more: int
    map: Markup
    wastes: tuple[tuple[str, tuple[Waste, ...]], ...]
    steps: tuple[EdgeRecord, ...]

    @property
    def ratio(self) -> str:
        return ratio_text(self.received / self.bound) if self.bound else ""


def mesh_regions(run: RunRecord) -> list[MeshRegion]:
    """Return the region of each mesh, in the order in which the run has them."""
    judged, regions = judge_run(run), []
    edges: dict[str, list[EdgeRecord]] = {}
    for edge in run.graph.edges:
        edges.setdefault(_shape(edge.mesh), []).append(edge)
    meshes = dict.fromkeys([*map(_shape, run.header.meshes), *(path.mesh for path in run.graph.paths), *edges])
    for mesh in meshes:
        here = [one for one in judged.executed if one.record.mesh == mesh]
        steps = tuple(sorted(edges.get(mesh, ()), key=lambda edge: (-edge.count, edge.source, edge.target)))
        if here or steps:
            regions.append(_region(judged, mesh, here, steps))
    return regions


def _shape(mesh: str) -> str:
    spec = MeshSpec.parse(mesh)
    return spec.shape_text + spec.suffix


def _region(judged: JudgedRun, mesh: str, here: Sequence[Executed], steps: tuple[EdgeRecord, ...]) -> MeshRegion:
    groups: dict[tuple[object, ...], list[Executed]] = {}
    for one in here:
        if one.path.collectives:
            groups.setdefault(one.path.layouts, []).append(one)
    ranked = sorted(groups.values(), key=lambda group: (-_total(group, _excess), -_total(group, _received)))
    routes = tuple(_route(judged, group, n < _MOST_COMPARED) for n, group in enumerate(ranked[:_MOST_ROUTES]))
    drawn = map_svg(mesh, [(route.worst.path, route.best) for route in routes]) if routes else Markup("")
    return MeshRegion(
        mesh, sum(one.record.count for one in here), _total(here, _received), _total(here, _bound), routes,
        len(ranked) - len(routes), drawn, tuple(_wastes(judged, here)), steps,
    )  # fmt: skip


def _wastes(judged: JudgedRun, here: Sequence[Executed]) -> Iterator[tuple[str, tuple[Waste, ...]]]:
    """Yield each kind of waste that there is, with its title."""
    if across := waste_across_ops(here):
        yield "Waste across ops in a row", tuple(across)
    if unproved := waste_without_rules(here, judged.missing):
        yield "Waste where a rule is missing that needs no communication", tuple(unproved)


def _route(judged: JudgedRun, group: Sequence[Executed], compared: bool) -> RouteView:
    worst = max(group, key=lambda one: (one.excess, one.path.bytes))
    front = judged.reader.front(worst, model_for(worst.record)) if compared and worst.excess else []
    return RouteView(
        worst, sum(one.record.count for one in group), _total(group, _received), _total(group, _bound),
        tuple(dict.fromkeys(one.record.op for one in group)), front[0] if front else None, tuple(front[1:]),
    )  # fmt: skip


def _total(group: Sequence[Executed], size: Callable[[Executed], int]) -> int:
    return sum(size(one) * one.record.count for one in group)


def _received(one: Executed) -> int:
    return one.path.bytes


def _bound(one: Executed) -> int:
    return one.bound.total


def _excess(one: Executed) -> int:
    return one.excess
