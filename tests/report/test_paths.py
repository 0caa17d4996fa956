"""What ``graph`` prints."""

from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from run_factory import make_run
from torch_versions import torch_is

from verifier.records.schema import GraphRecord, IssuedRecord, PathRecord
from verifier.report.html import render_html
from verifier.report.paths.asking import Question, answer
from verifier.report.paths.run import judge_run
from verifier.report.paths.run_documents import RUN_FORMATS

PAIR = Question("2x4", "1024,8,1024", source="S(0)S(2)", target="RS(0)")


def test_one_pair_as_text() -> None:
    lines = answer(PAIR, "text").splitlines()
    assert lines[0].startswith("float32[1024, 8, 1024] on mesh 2x4; torch 2.")
    rest = "\n".join(lines[4:])
    assert rest.startswith("(S(0), S(2)) -> (R, S(0))\ntorch's greedy planner takes:\n")
    assert "  (S(0), S(2)) -> (S(0), R)  all_gather over mesh dim 1  96.0 MiB" in rest
    assert "(R, R) -> (R, S(0))        local slice" in rest
    assert "in all 2 collectives; 224.0 MiB received by all ranks, 28.0 MiB by the busiest rank" in rest
    assert "no path of any steps can do with less than 56.0 MiB received by all ranks" in rest
    ratios = {line[:42].strip(): line.split()[-1] for line in lines if line.rstrip().endswith("x")}
    assert ratios["lower bound on bytes received"] == "4x"
    assert "why: the planner misses a path of torch's own steps" in rest


def test_all_pairs_as_text() -> None:
    text = answer(Question("2x2", "5,3", worst=3), "text")
    assert "uneven: tensor dim 0 of 5, tensor dim 1 of 3" in text
    refuses = torch_is("<2.14")  # a later one makes a pending sum of a shard, by padding it with zeros
    executed = 246 if refuses else 306
    assert f"18 layouts (placements with shard order), 306 ordered pairs, {executed} with a path that torch" in text
    assert ("torch plans S(0) -> P(sum) as one step, which it does not execute" in text) == refuses
    assert text.count("\n  torch  ") == text.count("\n  best   ") == text.count("\n  why    ") == 3


def test_json_has_every_pair() -> None:
    document = json.loads(answer(Question("4", "8,8"), "json"))
    assert (document["mesh"], document["shape"], document["format_version"]) == ("4", "8,8", 1)
    assert len(document["judgements"]) == 12
    gather = next(one for one in document["judgements"] if (one["source"], one["target"]) == ("S(0)", "R"))
    assert gather["bound"] == {"bytes": 768, "busiest": 192}
    assert gather["path"]["steps"][0]["received"] == [192] * 4
    assert gather["regrets"]["bytes"] == {"path": 768, "optimum": 768, "ratio": 1.0}
    pending = next(one for one in document["judgements"] if (one["source"], one["target"]) == ("S(0)", "P(sum)"))
    if torch_is("<2.14"):
        assert pending["path"] is None
        assert "does not execute" in pending["refusal"]
    else:
        assert pending["refusal"] is None
        assert [step["kind"] for step in pending["path"]["steps"]] == ["pad"]


def test_graphml_is_the_whole_graph() -> None:
    root = ElementTree.fromstring(answer(Question("2x4", "8,8"), "graphml"))
    names = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert {"graphml", "node", "edge"} <= names
    nodes = [element for element in root.iter() if element.tag.endswith("}node")]
    assert len(nodes) == 18


@pytest.mark.parametrize(
    ("output", "solid", "dashed"), [("dot", "style=solid", "style=dashed"), ("mermaid", "-->|", "-.->|")]
)
def test_pictures_have_both_paths(output: str, solid: str, dashed: str) -> None:
    text = answer(PAIR, output)
    assert text.count(solid) == 3
    assert text.count(dashed) == 2


