"""Derived code is checked, and derived again without what a check refutes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from derived_calls import aten, evidence, said, way
from torch.distributed.tensor import Partial

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.deriving import closing
from verifier.deriving import derive as deriving
from verifier.deriving.closing import Closed
from verifier.deriving.derive import Derived, DeriveRequest
from verifier.deriving.learning.generalise import Derivation, generalise
from verifier.deriving.learning.isolated import Workshop
from verifier.deriving.learning.learned import Learned
from verifier.deriving.text import derivation_lines
from verifier.records.values import trial_record

SECONDS = ("deriving", "checking")


@pytest.mark.parametrize(
    ("closed", "passed"),
    [
        (Closed(3, 0, (), 0, ""), True),
        (Closed(3, 1, (), 0, ""), False),
        (Closed(3, 0, ("S(0) of a call",), 0, ""), False),
        (Closed(3, 0, (), 1, ""), False),
        (Closed(0, 0, (), 0, ""), False),
    ],
)
def test_code_passes_only_if_no_check_refutes_it_and_one_bears_it_out(closed: Closed, passed: bool) -> None:
    assert closed.passed is passed


def named(op: str) -> Learned:
    """Return an op that need not exist, of which nothing is known."""
    return Learned(op, [], Derivation((), (), 0))  # type: ignore[arg-type]


def answered(monkeypatch: pytest.MonkeyPatch, verifier: Callable[[Sequence[str]], tuple[int, str, str]]) -> None:
    """Let ``verifier`` answer what the commands of the verifier are asked."""
    monkeypatch.setattr(closing, "_running", lambda words: nullcontext(partial(verifier, words)))


def test_all_lines_are_told_of_a_check_that_could_not_verify(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = ["Traceback (most recent call last):", *(f'  File "{n}.py"' for n in range(20)), "KeyError: 'x'", "error"]
    made = Derivation((), (), 0)
    answers = [(2, "", "\n".join(lines))]
    answered(monkeypatch, lambda words: answers.pop(0))
    given = [Learned(aten.exp.default, [], made)], tmp_path / "exp.py", [], "2", ["2"], 2
    with pytest.raises(ValueError, match="rules of the derived strategy could not verify") as caught:
        closing.close(*given)
    assert str(caught.value).splitlines()[1:] == lines

    nothing_wrong = {"ops": {"exp": {"confirmed": ["S(0) -> S(0)"], "wrong": [], "missing": []}}}
    answers += [(0, json.dumps(nothing_wrong), ""), (2, "gate on aten.exp.default\n", "\n".join(lines))]
    closed = closing.close(*given)
    assert closed.said.splitlines()[1:] == lines
    assert not closed.passed


STAND_IN = """#!/bin/sh
cd "$(dirname "$0")"
[ "$3" = rules ] && { echo "$*"; echo wrong >&2; exit 1; }
trap 'touch ended; exit 143' TERM
touch started
while :; do sleep 0.01; done
"""
"""A program that answers ``rules``, and that else runs until it is asked to end."""


@pytest.mark.processes
def test_a_command_that_nobody_waits_for_any_more_is_asked_to_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "program"
    program.write_text(STAND_IN)
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with closing._running(["gate"]), closing._running(["rules", "abs"]) as rules:
        assert rules() == (1, "-m verifier rules abs\n", "wrong\n")
        while not (tmp_path / "started").exists():
            time.sleep(0.01)
    assert (tmp_path / "ended").exists()


def test_an_op_without_a_strategy_in_the_gradient_is_to_be_derived_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    raised = "NotImplementedError: Operator mine.scale_backward.default does not have a sharding strategy registered."
    record = '{"ops": {"mine.scale.default": {"confirmed": ["one"], "wrong": [], "missing": []}}}'
    said = {"rules": (0, record, ""), "gate": (1, "", f"new CRASH: every rank raised {raised}" + "\nmore" * 20)}
    answered(monkeypatch, lambda words: said[words[0]])
    closed = closing.close([named("mine.scale.default")], tmp_path / "s.py", (), "2", ("2",), 1)
    assert closed.without_strategy == ("mine.scale_backward.default",)
    made = Derived(
        "mine.scale.default", (named("mine.scale.default"),), "", "", closed, seconds=dict.fromkeys(SECONDS, 0.0)
    )
    lines = derivation_lines(made, None)
    assert any("mine.scale_backward.default" in line and "derive it first" in line for line in lines)


FAILED = (
    "  NEW 25b6 CRASH\n    in m.f.default(x=f64[5, 1] {placement}) on mesh ({ranks},), backend gloo, during forward\n"
)


@pytest.mark.parametrize(
    ("placement", "ranks", "uneven"), [("S(0)", 4, True), ("S(0)", 5, False), ("R", 4, False), ("S(1)", 2, True)]
)
def test_uneven_shards_alone_are_told_from_other_failures(
    placement: str, ranks: int, uneven: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = '{"ops": {"m.f.default": {"confirmed": ["one"], "wrong": [], "missing": []}}}'
    said = {"rules": (0, record, ""), "gate": (1, FAILED.format(placement=placement, ranks=ranks), "")}
    answered(monkeypatch, lambda words: said[words[0]])
    closed = closing.close([named("m.f.default")], tmp_path / "s.py", (), "2", ("2",), 1)
    assert closed.only_uneven == uneven
    found = {"mesh": str(ranks), "input_placements": [placement], "output_placements": [placement], "shapes": [[5, 1]]}
    wrong = {"f": {"confirmed": [], "wrong": [found | {"origin": "f", "message": "no rows"}], "missing": []}}
    said["rules"] = (1, json.dumps({"ops": wrong, "findings": []}), "")
    closed = closing.close([named("m.f.default")], tmp_path / "s.py", (), "2", ("2",), 1)
    assert closed.only_uneven == uneven
    assert "no rows" in closed.said


def test_code_that_uneven_shards_alone_refute_is_checked_again_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[str, DeriveRequest]] = []

    def check(code: str, learned: object, request: DeriveRequest, module: str) -> Closed:
        checked.append((code, request))
        uneven = "allow_uneven_sharding=True" in code
        return Closed(1, 0, (), int(uneven), "", only_uneven=only_uneven)

    calls = evidence(way(aten.neg.default, lambda tensor, a, b, c: (tensor(a, b),)))
    monkeypatch.setattr(deriving, "_checked", check)
    monkeypatch.setattr(deriving, "derivation", lambda request: (calls, generalise(calls)))
    only_uneven = True
    made = deriving.derive(DeriveRequest("aten.neg.default"), "new")
    assert "allow_uneven_sharding=False" in made.code
    assert [(request.world_sizes, [*request.meshes]) for _, request in checked] == [
        ("2,3", ["2", "3", "2x2"]), ("2,3,4", ["2", "3", "2x2", "4"])
    ]  # fmt: skip
    only_uneven = False
    made = deriving.derive(DeriveRequest("aten.neg.default"), "new")
    assert not made.closed.passed
    assert len(checked) == 3


def _refuted(dims: int) -> dict[str, object]:
    """Return what `rules` prints of a maximum that is claimed to pass through abs of a tensor."""
    values = (torch.arange(2**dims, dtype=torch.float64) * 3 % 7 - 3).reshape((2,) * dims)
    case = OpCase("aten.abs.default", "torch.ops.aten.abs.default", (values,), {})
    trial = Trial(case, MeshSpec((2,)), ((Partial("max"),),))
    finding = {"op": case.op, "trial": msgspec.to_builtins(trial_record(trial))}
    found = {"mesh": "2", "input_placements": ["P(max)"], "output_placements": ["P(max)"], "shapes": [[2] * dims]}
    wrong = [found | {"origin": "abs", "message": "it is not"}]
    return {"ops": {case.op: {"confirmed": [], "wrong": wrong, "missing": []}}, "findings": [finding]}


def test_what_rules_refutes_is_derived_again_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []

    def verifier(words: Sequence[str]) -> tuple[int, str, str]:
        is_wrong = 'Partial("max")' in Path(words[-words[::-1].index("--import")]).read_text()
        asked.append((words[0], is_wrong))
        right = {"ops": {"aten.abs.default": {"confirmed": ["one"], "wrong": [], "missing": []}}}
        return (0, json.dumps(_refuted(2) if is_wrong else right), "") if words[0] == "rules" else (0, "", "")

    calls = evidence(way(aten.abs.default, lambda tensor, a, b, c: (tensor(a, b),)))
    for wrong in (Partial("max"), Partial("min")):
        calls = [replace(call, rules=call.rules | {(wrong,): (frozenset({wrong}),)}) for call in calls]
    assert {"P(max) -> P(max)", "P(min) -> P(min)"} <= said(generalise(calls))
    answered(monkeypatch, verifier)
    monkeypatch.setattr(deriving, "Workshop", lambda imports: Workshop(imports, jobs=0))
    monkeypatch.setattr(deriving, "derivation", lambda request: (calls, generalise(calls)))
    made = deriving.derive(DeriveRequest("aten.abs.default"), "new")
    assert asked == [("rules", True), ("rules", False), ("gate", False)]
    assert made.closed.passed
    left = said(made.learned[0].made)  # the call that refutes one wrong rule refutes the other, too
    assert left == {"S(d) -> S(d)", "P(product) -> P(product)"}


def test_what_rules_refutes_of_other_calls_does_not_go_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[object] = []

    def verifier(words: Sequence[str]) -> tuple[int, str, str]:
        checks.append(words)
        return 1, json.dumps(_refuted(3)), ""

    calls = evidence(way(aten.abs.default, lambda tensor, a, b, c: (tensor(a, b),)))
    answered(monkeypatch, verifier)
    monkeypatch.setattr(deriving, "Workshop", lambda imports: Workshop(imports, jobs=0))
    monkeypatch.setattr(deriving, "derivation", lambda request: (calls, generalise(calls)))
    made = deriving.derive(DeriveRequest("aten.abs.default"), "new")
    assert len(checks) == 4
    assert not made.closed.passed
