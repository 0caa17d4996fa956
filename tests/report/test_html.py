"""The HTML page: complete, self-contained, escaped, and never green for what was not tested."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_factory import EMBEDDING, ODD, make_empty_run, make_finding, make_long_run, make_matrix, make_run

from verifier.records.schema import EdgeCoverageRecord, MatrixRecord, RuleCoverageRecord, RunRecord
from verifier.report.html import banners, render_html, write_html
from verifier.report.matrix import matrix_views
from verifier.report.words import OUTCOMES, totals

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """The page as its tags and its visible text; raises AssertionError where tags do not nest."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data

    def values(self, attribute: str) -> list[str]:
        return [value for _, attrs in self.tags if (value := attrs.get(attribute)) is not None]

    def with_class(self, name: str) -> list[dict[str, str | None]]:
        return [attrs for _, attrs in self.tags if name in (attrs.get("class") or "").split()]


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(render_html(make_run()))


RUNS = [make_run(), make_empty_run(), make_run(complete=False, tool_errors=[ODD]), make_long_run()]


@pytest.mark.parametrize("run", RUNS, ids=["full", "empty", "interrupted", "long"])
def test_the_page_loads_nothing(run: RunRecord) -> None:
    html = render_html(run)
    page = Page(html)
    assert page.values("src") == []
    assert not {tag for tag, _ in page.tags} & {"link", "img", "iframe", "object", "embed", "base"}
    assert all(link.startswith("#") for link in page.values("href"))
    assert not re.search(r"url\((?!#)|@import|https?://", html)


@pytest.mark.parametrize("run", RUNS, ids=["full", "empty", "interrupted", "long"])
def test_links_lead_somewhere_and_ids_are_unique(run: RunRecord) -> None:
    page = Page(render_html(run))
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    wanted = {link[1:] for link in page.values("href")}
    wanted |= {*page.values("data-from"), *page.values("data-readout"), *page.values("aria-labelledby")}
    assert wanted <= set(ids)


