"""Trials that are checked without torch: what passes can be loaded, and torch decides about everything else."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_factory import make_finding

from verifier.core.placement_text import BITWISE_REDUCTIONS, REDUCTIONS
from verifier.gate.baseline import load_baseline
from verifier.records import values
from verifier.records.schema import TrialRecord
from verifier.records.trials import check_trial, surely_loads
from verifier.records.values import load_trial

TRIAL = make_finding().trial
BASELINE = Path(__file__).resolve().parents[2] / "reports" / "baseline.toml"
TAGS = (
    "tensor", "tuple", "size", "dict", "float", "complex", "placement", "device", "dtype", "layout", "memory_format",
    "other",
)  # fmt: skip
TEXTS = (
    "", " ", "nan", "inf", "-inf", "Infinity", "float64", "half", "int8", "uint64", "qint8", "bits8", "float8_e4m3fn",
    "complex32", "bool", "strided", "sparse_coo", "channels_last", "contiguous_format", "_dynamo", "cpu", "cpu:0",
    "cuda:1", "cuda:01", "cuda:-1", "meta", "gpu", "R", " R", "S(0)", "S(-1)", "S(٣)", "S(0", "S(1234567890)", "P(sum)",
    "P(mean)", "P(bxor)", "_S(0, 2)", "_S(0, 0)", "_S(-1, 2)", "_NormP(2)", "_NormP(0)", "_NormP(1.5)", "_NormP(1.2.3)",
    "(S(0), R)", "()", "(R", "R, R",
)  # fmt: skip
NUMBERS = (
    None, True, False, 0, 1, -1, 127, 128, 255, 256, -128, -129, 1 << 31, (1 << 31) - 1, (1 << 63) - 1, 1 << 63,
    (1 << 64) - 1, 1 << 64, -(1 << 63), 10**400, 0.5, -0.0, 1e308,
)  # fmt: skip

SHAPES = ([], [1], [2], [1] * 16, [1] * 65, [0, 2], [0, 1 << 31], [0, 1 << 20, 1 << 31], [0, 1 << 62], [0, -1], [1, -1])
FLAGS = ({}, {"contiguous": False}, {"requires_grad": True}, {"parameter": True}, {"parameter": 1}, {"other": True},
         {"order": [0]}, {"order": [1, 0]}, {"order": 3})  # fmt: skip
FULL = {"parameter": True, "requires_grad": True, "contiguous": False}

leaves = st.sampled_from((*TEXTS, *NUMBERS))
arguments = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.builds(lambda tag, content: {tag: content}, st.sampled_from(TAGS), inner)
        | st.dictionaries(st.sampled_from(TAGS), inner, max_size=2)
    ),
    max_leaves=5,
)


def with_argument(stored: Any) -> TrialRecord:
    return replace(TRIAL, case=replace(TRIAL.case, args=[stored]))


@settings(deadline=None, max_examples=1000)
@given(arguments)
def test_an_argument_that_passes_can_be_loaded(stored: Any) -> None:
    trial = with_argument(stored)
    if surely_loads(trial):
        assert load_trial(trial).mesh.world_size


@pytest.mark.parametrize(
    ("dtype", "passing"),
    [(text, text in ("float64", "float8_e4m3fn", "int8", "uint64", "bool")) for text in TEXTS if text.isidentifier()],
)
def test_a_tensor_that_passes_can_be_loaded(dtype: str, passing: bool) -> None:
    passed = 0
    for shape, flags, value in itertools.product(SHAPES, (*FLAGS, FULL), (*TEXTS, *NUMBERS, [0.5, "nan"], [1], [])):
        values = [] if 0 in shape else [value] * (2 if 2 in shape else 1)
        trial = with_argument({"tensor": {"dtype": dtype, "shape": shape, "values": values, **flags}})
        if surely_loads(trial):
            assert load_trial(trial).mesh.world_size
            passed += 1
    assert bool(passed) == passing


@pytest.mark.parametrize("tag", ["tuple", "dict", "list"])
@pytest.mark.parametrize("levels", [5, 29, 31, 49, 50, 99, 101, 400])
def test_nested_arguments_that_pass_can_be_loaded(tag: str, levels: int) -> None:
    stored: Any = 1
    for _ in range(levels):
        stored = {"list": [stored], "tuple": {"tuple": [stored]}, "dict": {"dict": {"": stored}}}[tag]
    assert surely_loads(with_argument(stored)) == (levels < 30)
    if levels < 30:
        load_trial(with_argument(stored))


@given(
    st.builds(
        replace,
        st.just(TRIAL),
        mesh=st.sampled_from(("2", "2x2", "nccl:3", "0", "x", "1x1x1x1")),
        combination=st.lists(st.sampled_from(TEXTS), max_size=2),
        cotangents=st.lists(st.lists(st.sampled_from(TEXTS), max_size=2), max_size=2),
        seed=st.sampled_from((0, 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 64))),
    )
)
def test_a_trial_that_passes_can_be_loaded(trial: TrialRecord) -> None:
    if surely_loads(trial):
        assert load_trial(trial).mesh.world_size


@pytest.mark.parametrize(
    "placements",
    ["R", "S(12)", "S(-2)", *(f"P({name})" for name in (*REDUCTIONS, *BITWISE_REDUCTIONS)), "(_S(0, 2), _NormP(2))"],
)
def test_placements_that_can_be_loaded_pass(placements: str) -> None:
    assert surely_loads(replace(TRIAL, combination=[placements]))


def test_every_trial_of_the_baseline_passes_without_torch() -> None:
    entries = load_baseline(BASELINE).entries
    assert len(entries) > 100
    assert [entry.fingerprint for entry in entries if not surely_loads(entry.trial())] == []


def test_torch_decides_about_a_trial_that_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    doubtful = with_argument({"dtype": "half"})
    assert not surely_loads(doubtful)
    check_trial(doubtful)
    with pytest.raises(ValueError, match=r"^args\[0\]: torch has no dtype 'hlaf'; did you mean 'half'\?$"):
        check_trial(with_argument({"dtype": "hlaf"}))
    monkeypatch.setattr(values, "load_trial", lambda _: pytest.fail("loaded"))
    check_trial(TRIAL)
