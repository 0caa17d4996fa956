"""The redistributions of a run as GraphML, DOT, Mermaid and SVG: what ran, beside the best paths of the worst ones."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import networkx as nx  # type: ignore[import-untyped]

from verifier.core.wording import bytes_text, plural
from verifier.redistribution.graph import Path
from verifier.redistribution.recorded import Executed
from verifier.redistribution.steps import Step
from verifier.report.paths.issued import issued_lines
from verifier.report.paths.picture import stacked_svg
from verifier.report.paths.run import JudgedRun, model_for

__all__ = ["RUN_FORMATS", "run_dot", "run_graphml", "run_mermaid", "run_svg"]


@dataclass
class _Arrow:
    """A step on a mesh: how often it ran, with the bytes that all ranks received, and whether a best path has it."""

    mesh: str
    step: Step
    count: int = 0
    received: int = 0
    best: bool = False
    ops: set[str] = field(default_factory=set)

    @property
    def label(self) -> str:
        dims = ",".join(map(str, self.step.mesh_dims))
        name = f"{self.step.kind} {dims}" if dims else self.step.kind
        return f"{name}, {self.count:,} x, {bytes_text(self.received)}" if self.count else name


def _worst(judged: JudgedRun, worst: int) -> list[Executed]:
    """Return the redistributions with most bytes beyond the lower bound, or, if none has any, with most bytes.

    Raises
    ------
    ValueError
        If the run has no redistribution that is judged.
    """
    if not judged.executed:
        raise ValueError(f"run {judged.run} has no redistribution that is judged, so there is nothing to draw")
    moving = [one for one in judged.executed if one.path.collectives]
    return (moving or list(judged.executed))[: max(worst, 1)]


def _best(judged: JudgedRun, one: Executed, links: Sequence[str]) -> Path | None:
    """Return the fastest path if it is another than the one that ran."""
    best = judged.reader.best(one, model_for(one.record, links))
    return best if best is not None and best.layouts != one.path.layouts else None


def _arrows(
    judged: JudgedRun, drawn: Sequence[Executed], compared: Sequence[Executed], links: Sequence[str]
) -> list[_Arrow]:
    """Return the steps of what is ``drawn``, then those that only the best paths of what is ``compared`` have."""
    found: dict[tuple[object, ...], _Arrow] = {}
    for one in drawn:
        for step in one.path.steps:
            arrow = found.setdefault((one.record.mesh, *step.key), _Arrow(one.record.mesh, step))
            arrow.count += one.record.count
            arrow.received += step.bytes * one.record.count
            arrow.ops.add(one.record.op)
    for one in compared:
        best = _best(judged, one, links)
        for step in best.steps if best else ():
            found.setdefault((one.record.mesh, *step.key), _Arrow(one.record.mesh, step)).best = True
    return list(found.values())


def run_graphml(judged: JudgedRun, worst: int, links: Sequence[str]) -> str:
    """Return all steps that ran, those of the best paths of the worst redistributions, and all redistributions.

    Nodes are layouts on a mesh. Edges have a ``role``: ``ran``, ``best``, or ``redistribution`` from the source to the
    target of a whole one, with what it issued.
    """
    graph = nx.MultiDiGraph(run=judged.run, format_version=1)
    for arrow in _arrows(judged, judged.executed, _worst(judged, worst), links):
        source, target = (f"{arrow.mesh}: {layout}" for layout in (arrow.step.source, arrow.step.target))
        roles = ["ran"] * bool(arrow.count) + ["best"] * arrow.best
        for role in roles:
            graph.add_edge(
                source, target, role=role, mesh=arrow.mesh, kind=arrow.step.kind,
                mesh_dims=",".join(map(str, arrow.step.mesh_dims)), count=arrow.count, bytes=arrow.received,
                ops=" ".join(sorted(arrow.ops)),
            )  # fmt: skip
    for one in judged.executed:
        record = one.record
        source, target = (f"{record.mesh}: {layout}" for layout in (one.path.source, one.path.target))
        graph.add_edge(
            source, target, role="redistribution", mesh=record.mesh, ops=record.op, tensor=record.tensor,
            count=record.count, bytes=one.path.bytes * record.count, bound=one.bound.total * record.count,
            explicit=record.explicit, phases=", ".join(f"{n} in {phase}" for phase, n in record.phases.items()),
            issued="; ".join(issued_lines(record)), peak_bytes=record.peak_bytes, seconds=record.seconds,
            waste=one.waste,
        )  # fmt: skip
    for node in graph.nodes:
        mesh, _, layout = node.partition(": ")
        graph.nodes[node].update(mesh=mesh, layout=layout)
    written = io.BytesIO()
    nx.write_graphml(graph, written, named_key_ids=True)
    return written.getvalue().decode()


def run_dot(judged: JudgedRun, worst: int, links: Sequence[str]) -> str:
    """Return the worst redistributions in Graphviz's language: a box for each mesh, what ran solid, the best dashed."""
    shown = _worst(judged, worst)
    arrows = _arrows(judged, shown, shown, links)
    lines = ["digraph redistribution {", "  rankdir=LR;", "  node [shape=box, fontname=monospace];"]
    for number, mesh in enumerate(dict.fromkeys(arrow.mesh for arrow in arrows)):
        lines += [f"  subgraph cluster_{number} {{", f'    label="mesh {mesh}";']
        here = [arrow for arrow in arrows if arrow.mesh == mesh]
        for layout in sorted({end for arrow in here for end in (arrow.step.source, arrow.step.target)}):
            lines.append(f'    "{mesh}: {layout}" [label="{layout}"];')
        lines.append("  }")
        for arrow in here:
            ends = f'"{mesh}: {arrow.step.source}" -> "{mesh}: {arrow.step.target}"'
            style = "solid" if arrow.count else "dashed"
            lines.append(f'  {ends} [label="{arrow.label}", style={style}];')
    return "\n".join([*lines, "}", ""])


