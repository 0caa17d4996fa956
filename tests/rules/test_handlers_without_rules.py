"""Level 1 runs a user's handler of an op without rules, and holds its results against where it places them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from strategies.embedding.renorm import renorm
from strategies.opinfo.handmade import handmade_samples
from verifier.core.case import MeshSpec
from verifier.rules.check import check_sample
from verifier.rules.options import CheckOptions
from verifier.rules.results import SampleReport
from verifier.rules.samples import SampleOptions
from verifier.torch_internals.registries import replaced_handler

aten = torch.ops.aten
OPTIONS = CheckOptions((MeshSpec((2,)),), sizes=1, claims_only=True, products=0, samples_called_again=0)


def whole_bags(op: Any, *args: Any) -> list[torch.Tensor]:
    whole = [arg.full_tensor() if isinstance(arg, DTensor) else arg for arg in args]
    return list(op(*whole))


def gathered(op: Any, *args: Any) -> list[object]:
    mesh = args[0].device_mesh
    return [DTensor.from_local(one, mesh, [Replicate()], run_check=False) for one in whole_bags(op, *args)]


def summed_everywhere(op: Any, *args: Any) -> list[object]:
    mesh = args[0].device_mesh
    first, *rest = whole_bags(op, *args)
    return [DTensor.from_local(first, mesh, [Partial()], run_check=False), *rest]


def nothing_saved(op: Any, *args: Any) -> list[object]:
    first, *rest = gathered(op, *args)
    return [first, *(one.new_empty(0) for one in rest)]  # type: ignore[attr-defined]


def only_own_rows(op: Any, weight: Any, indices: Any, max_norm: float, order: float = 2.0) -> object:
    op(weight.to_local(), indices.full_tensor(), max_norm, order)
    return weight


def report_of(op: Any, label: str, handler: Any) -> SampleReport:
    (sample,) = [one for one in handmade_samples(str(op), SampleOptions()) if one.origin == f"handmade, {label}"]
    with replaced_handler(op, handler):
        return check_sample(sample, OPTIONS)


@pytest.mark.parametrize("handler", [gathered, nothing_saved])
def test_a_true_handler_holds_whatever_it_saves_for_its_backward(handler: Any) -> None:
    report = report_of(aten._embedding_bag_forward_only.default, "sum", handler)
    assert report.confirmed
    assert not report.wrong


def test_results_that_every_rank_has_are_no_parts_of_a_sum() -> None:
    report = report_of(aten._embedding_bag_forward_only.default, "mean", summed_everywhere)
    assert {one.rule.outputs[0] for one in report.wrong} == {"P(sum)"}
    assert not report.confirmed


def test_norms_of_a_ranks_own_columns() -> None:
    wrong = report_of(aten.embedding_renorm_.default, "norm 2.0", only_own_rows).wrong
    assert {one.rule.inputs[0] for one in wrong} > {"S(1)"}
    assert not report_of(aten.embedding_renorm_.default, "norm 2.0", renorm).wrong


def test_torchs_own_handlers_of_ops_without_rules_are_left_to_ranks() -> None:
    (sample, *_) = handmade_samples("aten.embedding_renorm_.default", SampleOptions())
    assert check_sample(sample, OPTIONS).untested == {"DTensor has no rule for this call": 1}