@pytest.mark.parametrize(
    ("question", "error"),
    [
        (Question("2y2", "8,8"), "mesh '2y2' is not a shape"),
        (Question("2x2+flt", "8,8"), "'flt' after the . is not flat"),
        (Question("4+flat", "8,8"), "a mesh of one dim has no submeshes"),
        (Question("64x64", "8,8"), "has 4096 ranks"),
        (Question("2x2", "8;8"), "shape '8;8' is no list of sizes"),
        (Question("2x2", "8,8", dtype="float31"), "dtype 'float31' is none of"),
        (Question("2x2", "8,8", source="S(2)R", target="RR"), "names tensor dim 2"),
        (Question("2x2", "8,8", source="P(max)R", target="RP"), "one reduction is supported"),
        (Question("2x2x2", "8,8,8,8,8"), "at most 200 are judged"),
    ],
)
def test_what_cannot_be_answered_is_said_in_one_line(question: Question, error: str) -> None:
    with pytest.raises(ValueError, match=error) as raised:
        answer(question, "text")
    assert "\n" not in str(raised.value)


def test_a_picture_has_a_lane_for_each_path() -> None:
    """Arrows can be reached by keyboard, and say what their step does."""
    root = ElementTree.fromstring(answer(PAIR, "svg"))
    arrows = [element for element in root.iter() if element.get("tabindex") == "0"]
    assert len(arrows) == 3 + 2
    spoken = [element.get("aria-label", "") for element in arrows]
    assert spoken[0].startswith("(S(0), S(2)) -> (S(0), R): all_gather over mesh dim 1; 96.0 MiB received by all ranks")
    assert [element[0].text for element in arrows] == spoken, "the same on hover"
    assert "torch, greedy planner, 224.0 MiB" in "".join(root.itertext())
    with pytest.raises(ValueError, match="a picture is of one redistribution"):
        answer(Question("4", "8,8"), "svg")


def region_of_page(*paths: PathRecord) -> str:
    page = render_html(make_run(graph=GraphRecord([], [], [*paths])))
    return page[page.index('<h2 id="graph">') :].split("</section>")[0]


STEPS = [("all_gather", "(S(0), R)"), ("all_gather", "(R, R)"), ("", "(R, S(0))")]
AROUND = PathRecord("aten.<i>", "2x4", "float32[8, 8]", "(S(0), S(1))", "(R, S(0))", STEPS, False, 2, {"forward": 2})
EXACT = PathRecord("aten.mm", "4", "float32[8]", "S(0)", "R", [("all_gather", "R")], True, 1, {"forward": 1})


def test_the_page_has_a_map_and_a_table_for_each_mesh() -> None:
    region = region_of_page(AROUND, replace(AROUND, mesh="2x2"), EXACT)
    assert [region.count(f"<h3>Mesh {mesh} ") for mesh in ("2x2", "2x4", "4")] == [1, 1, 1]
    assert region.count('<svg class="map"') == region.count("data-routes>") == 3
    assert region.count('type="radio"') == region.count(" checked>") == 3
    assert (region.count("</span> ran: "), region.count("</span> fastest: ")) == (3, 2)
    assert "all_gather over mesh dim 1 to (S(0), R), " in region
    assert "aten.&lt;i&gt;" in region
    assert "<i>" not in region
    assert "Waste: gathers and shards again." in region


def test_redistributions_by_equal_paths_are_one_row_and_the_worst_is_first() -> None:
    wide = replace(AROUND, tensor="float32[64, 64]", op="aten.mul.Tensor")
    also = PathRecord(
        "a.b", "2x4", "float32[8]", "(S(0), R)", "(R, R)", [("all_gather", "(R, R)")], False, 5, {"forward": 5}
    )
    region = region_of_page(also, AROUND, wide)
    rows = region.split("<tbody>")[1].split("</tbody>")[0].split("<tr>")[1:]
    assert [">(S(0), S(1)) → (R, S(0))<" in row for row in rows] == [True, False]
    assert '<td class="num">4</td>' in rows[0]
    assert "<code>aten.mul.Tensor</code> and 1 more" in rows[0]
    assert "of <code>float32[64, 64]</code>" in region, "the example is the one furthest beyond its bound"


MEASURED = replace(
    AROUND,
    issued=[
        IssuedRecord("all_gather_into_tensor", [0, 1, 2, 3], "float32", 32, 128),
        IssuedRecord("all_gather_into_tensor", [0, 4], "float32", 128, 256),
    ],
    measured=2,
    peak_bytes=416,
    seconds=0.003,
    fastest=0.0005,
)