def run_mermaid(judged: JudgedRun, worst: int, links: Sequence[str]) -> str:
    """Return the worst redistributions as a Mermaid flowchart: a subgraph for each mesh, the best paths dotted."""
    shown = _worst(judged, worst)
    arrows = _arrows(judged, shown, shown, links)
    lines = ["flowchart LR"]
    for number, mesh in enumerate(dict.fromkeys(arrow.mesh for arrow in arrows)):
        here = [arrow for arrow in arrows if arrow.mesh == mesh]
        layouts = sorted({end for arrow in here for end in (arrow.step.source, arrow.step.target)})
        names = {layout: f"m{number}n{place}" for place, layout in enumerate(layouts)}
        lines.append(f'  subgraph m{number}["mesh {mesh}"]')
        lines += [f'    {name}["{layout}"]' for layout, name in names.items()]
        lines.append("  end")
        for arrow in here:
            line = "-->" if arrow.count else "-.->"
            lines.append(f'  {names[arrow.step.source]} {line}|"{arrow.label}"| {names[arrow.step.target]}')
    return "\n".join([*lines, ""])


def run_svg(judged: JudgedRun, worst: int, links: Sequence[str]) -> str:
    """Return a picture of the worst redistributions, one below the other: the path that ran and the best path."""
    pictures = []
    for one in _worst(judged, worst):
        record, best = one.record, _best(judged, one, links)
        times = plural(record.count, "time")
        title = (
            f"{record.op} on mesh {record.mesh}: {record.tensor}, {times}, lower bound {bytes_text(one.bound.total)}"
        )
        pictures.append((title, [("ran", one.path), *([("best", best)] if best else [])]))
    return f"{stacked_svg(pictures)}\n"


RUN_FORMATS: dict[str, Callable[[JudgedRun, int, Sequence[str]], str]] = {
    "graphml": run_graphml,
    "dot": run_dot,
    "mermaid": run_mermaid,
    "svg": run_svg,
}
"""What writes the redistributions of a run in each format but text and JSON."""
