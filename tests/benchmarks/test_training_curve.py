"""The training curve: when curves count as equal, and that its picture and page show what was measured."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.mark.parametrize(("error", "equal"), [(0.0, True), (5e-6, True), (5e-5, False)])
def test_curves_are_equal_within_rounding(error: float, equal: bool) -> None:
    import training_curve

    local = tuple(2.5 - step / 50 for step in range(50))
    losses = (*local[:20], local[20] + error, *local[21:])
    curve = training_curve.Curve("tensor parallel", "4", losses, local)
    assert curve.equal is equal
    assert curve.difference == pytest.approx(error)


def test_picture_has_a_mark_for_each_loss_in_turn() -> None:
    import training_curve

    local = (2.0, 1.0, 0.5, 0.25)
    curves = [training_curve.Curve(name, "4", local, local) for name in ("one", "two")]
    root = ET.fromstring(training_curve.svg(curves))
    circles = [element for element in root if element.tag.endswith("circle")]
    assert len(circles) == len(local) + len(curves)  # the legend has one for each curve
    texts = [element.text for element in root if element.tag.endswith("text")]
    assert {"local", "one, 4", "two, 4", "step"} <= set(texts)


def test_sentences_follow_their_rule() -> None:
    import training_curve

    tokens, following = training_curve.sentences(32, 8)
    assert torch.equal(tokens[:, 1:], following[:, :-1])
    assert set(((following - 5 * tokens) % training_curve.VOCABULARY).unique().tolist()) == {1, 2, 3}


def test_page_shows_curves_that_are_equal() -> None:
    text = (ROOT / "docs" / "explanations" / "training-curve.md").read_text(encoding="utf-8")
    assert "(training-curve.svg)" in text
    differences = [float(found) for found in re.findall(r"(\d\.\de-\d+) \|$", text, re.MULTILINE)]
    assert len(differences) == 3
    assert max(differences) < 1e-5
    picture = ET.parse(ROOT / "docs" / "explanations" / "training-curve.svg").getroot()
    assert "Loss over 50 steps" in picture.attrib["aria-label"]


def teardown_module() -> None:
    sys.modules.pop("training_curve", None)
