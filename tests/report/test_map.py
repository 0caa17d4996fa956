"""The map of a mesh: all placements by their kinds, and the paths of the redistribution that is chosen."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

import pytest

from verifier.redistribution.graph import Path
from verifier.redistribution.layouts import Space, parse_layout
from verifier.redistribution.steps import steps_between
from verifier.report.paths.map import map_svg


def path(mesh: tuple[int, ...], shape: tuple[int, ...], *layouts: str) -> Path:
    """Return the path through ``layouts``, with the first step between each two."""
    space = Space(mesh, shape)
    found = [parse_layout(text, len(shape), len(mesh)) for text in layouts]
    return Path(found[0], tuple(next(iter(steps_between(space, *ends))) for ends in itertools.pairwise(found)))


THERE_AND_BACK = path((2, 4), (8, 8, 8), "S(0)S(2)", "S(0)R", "RR", "RS(0)")
DIRECT = path((2, 4), (8, 8, 8), "S(0)S(2)", "S(2)S(0)", "RS(0)")
ROW = path((4,), (8, 8), "P", "S(1)", "R")
CUBE = path((2, 2, 2), (8, 8), "S(0)S(0)P", "S(0)S(0)R", "S(0)RR", "RRR")
REORDERED = path((2, 2), (8, 8), "S(0)S(0)", "S(0)[1]S(0)[0]")


def drawn(mesh: str, *routes: tuple[Path, Path | None]) -> ElementTree.Element:
    return ElementTree.fromstring(str(map_svg(mesh, routes)))


def dots(root: ElementTree.Element, css: str) -> dict[str, tuple[float, float]]:
    found = [one for one in root.iter("circle") if one.get("class") == css]
    return {one.findtext("title", ""): (float(one.attrib["cx"]), float(one.attrib["cy"])) for one in found}


def test_a_column_has_one_placement_on_the_first_mesh_dim_and_a_row_one_on_the_second() -> None:
    nodes = dots(drawn("2x4", (THERE_AND_BACK, DIRECT)), "node")
    assert set(nodes) == {f"({one}, {other})" for one in ("S(0)", "S(2)", "R") for other in ("S(0)", "S(2)", "R")}
    assert len({x for name, (x, _) in nodes.items() if name.startswith("(S(2), ")}) == 1
    assert len({y for name, (_, y) in nodes.items() if name.endswith(", R)")}) == 1
    assert [name for name, _ in sorted(dots(drawn("4", (ROW, None)), "node").items(), key=lambda item: item[1])] == [
        "P", "S(1)", "R"
    ]  # fmt: skip


def test_a_route_has_both_paths_step_by_step() -> None:
    (route,) = drawn("2x4", (THERE_AND_BACK, DIRECT)).findall("g")
    steps = [(one.get("class"), one.findtext("text"), one.findtext("title")) for one in route.findall("g")]
    assert [step[:2] for step in steps] == [
        ("ran", "1"), ("ran", "2"), ("ran local", "3"), ("best", "1"), ("best", "2")
    ]  # fmt: skip
    assert steps[0][2] == "1. (S(0), S(2)) -> (S(0), R): all_gather over mesh dim 1"
    assert set(dots(route, "via")) == {"(S(0), R)", "(R, R)", "(S(2), S(0))"}
    assert (set(dots(route, "from")), set(dots(route, "to"))) == ({"from (S(0), S(2))"}, {"to (R, S(0))"})


def test_the_first_of_several_routes_is_shown() -> None:
    groups = drawn("2x4", (THERE_AND_BACK, DIRECT), (DIRECT, None), (DIRECT, DIRECT)).findall("g")
    assert [(one.get("data-route"), one.get("style")) for one in groups] == [
        ("0", None), ("1", "display:none"), ("2", "display:none")
    ]  # fmt: skip
    assert [len(one.findall("g")) for one in groups] == [5, 2, 2], "a path that is the best is drawn once"


@pytest.mark.parametrize(("mesh", "one"), [("4", ROW), ("2x4", THERE_AND_BACK), ("2x2x2", CUBE), ("2x2", REORDERED)])
def test_everything_lies_inside_the_picture_and_no_number_on_another(mesh: str, one: Path) -> None:
    root = drawn(mesh, (one, None))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    stops = [element for element in root.iter("circle") if element.get("class") == "stop"]
    for circle in root.iter("circle"):
        x, y, radius = (float(circle.attrib[name]) for name in ("cx", "cy", "r"))
        assert radius <= x <= width - radius
        assert radius <= y <= height - radius
    assert len(stops) == len(one.steps)
    for first, second in itertools.combinations(stops, 2):
        apart = [abs(float(first.attrib[name]) - float(second.attrib[name])) for name in ("cx", "cy")]
        assert max(apart) > 12


def test_a_map_that_fits_a_phone_has_all_placements_of_a_matrix_on_two_mesh_dims() -> None:
    everywhere = path((2, 2), (8, 8), "PP", "S(0)P", "S(0)S(1)", "RS(1)", "RR", "S(1)R")
    assert float(drawn("2x2", (everywhere, None)).attrib["width"]) <= 360
