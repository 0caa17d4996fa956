"""Judged redistributions as JSON, and the graph as GraphML, DOT and Mermaid."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import networkx as nx  # type: ignore[import-untyped]

from verifier.core.wording import bytes_text
from verifier.redistribution.graph import Path, Seconds
from verifier.redistribution.judging import Judge, Judgement
from verifier.redistribution.steps import Step
from verifier.report.paths.picture import lanes_svg

__all__ = ["as_dict", "dot", "graphml", "mermaid", "path_dict", "svg"]


def path_dict(path: Path, models: Mapping[str, Seconds]) -> dict[str, Any]:
    """Return a path as JSON can have it."""
    return {
        "layouts": [str(layout) for layout in path.layouts],
        "steps": [
            {
                "kind": step.kind,
                "mesh_dims": list(step.mesh_dims),
                "received": list(step.received),
                "padding": list(step.padding),
                "hops": step.hops,
                "local_bytes": step.local_bytes,
                "seconds": {name: model(step) for name, model in models.items()},
            }
            for step in path.steps
        ],
        "bytes": path.bytes,
        "busiest": path.busiest,
        "local_bytes": path.local_bytes,
    }


def as_dict(judge: Judge, judgement: Judgement) -> dict[str, Any]:
    """Return a judgement as JSON can have it; a ratio to an optimum of 0 is null."""
    models: dict[str, Seconds] = {"torch": judge.torch_side.seconds, "alpha_beta": judge.model.seconds}
    return {
        "source": str(judgement.source),
        "target": str(judgement.target),
        "planner": judgement.planner,
        "path": None if judgement.path is None else path_dict(judgement.path, models),
        "refusal": judgement.refusal or None,
        "best": {name: path_dict(path, models) for name, path in judgement.best.items()},
        "bound": {"bytes": judgement.bound.total, "busiest": judgement.bound.busiest},
        "regrets": {
            name: {
                "path": regret.path,
                "optimum": regret.optimum,
                "ratio": None if regret.ratio == float("inf") else regret.ratio,
            }
            for name, regret in judgement.regrets.items()
        },
        "blame": judgement.blame or None,
    }


def graphml(judge: Judge, attributes: Mapping[str, str | int]) -> str:
    """Return the graph of all steps as GraphML; ``attributes`` are those of the graph."""
    models: dict[str, Seconds] = {"torch": judge.torch_side.seconds, "alpha_beta": judge.model.seconds}
    graph = judge.graph.to_networkx(judge.torch_side.available, models)
    graph.graph.update(attributes)
    written = io.BytesIO()
    nx.write_graphml(graph, written, named_key_ids=True)
    return written.getvalue().decode()


def dot(judge: Judge, judgements: Sequence[Judgement]) -> str:
    """Return the steps of the paths in ``judgements`` in Graphviz's language: torch's solid, the best dashed."""
    lines = ["digraph redistribution {", "  rankdir=LR;", "  node [shape=box, fontname=monospace];"]
    for style, steps in _drawn(judgements):
        lines += [f'  "{step.source}" -> "{step.target}" [label="{_label(step)}", style={style}];' for step in steps]
    return "\n".join([*lines, "}", ""])


def mermaid(judge: Judge, judgements: Sequence[Judgement]) -> str:
    """Return the steps of the paths in ``judgements`` as a Mermaid flowchart: torch's solid, the best dotted."""
    drawn = _drawn(judgements)
    layouts = sorted({layout for _, steps in drawn for step in steps for layout in (step.source, step.target)})
    names = {layout: f"n{number}" for number, layout in enumerate(layouts)}
    lines = ["flowchart LR", *(f'  {name}["{layout}"]' for layout, name in names.items())]
    for style, steps in drawn:
        arrow = "-->" if style == "solid" else "-.->"
        lines += [f'  {names[step.source]} {arrow}|"{_label(step)}"| {names[step.target]}' for step in steps]
    return "\n".join([*lines, ""])


def svg(judge: Judge, judgements: Sequence[Judgement]) -> str:
    """Return a picture of the path that torch takes and the best one, of one redistribution.

    Raises
    ------
    ValueError
        If there are several judgements.
    """
    if len(judgements) != 1:
        raise ValueError("a picture is of one redistribution; give --source and --target")
    (one,) = judgements
    lanes = [(f"torch, {one.planner} planner", one.path)] if one.path is not None else []
    return f"{lanes_svg([*lanes, ('best', one.best['model'])])}\n"


def _label(step: Step) -> str:
    dims = ",".join(map(str, step.mesh_dims))
    return f"{step.kind} {dims} {bytes_text(step.bytes)}" if dims else step.kind


def _drawn(judgements: Iterable[Judgement]) -> list[tuple[str, list[Step]]]:
    """Return the steps that torch takes, and those of the best paths, each once."""
    taken: dict[Any, Step] = {}
    best: dict[Any, Step] = {}
    for judgement in judgements:
        taken |= {step.key: step for step in (judgement.path.steps if judgement.path else ())}
        best |= {step.key: step for step in judgement.best["model"].steps}
    return [("solid", list(taken.values())), ("dashed", list(best.values()))]
