"""The page of what changed between versions of torch is made of their rule tables, in its marked parts alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import torch_versions
from verifier.records.rule_table import TABLE_FORMAT, ClaimedRule, OverloadTable, RuleTable, write_table

CALLS = ["self=f64[5], dim=0", "self=f64[5, 5], dim=0"]
WHOLE, ONE_DIM = "strategy sums, sums.py", "strategy for one mesh dim sums, sums.py"


def table(torch: str, registered: dict[str, str], rules: dict[str, ClaimedRule]) -> RuleTable:
    overloads = {op: OverloadTable(registered[op], [], CALLS, rules) for op in ("aten.mean.dim", "aten.sum.dim")}
    return RuleTable(TABLE_FORMAT, f"{torch}+cpu", ["2"], "float64", 2, 2, 0, [], registered, overloads)


OLD = table(
    "2.13.0",
    {"aten.sum.dim": WHOLE, "aten.mean.dim": WHOLE, "aten.cholesky.default": "strategy linear, solvers.py"},
    {"S(0) -> P(sum)": ClaimedRule(confirmed=[1]), "S(1) -> S(1)": ClaimedRule(wrong=[1])},
)
NEW = table(
    "2.14.1",
    {"aten.sum.dim": ONE_DIM, "aten.mean.dim": WHOLE, "aten.cat.out": "strategy for one mesh dim out, autogen.py"},
    {"P(sum) -> S(0)": ClaimedRule(confirmed=[1]), "R -> R": ClaimedRule(wrong=[0])},
)
PAGE = "\n".join(
    f"Before.\n<!-- {name}: python benchmarks/torch_versions.py -->\nold\n<!-- end of {name} -->\nAfter."
    for name in ("overview", "2.13.0 to 2.14.1")
)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["torch_versions.py", *map(str, arguments)])
    return torch_versions.main()


@pytest.fixture
def tables(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, made in zip(paths, (OLD, NEW), strict=True):
        write_table(made, path)
    return paths


def test_each_change_is_in_the_page(
    tables: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *tables) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| 2.13.0 | 3 | 0 | 0 | 3 | 0 | 2 | 4 | 4 | 2 |" in lines
    assert "| 2.14.1 | 3 | 0 | 0 | 1 | 2 | 2 | 4 | 4 | 2 |" in lines
    assert "Overloads that have no rule any more: `aten.cholesky`." in lines
    assert "| 1 | `strategy for one mesh dim out, autogen.py` | `aten.cat.out` |" in lines
    assert "1 overload: a strategy before, a strategy for one mesh dim now." in lines
    both = "`aten.mean.dim`, `aten.sum.dim`"
    assert f"| lost | {both} | `S(0) -> P(sum)` | 2 |" in lines
    assert f"| wrong | {both} | `R -> R` | 2 |" in lines
    assert f"| mended | {both} | `S(1) -> S(1)` | 2 |" in lines
    assert f"| `P(sum) -> S(0)` | 2 | {both} |" in lines


def test_marked_parts_alone_are_written(tables: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert run(monkeypatch, *tables, "--write", page) == 0
    once = page.read_text()
    assert once.count("Before.") == once.count("After.") == 2
    assert "old\n" not in once
    assert "`aten.cholesky`" in once
    assert run(monkeypatch, *tables, "--write", page) == 0
    assert page.read_text() == once


def test_a_page_without_a_mark_and_a_file_that_is_no_table_are_one_line(
    tables: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("2.13.0 to 2.14.1", "2.13.0 to 2.15.0"))
    assert run(monkeypatch, *tables, "--write", page) == 2
    assert run(monkeypatch, page) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "the page lacks the lines '<!-- 2.13.0 to 2.14.1:" in first
    assert "no rule table" in second