def test_only_the_pages_own_script_may_run(page: Page) -> None:
    html = render_html(make_run())
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = (attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv"))
    assert policy is not None
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
    assert sum(tag == "script" for tag, _ in page.tags) == 1


@pytest.mark.parametrize("run", [RUNS[0], RUNS[3]], ids=["full", "long"])
def test_every_finding_is_there_in_full(run: RunRecord) -> None:
    page = Page(render_html(run))
    for finding in run.findings:
        assert finding.message in page.text
        assert finding.script in page.text
        assert f"python -m verifier replay {finding.fingerprint}" in page.text
        assert finding.rule in page.text
        assert f"finding-{finding.fingerprint}" in page.values("id")
        assert all(other in page.text for other in finding.also)


def test_new_findings_come_before_known_ones_which_give_their_reason(page: Page) -> None:
    articles = [attrs["id"] for tag, attrs in page.tags if tag == "article"]
    assert articles == ["finding-a1b2c3d4e5", "finding-beef00cafe", "finding-0f1e2d3c4b"]
    assert "pytorch#190063: grad_output S(1) is refused" in page.text


def test_an_unconfirmed_finding_says_so(page: Page) -> None:
    assert len(page.with_class("warn")) == 1
    assert "1 of them unconfirmed" in page.text


def test_reasons_are_given_for_what_was_not_tested(page: Page) -> None:
    run = make_run()
    for reason in [*run.unsupported, *run.inconclusive, *(entry.reason for entry in run.untested)]:
        assert reason in page.text
    assert totals(run).line in page.text


def tones(run: RunRecord) -> list[str]:
    return [banner.tone for banner in banners(run, totals(run))]


def test_banners_are_green_only_for_a_whole_run_that_proved_something() -> None:
    clean = make_run(findings=[], untested=[], counts={"PASS": 10}, trials=10)
    assert tones(clean) == ["pass"]
    assert "pass" not in tones(make_run(findings=[], untested=[], counts={"UNSUPPORTED": 10}, trials=10))
    assert "pass" not in tones(make_run(findings=[], counts={"PASS": 10}, trials=10))
    assert "pass" not in tones(make_empty_run())
    for changes in ({"complete": False}, {"tool_errors": ["IndexError"]}, {"findings": [make_finding()]}):
        run = make_run(**{"findings": [], "untested": [], "counts": {"PASS": 10}, "trials": 10, **changes})
        assert "pass" not in tones(run)


def test_failures_without_findings_are_not_called_clean() -> None:
    assert tones(make_run(findings=[])) == ["fail"]


def test_nothing_tested_looks_like_a_warning() -> None:
    page = Page(render_html(make_empty_run()))
    assert "Nothing was tested" in page.text
    assert "None, because nothing was tested." in page.text
    assert not page.with_class("t-pass")


def test_an_interrupted_run_is_marked_at_its_top() -> None:
    page = Page(render_html(make_run(complete=False)))
    (banner,) = page.with_class("interrupted")
    assert page.with_class("banner")[0] is banner
    assert "INCOMPLETE" in page.text
    assert not Page(render_html(make_run())).with_class("interrupted")


def test_our_own_errors_are_shown_as_text() -> None:
    page = Page(render_html(make_run(tool_errors=[f"IndexError {ODD}"])))
    assert f"IndexError {ODD}" in page.text
    assert "1 error of the verifier itself" in page.text


def test_pictures_show_each_rank_of_each_tensor(page: Page) -> None:
    pictures = [str(attrs["aria-label"]) for attrs in page.with_class("shards")]
    assert len(pictures) == 6
    expected = "weight [5, 2] as S(0) on mesh 4: rank 0 [2, 2], rank 1 [2, 2], rank 2 [1, 2], rank 3 empty"
    assert expected in pictures


def test_placements_without_a_picture_are_named() -> None:
    finding = make_finding(weight="_S(0, 2)")
    assert "no picture of _S(0, 2)" in Page(render_html(make_run(findings=[finding]))).text


# -------------------------------------------------------------------------------------------------------- the matrix
def test_a_cell_shows_the_worst_verdict_and_what_was_not_tried_stays_empty() -> None:
    cells = {
        "R": {"R": {"PASS": 5}, "S(0)": {"PASS": 8, "CRASH": 1, "WRONG_VALUE": 2}},
        "S(0)": {"R": {"UNSUPPORTED": 3}},
    }
    (view,) = matrix_views([MatrixRecord(EMBEDDING, "4", "indices", "weight", cells)], [])
    assert view.columns == ("R", "S(0)")
    (_, (passed, wrong)), (_, (refused, untried)) = view.rows
    assert passed is not None
    assert wrong is not None
    assert refused is not None
    assert (passed.worst.name, passed.text) == ("PASS", "5")
    assert (wrong.worst.name, wrong.text) == ("WRONG_VALUE", "2/11")
    assert wrong.counts_text == "2 WRONG_VALUE, 1 CRASH, 8 PASS"
    assert refused.worst.tone == "open"
    assert untried is None
    assert (view.tried, view.bad, view.not_tried) == (3, 1, 1)


def test_a_bad_cell_leads_to_its_finding(page: Page) -> None:
    (view,) = matrix_views([make_matrix(EMBEDDING, "4", untried=99)], make_run().findings)
    anchors = [cell.anchor for _, cells in view.rows for cell in cells if cell is not None and cell.anchor]
    assert anchors == ["a1b2c3d4e5"]


def test_cells_that_were_not_tried_are_empty_and_in_the_legend(page: Page) -> None:
    run = make_run()
    views = matrix_views(run.matrices, run.findings)
    assert render_html(run).count("<td></td>") == sum(view.not_tried for view in views) > 0
    assert len(page.with_class("untried")) == len(views)


def test_a_matrix_of_one_tensor_argument_is_drawn() -> None:
    matrix = MatrixRecord("aten.neg.default", "4", "input", "", {"S(0)": {"": {"PASS": 3}}})
    assert "input" in Page(render_html(make_run(matrices=[matrix]))).text


def test_colour_is_not_the_only_sign_of_a_verdict() -> None:
    signs = [outcome.sign for outcome in OUTCOMES.values()]
    assert len(set(signs)) == len(signs)


# ------------------------------------------------------------------------------------------------------------- coverage
def rows_under(run: RunRecord, heading: str) -> list[list[str]]:
    """Return the text of each cell of the table that follows a heading, row by row; empty without the heading."""
    _, found, after = render_html(run).partition(f"<h3>{heading}</h3>")
    rows = re.findall(r"<tr>(.*?)</tr>", after.partition("</table>")[0], re.DOTALL) if found else []
    return [[Page(cell).text for cell in re.findall(r"<t[hd].*?</t[hd]>", row)] for row in rows]


def test_rules_that_never_ran_are_listed() -> None:
    heading = "Rules that DTensor claims"
    coverage = {
        EMBEDDING: RuleCoverageRecord(["R, R", "S(0), R", "S(1), R"], ["R, R"]),
        f"aten.{ODD}": RuleCoverageRecord(["R"], ["R"]),
    }
    assert rows_under(make_run(rule_coverage=coverage), heading) == [
        ["op", "ran", "claimed", "never ran"],
        [EMBEDDING, "1", "3", "S(0), R; S(1), R"],
        [f"aten.{ODD}", "1", "1", ""],
    ]
    assert rows_under(make_run(), heading) == []


def test_edges_that_no_redistribution_took_are_counted() -> None:
    heading = "Edges between placements that explicit redistributions took"
    edges = {
        "1": EdgeCoverageRecord(132, ["R -> S(0)", "S(0) -> R"], ["P(max) -> P(min)"]),
        "2": EdgeCoverageRecord(132, [], []),
    }
    assert rows_under(make_run(edge_coverage=edges), heading) == [
        ["mesh dims", "possible", "exercised", "only refused", "never asked for"],
        ["1", "132", "2", "1", "129"],
        ["2", "132", "0", "0", "132"],
    ]
    assert rows_under(make_run(), heading) == []


# --------------------------------------------------------------------------------------------------------- the graph
def test_the_steps_of_each_mesh_are_a_table(page: Page) -> None:
    for mesh in ("4", "2x2"):
        edges = [edge for edge in make_run().graph.edges if edge.mesh == mesh]
        region = page.text.split(f"Mesh {mesh} ")[1].split("Mesh ")[0]
        assert f"{len(edges)} kinds of step" in region
        assert all(f"{edge.count:,}" in region and edge.collective in region for edge in edges)


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    write_html(make_run(), tmp_path / "index.html")
    assert (tmp_path / "index.html").read_text(encoding="utf-8") == render_html(make_run())


def test_commands_name_the_folder_of_the_runs_where_it_is_not_the_usual_one() -> None:
    there = render_html(make_run(), Path("my runs"))
    command = "python -m verifier replay a1b2c3d4e5 --out &#39;my runs&#39;"
    assert there.count(command) == 2  # in the message, and to be copied
    assert "--out" not in render_html(make_run())


def test_a_finding_of_special_values_is_told_apart_from_new_ones() -> None:
    """The gate does not count it, so no banner says that something new is wrong."""
    run = make_run()
    special = replace(next(one for one in run.findings if not one.known), verdict="SPECIAL_VALUE")
    run = replace(run, findings=[special, *(one for one in run.findings if one.known)])
    page = render_html(run)
    assert "new finding</" not in page
    assert "1 finding for special values alone." in page
    assert "0 new, 1 known, 1 for special values alone" in page
    assert "which the gate counts with" in page
    assert special.fingerprint in page
