"""Calls of overloads that are made from calls of their siblings."""

from __future__ import annotations

import pytest
import torch

from strategies.opinfo.calls.call import Call
from strategies.opinfo.samples.derived_overloads import converted
from strategies.opinfo.source import SOURCE
from verifier.rules.samples import SampleOptions


@pytest.mark.parametrize(("dims", "made"), [([0], True), ([0, 1], True), ([], False)])
def test_no_call_of_prims_is_made_whose_shape_the_kernel_and_the_meta_function_disagree_about(
    dims: list[int], made: bool
) -> None:
    x, op = torch.ones(3, 4), torch.ops.prims.var.default
    assert (op(x, dims, 1).shape == op(x.to("meta"), dims, 1).shape) is made, "if torch agrees, the call may be made"
    sibling = Call(torch.ops.aten.var.correction, (x, dims), {"correction": 1})
    assert (converted(sibling, op) is not None) is made


@pytest.mark.parametrize(
    "op",
    ["slice_copy.Tensor", "select_copy.int", "split_copy.Tensor", "view_as_real_copy.default", "slice_copy.Tensor_out"],
)
def test_what_copies_in_place_of_a_view_is_called_as_the_view(op: str) -> None:
    targets = SOURCE.select([f"aten.{op}"])
    options = SampleOptions(max_samples=2, rare=False)
    assert [sample.op for target in targets for sample in SOURCE.samples(target, options)][:1] == [f"aten.{op}"]


@pytest.mark.parametrize(
    "op", ["scatter.reduce", "scatter_.value_reduce", "unsafe_split_with_sizes.default", "_add_relu.Tensor"]
)
def test_an_overload_without_an_opinfo_of_its_own_is_called_as_its_siblings(op: str) -> None:
    (target,) = SOURCE.select([f"aten.{op}"])
    cases = [sample.draw(0, 0) for sample in SOURCE.samples(target, SampleOptions(rare=False))]
    assert {case.op for case in cases if case is not None} == {f"aten.{op}"}
    if "reduce" in op:
        assert {case.kwargs["reduce"] for case in cases if case is not None} == {"add", "multiply"}


@pytest.mark.parametrize("op", ["_weight_norm_interface", "_weight_norm_interface_backward"])
def test_weights_are_normalised_along_the_first_dim_and_the_last(op: str) -> None:
    (target,) = SOURCE.select([f"aten.{op}.default"])
    assert {sample.origin for sample in SOURCE.samples(target, SampleOptions())} == {
        "handmade, dim 0",
        "handmade, dim 2",
    }
