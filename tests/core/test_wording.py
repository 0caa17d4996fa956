"""How messages put things: counts with their nouns, the nearest valid name, and a call on one line."""

from __future__ import annotations

import ast
from datetime import date
from pathlib import Path

import pytest
import torch
from run_factory import make_run
from torch.distributed.tensor import Partial, Shard

from verifier.core.call_text import describe_call
from verifier.core.case import OpCase
from verifier.core.wording import did_you_mean, nearest, plural
from verifier.gate.baseline import Baseline
from verifier.gate.decision import decide
from verifier.gate.text import render

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("count", "nouns", "expected"),
    [
        (0, ("trial",), "0 trials"),
        (1, ("trial",), "1 trial"),
        (2, ("trial",), "2 trials"),
        (1, ("entry", "entries"), "1 entry"),
        (12345, ("entry", "entries"), "12,345 entries"),
    ],
)
def test_plural(count: int, nouns: tuple[str, ...], expected: str) -> None:
    assert plural(count, *nouns) == expected


def test_nearest_name() -> None:
    known = ("aten.embedding.default", "aten.mm.default", "dev")
    assert nearest("aten.embeding.default", known) == "aten.embedding.default"
    assert nearest("zzz", known) is None
    assert nearest("zzz", known, cutoff=0.0) in known
    assert nearest("zzz", (), cutoff=0.0) is None
    assert did_you_mean("dve", known) == "; did you mean 'dev'?"
    assert did_you_mean("zzz", known) == ""
    assert did_you_mean("nonsense", ("row-wise-uneven", "column-wise")) == ""  # letters in common are not enough


def test_the_nearest_name_is_looked_for_in_one_place() -> None:
    users = {
        path.name
        for package in ("verifier", "strategies")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute | ast.Name | ast.alias)
        and getattr(node, "attr", getattr(node, "id", getattr(node, "name", ""))) == "get_close_matches"
    }
    assert users == {"wording.py"}


def test_a_gate_with_one_trial_speaks_of_one() -> None:
    today = date(2026, 5, 20)
    one = decide(make_run(findings=[], trials=1, counts={"PASS": 1}, untested=[]), Baseline(), today)
    assert "\n1 trial, 0 of them without evidence" in render(one)
    none = decide(make_run(findings=[], trials=1, counts={"UNSUPPORTED": 1}), Baseline(), today)
    assert none.unverified == "nothing was tested: the 1 trial is unsupported or inconclusive"


# ------------------------------------------------------------------------------------------------------- calls in words
F64 = torch.float64


def test_a_call_shows_lists_of_tensors() -> None:
    tensors = [torch.zeros(3, 4, dtype=F64), torch.zeros(2, 4, dtype=F64)]
    case = OpCase("aten.cat.default", "torch.ops.aten.cat.default", (tensors, 0))
    rows = [("tensors[0]", "S(0)"), ("tensors[1]", "R")]
    assert describe_call(case, rows) == "tensors=[f64[3, 4] S(0), f64[2, 4] R], dim=0"


def test_a_call_shows_targets() -> None:
    case = OpCase("op", "torch.ops.aten.mm.default", (), {"input": torch.zeros(4), "targets": [[Shard(0), Partial()]]})
    assert describe_call(case, [("input", "(R, R)")]) == "input=f32[4] (R, R), targets=[[S(0), P(sum)]]"


def test_a_long_list_is_cut_and_the_placements_behind_it_stay_in_step() -> None:
    many = [torch.zeros(1) for _ in range(9)]
    case = OpCase("op", "torch.ops.aten.mm.default", (), {"many": many, "last": torch.zeros(2, dtype=torch.int64)})
    rows = [(f"many[{i}]", "S(0)") for i in range(9)] + [("last", "R")]
    assert describe_call(case, rows) == f"many=[{'f32[1] S(0), ' * 6}3 more], last=i64[2] R"


def test_a_call_shows_what_is_no_tensor() -> None:
    options = {
        "a": None, "dtype": torch.bfloat16, "mode": "mean", "flag": True, "scale": 0.5, "where": Shard(1),
        "sizes": (2, None), "device": torch.device("cpu"), "generator": torch.Generator(), "nested": {"k": [1]},
    }  # fmt: skip
    case = OpCase("op", "torch.ops.aten.mm.default", (torch.zeros(1).to_sparse(), torch.zeros(1)), options)
    assert describe_call(case, [("mat2", "R")]) == (
        "self=f32[1], mat2=f32[1] R, dtype=bfloat16, mode='mean', flag=True, scale=0.5, where=S(1), sizes=[2, None], "
        "device=cpu, generator=a Generator, nested={k: [1]}"
    )
