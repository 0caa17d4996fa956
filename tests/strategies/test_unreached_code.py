"""Calls that reach code of a user's rule which usual calls and single changes of them do not reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy

from strategies.opinfo.source import SOURCE
from verifier.core.case import MeshSpec
from verifier.rules.campaign.collect import op_record
from verifier.rules.check import check_sample
from verifier.rules.options import CheckOptions
from verifier.rules.samples import SampleOptions

aten = torch.ops.aten
QUICK = CheckOptions((MeshSpec((2,)),), sizes=1, claims_only=True, products=0, samples_called_again=0)


def cumsum(wrong: bool, _op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    ndim, dim = len(args[0].shape), args[1]
    rules = [[Shard(d), Shard(d)] for d in range(ndim) if d != dim % max(ndim, 1)]
    if kwargs.get("dtype") == torch.float32 and dim < 0 and ndim == 2:
        rules += [[Shard(dim % ndim)] * 2] * wrong
    return rules


def amax(wrong: bool, _op: Any, args: Any, _kwargs: Any) -> list[list[Any]]:
    shape, dims, keep = args[0].shape, *(*args[1:], [], False)[:2]
    gone = {dim % len(shape) for dim in dims or range(len(shape))} if shape else set()
    kept = [dim for dim in range(len(shape)) if dim not in gone]
    rules = [[Shard(dim if keep else kept.index(dim)), Shard(dim)] for dim in kept]
    if keep and len(shape) == 3 and shape[0] % 2 == 0 and 1 in gone:  # of a call with one column it would hold
        rules += [[Shard(1), Shard(1)]] * wrong
    return rules


def index_select(wrong: bool, _op: Any, args: Any, _kwargs: Any) -> list[list[Any]]:
    rows, dim, index = args
    ndim = len(rows.shape)
    rules = [[Shard(d), Shard(d), Replicate()] for d in range(ndim) if d != dim % ndim]
    if index.dtype == torch.int32 and ndim > 1 and rows.shape[dim] == 4:
        rules += [[Replicate(), Shard(dim % ndim), Replicate()]] * wrong
    return rules


@pytest.mark.usefixtures("rules_taken_back")
@pytest.mark.parametrize("wrong", [True, False])
@pytest.mark.parametrize("strategy", [cumsum, amax, index_select])
def test_a_rule_that_is_wrong_where_several_conditions_hold_is_found(strategy: Any, wrong: bool) -> None:
    op = getattr(aten, strategy.__name__).default
    register_single_dim_strategy(op)(lambda *given: strategy(wrong, *given))
    (target,) = SOURCE.select([str(op)])
    reports = [check_sample(sample, QUICK, n) for n, sample in enumerate(SOURCE.samples(target, SampleOptions()))]
    assert sum(len(report.confirmed) for report in reports) > 20
    assert any(report.wrong for report in reports) is wrong


def flip(_op: Any, args: Any, _kwargs: Any) -> list[list[Any]]:
    ndim = len(args[0].shape)
    if ndim > 40:
        ndim -= 1
        return []
    gone = {dim % ndim for dim in args[1]} if ndim else set()
    return [[Shard(dim), Shard(dim)] for dim in range(ndim) if dim not in gone]


@pytest.mark.usefixtures("rules_taken_back")
def test_lines_that_no_call_reaches_are_named() -> None:
    op = aten.flip.default
    register_single_dim_strategy(op)(flip)
    (target,) = SOURCE.select([str(op)])
    samples = list(SOURCE.samples(target, SampleOptions(max_samples=3, rare=False)))
    reports = [check_sample(sample, QUICK, number) for number, sample in enumerate(samples)]
    first = flip.__code__.co_firstlineno
    where = str(Path(__file__).relative_to(Path.cwd()))
    assert op_record(reports, [], [], [], []).unreached == [f"{where}:{first + 3}", f"{where}:{first + 4}"]


def test_torchs_own_strategies_are_not_watched() -> None:
    (target,) = SOURCE.select(["aten.flip.default"])
    sample = next(iter(SOURCE.samples(target, SampleOptions(max_samples=1, rare=False))))
    report = check_sample(sample, QUICK)
    assert report.confirmed
    assert not report.reached | report.unreached