def test_the_page_tells_what_was_issued_beside_the_steps() -> None:
    region = region_of_page(MEASURED)
    assert "Issued: all_gather_into_tensor of float32 over ranks 0 1 2 3: 32 B given, 128 B got; " in region
    assert "It took 1.5 ms on average of 2, the fastest 500.0 us; up to 416 B alive at once." in region
    assert "Issued" not in region_of_page(AROUND)


def drawn(output: str, *paths: PathRecord, worst: int = 5) -> str:
    judged = judge_run(make_run(graph=GraphRecord([], [], [*paths])))
    return RUN_FORMATS[output](judged, worst, ())


def test_a_run_as_graphml_has_steps_best_steps_and_whole_redistributions() -> None:
    root = ElementTree.fromstring(drawn("graphml", MEASURED, EXACT))
    names = {key.get("id"): key.get("attr.name") for key in root.iter() if key.tag.endswith("}key")}
    edges = [
        {names.get(data.get("key"), ""): data.text for data in edge} | {"source": edge.get("source")}
        for edge in root.iter()
        if edge.tag.endswith("}edge")
    ]
    roles = [edge["role"] for edge in edges]
    assert (roles.count("ran"), roles.count("best"), roles.count("redistribution")) == (4, 2, 2)
    whole = next(edge for edge in edges if edge["role"] == "redistribution" and edge["mesh"] == "2x4")
    assert whole["source"] == "2x4: (S(0), S(1))"
    assert str(whole["issued"]).startswith("all_gather_into_tensor of float32 over ranks 0 1 2 3: 32 B given")
    assert (whole["seconds"], whole["waste"]) == ("0.003", "gathers and shards again")


@pytest.mark.parametrize(
    ("output", "solid", "dashed", "mesh"),
    [("dot", "style=solid", "style=dashed", 'label="mesh 2x4"'), ("mermaid", "-->|", "-.->|", '["mesh 2x4"]')],
)
def test_a_run_is_drawn_with_a_box_for_each_mesh(output: str, solid: str, dashed: str, mesh: str) -> None:
    """The exact gather on mesh 4 is the best path itself, so it is drawn once."""
    text = drawn(output, AROUND, EXACT)
    assert (text.count(solid), text.count(dashed)) == (4, 2)
    assert text.count(mesh) == text.count(mesh.replace("2x4", "4")) == 1
    assert "all_gather 1, 2 x, 1.5 KiB" in text
    assert drawn(output, AROUND, EXACT, worst=1).count(solid) == 3


def test_a_run_as_a_picture_has_a_part_for_each_redistribution() -> None:
    root = ElementTree.fromstring(drawn("svg", AROUND, EXACT))
    told = "".join(root.itertext())
    assert "aten.<i> on mesh 2x4: float32[8, 8], 2 times, lower bound 448 B" in told
    assert "aten.mm on mesh 4: float32[8], 1 time" in told
    arrows = [element for element in root.iter() if element.get("tabindex") == "0"]
    assert len(arrows) == 3 + 2 + 1
    tops = [float(str(element.get("y"))) for element in root.iter() if element.tag.endswith("rect")]
    assert tops == sorted(tops)
    assert max(tops) < float(str(root.get("height")))


def test_a_run_without_redistributions_has_no_picture() -> None:
    for output in RUN_FORMATS:
        with pytest.raises(ValueError, match="nothing to draw"):
            drawn(output)


def test_the_page_tells_waste_across_ops_and_escapes_it() -> None:
    undone = PathRecord(
        "chain.<b>",
        "4",
        "float32[8]",
        "R",
        "S(0)",
        [("", "S(0)")],
        False,
        2,
        {"forward": 2},
        "",
        "aten.<i>",
        "",
        "aten.<u>",
    )
    region = region_of_page(undone)
    assert "aten.&lt;u&gt; gathers, and aten.&lt;i&gt; shards again" in region
    assert "chain.&lt;b&gt; on 4: float32[8] R -&gt; S(0)" in region
    assert "<svg" not in region, "there is nothing to draw of a local step"
