"""Drawings of the redistribution graph: every node and step is there, and numbers do not run into one another."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET

from run_factory import make_graph

from verifier.records.schema import EdgeRecord, GraphRecord
from verifier.report.graph_svg import Drawing, collective_class, draw_graph


def dense_graph(mesh_ndim: int) -> GraphRecord:
    """Return every all-gather and all-reduce to R, on one mesh dim at a time."""
    edges = []
    for parts in itertools.product(["R", "S(0)", "S(1)", "P(sum)"], repeat=mesh_ndim):
        for mesh_dim, part in enumerate(parts):
            if part != "R":
                after = [*parts[:mesh_dim], "R", *parts[mesh_dim + 1 :]]
                collective = "all_reduce" if part == "P(sum)" else "all_gather"
                source, target = (f"({', '.join(text)})" for text in (parts, after))
                edges.append(EdgeRecord(source, target, "2x2x2"[: 2 * mesh_ndim - 1], mesh_dim, collective, 8, 36, {}))
    return GraphRecord(sorted({node for edge in edges for node in (edge.source, edge.target)}), edges)


def labels(drawing: Drawing) -> list[tuple[float, float, str]]:
    texts = [text for text in ET.fromstring(str(drawing.svg)).iter("text") if "count" in text.get("class", "")]
    return [(float(text.get("x", "nan")), float(text.get("y", "nan")), text.text or "") for text in texts]


def test_nodes_and_steps_are_all_drawn() -> None:
    record = make_graph()
    drawings = draw_graph(record)
    assert [drawing.mesh_ndim for drawing in drawings] == [1, 2]
    assert sum(len(drawing.edges) for drawing in drawings) == len(record.edges)
    assert sum(drawing.steps for drawing in drawings) == sum(edge.count for edge in record.edges)
    assert sum(drawing.bytes for drawing in drawings) == sum(edge.bytes for edge in record.edges)
    nodes = [
        g for drawing in drawings for g in ET.fromstring(str(drawing.svg)).findall("g") if g.get("class") == "node"
    ]
    assert sorted(str(g.findtext("text")) for g in nodes) == record.nodes


def test_numbers_do_not_run_into_one_another() -> None:
    for record in (make_graph(), dense_graph(2)):
        for drawing in draw_graph(record):
            for (x, y, text), (u, v, other) in itertools.combinations(labels(drawing), 2):
                assert abs(y - v) > 10 or abs(x - u) > 3.3 * (len(text) + len(other)), (text, other, x, y)


def test_everything_lies_inside_the_picture() -> None:
    for drawing in [*draw_graph(make_graph()), *draw_graph(dense_graph(3))]:
        svg = ET.fromstring(str(drawing.svg))
        left, top, width, height = map(float, svg.attrib["viewBox"].split())
        for x, y, _ in labels(drawing):
            assert left <= x <= left + width
            assert top <= y <= top + height
        for rect in svg.iter("rect"):
            assert left <= float(rect.attrib["x"])
            assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= left + width


def test_the_same_graph_draws_the_same_in_any_order() -> None:
    record = make_graph()
    shuffled = GraphRecord(record.nodes[::-1], record.edges[::-1])
    assert [drawing.svg for drawing in draw_graph(shuffled)] == [drawing.svg for drawing in draw_graph(record)]


def test_steps_on_several_meshes_are_one_line_with_their_sum() -> None:
    edges = [EdgeRecord("S(0)", "R", mesh, 0, "all_gather", 8, 3, {}) for mesh in ("4", "8")]
    (drawing,) = draw_graph(GraphRecord(["R", "S(0)"], edges))
    assert [text for *_, text in labels(drawing)] == ["6"]
    assert len(drawing.edges) == 2


def test_a_collective_that_is_not_known_has_a_line_of_its_own() -> None:
    names = ["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "none (local)", "broadcast"]
    assert len({collective_class(name) for name in names}) == len(names)
