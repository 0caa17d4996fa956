"""The command ``layouts`` and its pictures: what they show is what the layout says, and mistakes end with status 2."""

from __future__ import annotations

import html
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import strategies.layouts.demo
from strategies.layouts.drawing import layout_lines, layout_svg, render_layouts
from strategies.layouts.tables import Chunk, LayoutOptions
from strategies.torchrec.family import SOURCE
from strategies.torchrec.layouts import LAYOUTS, make_layout
from verifier.cli.main import main
from verifier.core.verdict import VerdictKind

Command = Callable[..., tuple[int, str, str]]
EIGHT = LayoutOptions(8, 4, 4)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs ``layouts`` and returns its exit status, stdout and stderr."""
    # As if it were installed: the tests also run from a folder in which this package is not.
    monkeypatch.setattr(strategies.layouts.demo, "installed_layouts", lambda: {SOURCE.name: SOURCE})

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["verifier", "layouts", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        status = ended.value.code
        assert isinstance(status, int)
        return (status, *capsys.readouterr())

    return run


def test_the_table_is_drawn_with_who_holds_each_part_of_it(command: Command) -> None:
    status, out, _ = command("grid", "--ranks", "4", "--ranks-per-host", "2", "--owners", "1,0")
    assert status == 0
    assert out.splitlines()[1:4] == [
        "            columns 0-1 | columns 2-3",
        "  rows 0-3  rank 2      | rank 0",
        "  rows 4-7  rank 3      | rank 1",
    ]
    assert "  rank 3 on host 1: [4:8, 0:2] (8 elements)" in out


def test_splits_are_taken_as_they_are_given(command: Command) -> None:
    status, out, _ = command("row-wise-uneven", "--ranks", "3", "--rows", "6", "--splits", "1,0,5", "--columns", "1")
    assert status == 0
    assert out.splitlines()[1:4] == ["            column 0", "  row 0     rank 0", "  rows 1-5  rank 2"]
    assert "  rank 1: nothing" in out


def test_without_a_name_all_layouts_are_shown_and_those_that_do_not_fit_are_named(command: Command) -> None:
    status, out, _ = command("--ranks", "3", "--columns", "2")
    assert status == 0
    assert [line.split(":")[0] for line in out.splitlines() if re.match(r"[a-z-]+: \d", line)] == list(LAYOUTS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["row-wise-unevn"], "no layout is called 'row-wise-unevn'; did you mean 'row-wise-uneven'?"),
        (["xyz"], "no layout is called 'xyz'; layouts are row-wise-even, "),
        (["nonsense"], "no layout is called 'nonsense'; layouts are row-wise-even, "),
        (["row-wise-uneven", "--splits", "1,x"], "--splits '1,x' is not a list of counts such as 1,3,1,3"),
        (["row-wise-uneven", "--splits", "1,2"], "splits=[1, 2] has 2 parts; there are 4 ranks"),
        (["--owners", "1"], "--splits, --owners and --ranks-per-host are of one layout; name it"),
        (["grid", "--ranks", "0"], "ranks=0 must be at least 1"),
        (["--ranks", "0"], "ranks=0 must be at least 1\n"),
        (
            ["grid", "--ranks", "100000"],
            "--ranks 100000 is more than is shown, since each rank has its line; give 1024 ",
        ),
        (["--ranks", "1025"], "--ranks 1025 is more than is shown"),
        (["grid", "--ranks", "65", "--check"], "--check: 65 ranks are to be started; at most 64 run on one machine\n"),
        (["grid", "--rows", str(10**12), "--check"], "--check: the table has 4,000,000,000,000 elements; it tries 16,"),
        (["grid", "--rows", str(10**400)], f"rows={10**400} and columns=4 make more elements than a tensor can have;"),
    ],
)
def test_mistakes_end_with_status_2(command: Command, arguments: list[str], message: str) -> None:
    status, out, err = command(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {message}")


def test_as_many_ranks_as_are_shown(command: Command) -> None:
    status, out, _ = command("row-wise-even", "--ranks", "1024")
    assert status == 0
    assert out.splitlines()[-1] == "  rank 1023: nothing"


def test_a_page_that_cannot_be_written_ends_with_status_2(command: Command, tmp_path: Path) -> None:
    status, _, err = command("grid", "--html", str(tmp_path / "none" / "page.html"))
    assert status == 2
    assert err.startswith("error: --html ")
    assert err.endswith(" cannot be written: No such file or directory\n")


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([VerdictKind.PASS], 0),
        ([VerdictKind.PASS, VerdictKind.WRONG_VALUE, VerdictKind.PASS], 1),
        ([VerdictKind.UNSUPPORTED, VerdictKind.PASS], 2),
        ([VerdictKind.TOOL_ERROR], 2),
    ],
)
def test_a_check_that_proves_nothing_is_no_finding(
    command: Command, monkeypatch: pytest.MonkeyPatch, kinds: list[VerdictKind], expected: int
) -> None:
    monkeypatch.setattr(strategies.layouts.demo.ShownLayouts, "checked", lambda self: ((kind, kind) for kind in kinds))
    status, out, _ = command("grid", "--check")
    assert (status, out.splitlines()[-len(kinds) :]) == (expected, kinds)


@pytest.mark.ranks
def test_a_check_runs_on_ranks(command: Command) -> None:
    status, out, _ = command("row-wise-uneven", "--ranks", "2", "--rows", "5", "--check")
    assert (status, out.splitlines()[-1]) == (0, "row-wise-uneven on 2 gloo ranks: PASS")


def test_a_table_that_fits_no_memory_is_shown(command: Command) -> None:
    status, out, _ = command("row-wise-even", "--ranks", "2", "--rows", str(10**12))
    assert status == 0
    assert "rank 1: [500000000000:1000000000000, 0:4]" in out


def test_without_a_package_that_brings_layouts(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies.layouts.demo, "installed_layouts", dict)
    assert command("grid")[0] == 2


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_picture_has_a_drawing_a_rank_with_a_box_a_chunk(name: str) -> None:
    layout = make_layout(name, EIGHT)
    drawings = ET.fromstring(str(layout_svg(layout))).findall("g")
    assert [len(drawing.findall("rect[@class='own']")) for drawing in drawings] == [len(c) for c in layout.chunks]
    assert [drawing.findall("text")[1].text == "empty" for drawing in drawings] == [not c for c in layout.chunks]


@pytest.mark.parametrize(("ranks", "missing"), [("32", 0), ("64", 1)])
def test_the_page_says_which_ranks_its_pictures_leave_out(
    command: Command, tmp_path: Path, ranks: str, missing: int
) -> None:
    page = tmp_path / "layouts.html"
    assert command("grid", "--ranks", ranks, "--html", str(page))[0] == 0
    text = page.read_text(encoding="utf-8")
    assert text.count("rank 31<") == 1
    assert text.count("ranks 32 to 63 are not drawn; the text below has all of them") == missing


def test_boxes_are_where_the_chunks_are() -> None:
    layout = make_layout("column-wise", replace(EIGHT, columns=3, owners=(2, 0, 2)))
    drawing = ET.fromstring(str(layout_svg(layout))).findall("g")[2]
    frame = drawing.find("rect[@class='all']")
    assert frame is not None
    width = float(frame.attrib["width"])
    boxes = drawing.findall("rect[@class='own']")
    assert [float(box.attrib["x"]) for box in boxes] == pytest.approx([0, 2 * width / 3], abs=0.1)
    assert [float(box.attrib["width"]) for box in boxes] == pytest.approx([width / 3] * 2, abs=0.1)


def test_what_is_no_table_looks_like_it() -> None:
    layout = make_layout("row-wise-even", EIGHT)
    wrong = replace(layout, chunks=(layout.chunks[0], (Chunk((1, 3), (0, 4)),), *layout.chunks[2:]))
    lines = layout_lines(wrong)
    assert [line.split("  ")[-1].strip() for line in lines[2:7]] == [
        "rank 0",
        "ranks 0, 1",
        "rank 1",
        "nobody",
        "rank 2",
    ]


def test_the_page_has_every_layout_and_loads_nothing(command: Command, tmp_path: Path) -> None:
    page = tmp_path / "layouts.html"
    assert command("--html", str(page))[0] == 0
    text = page.read_text(encoding="utf-8")
    assert text.count('<svg class="shards"') == len(LAYOUTS)
    assert re.findall(r"""(?:src|href)\s*=|url\((?!#)|@import""", text) == []
    assert "default-src 'none'" in html.unescape(text)
    hostile = replace(make_layout("grid", EIGHT), name="<b>")
    assert "<b>" not in render_layouts([(hostile, "<i>")])
