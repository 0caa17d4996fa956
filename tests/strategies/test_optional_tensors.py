"""Tensors of ops of one's own that no example has: for optional arguments, and of other kinds of numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ops_of_ones_own import OPS
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.experimental import register_sharding

import verifier
from strategies.own_ops.source import own_samples
from verifier.core.case import MeshSpec
from verifier.rules.check import check_sample
from verifier.rules.options import CheckOptions
from verifier.rules.samples import SampleOptions

pytestmark = pytest.mark.usefixtures("samples_taken_back", "rules_taken_back")

R, S, P = Replicate(), Shard, Partial("sum")
QUICK = CheckOptions((MeshSpec((2,)),), sizes=1, claims_only=True, products=0, samples_called_again=0)
Rules = list[tuple[list[object], list[object]]]


def given(optional: object, *placements: object) -> list[object]:
    """Return placements, of which the last one is that of an optional tensor."""
    return [*placements[:-1], None if optional is None else placements[-1]]


def linear(pending: object) -> Callable[..., Rules]:
    """Return the strategy of a linear layer; ``pending`` is how a bias is placed beside a sum that is pending."""

    def rules(x: object, w: object, bias: object = None) -> Rules:
        return [
            ([R], given(bias, R, R, R)),
            ([S(0)], given(bias, S(0), R, R)),
            ([S(1)], given(bias, R, S(0), S(0))),
            ([P], given(bias, S(1), S(1), pending)),
        ]

    return rules


def alike(x: torch.Tensor, by: object = None, unread: object = None) -> Rules:
    return [([p], [*given(by, p, p), None]) for p in (R, *map(S, range(x.ndim)))]


def replicated(x: torch.Tensor, by: object = None, unread: object = None) -> Rules:
    return [([p], [*given(by, p, R), None]) for p in (R, P, *map(S, range(x.ndim)))]


def refuted(name: str) -> tuple[list[tuple[int, ...]], set[str]]:
    """Return the shapes of the tensors that were made for optional arguments, and the rules that are wrong."""
    made = list(own_samples(f"test_own_ops.{name}.default", SampleOptions()))
    shapes = [tuple(one.first.tensors[-1].shape) for one in made if one.origin.endswith("is a tensor")]
    return shapes, {str(wrong.rule) for one in made for wrong in check_sample(one, QUICK).wrong}


@pytest.mark.parametrize(("pending", "found"), [(P, set()), (R, {"S(1), S(1), R -> P(sum)"})])
def test_a_rule_that_is_wrong_beside_a_bias_is_refuted_though_no_example_has_one(
    pending: object, found: set[str]
) -> None:
    verifier.samples("test_own_ops::linear")(lambda: [(torch.randn(4, 6), torch.randn(5, 6))])
    register_sharding(OPS.linear.default)(linear(pending))
    shapes, wrong = refuted("linear")
    assert shapes == [(5,)]
    assert wrong == {f"test_own_ops.linear.default: {rule}" for rule in found}


@pytest.mark.parametrize(("strategy", "shape"), [(alike, (4, 6)), (replicated, ())])
def test_of_the_shapes_that_an_op_takes_the_one_is_made_for_which_the_rules_hold(
    strategy: Callable[..., Rules], shape: tuple[int, ...]
) -> None:
    verifier.samples("test_own_ops::multiplied")(lambda: [(torch.randn(4, 6),)])
    register_sharding(OPS.multiplied.default)(strategy)
    assert refuted("multiplied") == ([shape], set())


def test_no_tensor_is_made_where_an_example_has_one() -> None:
    x = torch.randn(4, 6)
    verifier.samples("test_own_ops::multiplied")(lambda: [(x,), (x, torch.tensor(3.0))])
    register_sharding(OPS.multiplied.default)(replicated)
    assert refuted("multiplied") == ([], set())


@pytest.mark.parametrize(("name", "asks"), [("quartered", "op"), ("halved", "rule")])
def test_integers_are_tried_where_the_op_or_its_rule_asks_for_a_kind_of_numbers(name: str, asks: str) -> None:
    def rules(x: DTensorSpec) -> Rules:
        assert x.tensor_meta is not None
        kinds = [R, P] if asks == "op" or x.tensor_meta.dtype != torch.int32 else [R]
        return [([one], [one]) for one in kinds]

    def plain(x: object) -> Rules:
        return [([one], [one]) for one in (R, P)]

    verifier.samples(f"test_own_ops::{name}")(lambda: [(torch.randn(4, 6),)])
    register_sharding(getattr(OPS, name).default)(plain if asks == "op" else rules)
    assert refuted(name)[1] == {f"test_own_ops.{name}.default: P(sum) -> P(sum)"}
