"""Wrong rules of slices, which only their ends show, and of lists of indices, which only broadcasts show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy

from strategies.opinfo.source import SOURCE
from verifier.core.case import MeshSpec
from verifier.rules.check import check_sample
from verifier.rules.options import CheckOptions
from verifier.rules.samples import SampleOptions
from verifier.torch_internals.registries import replaced_strategy

aten = torch.ops.aten
SUM, R = Partial("sum"), Replicate()
Rules = Callable[[Any, Any, Any], list[list[Any]]]
OWN = " from dim "


def given(indices: Any) -> list[Any]:
    return [one for one in indices if one is not None and one.dtype != torch.bool]


def whole_up_to_zero(of: int) -> Rules:
    """Return rules that take a slice for the whole dim if it does not start behind 0, or ends before the last."""

    def rules(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
        x = args[0]
        dim, start, end, step = (*args[of:], *(0, None, None, 1)[len(args) - of :])
        extent = x.shape[dim]
        whole = (start or 0) <= 0 and (end is None or end >= extent) and step == 1
        return [[Shard(d)] * (1 + of) for d in range(len(x.shape)) if d != dim % len(x.shape) or whole]

    return rules


def vectors(indices: Any) -> bool:
    return len(given(indices)) == len(indices) and all(len(one.shape) == 1 for one in indices)


def each_adds_its_own(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that each rank may add its own values, if there are as many as the first vector has indices."""
    x, indices, values = args[:3]
    same = vectors(indices) and len(values.shape) == 1 + len(x.shape) - len(indices)
    same = same and values.shape[0] == indices[0].shape[0] and len(args) > 3 and args[3]
    return [[SUM, SUM, *[Shard(0)] * len(indices), Shard(0)]] if same else []


def rows_of_values(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that each rank may add its own values, if indices are of one length: one row of values is for all."""
    x, indices, values = args[:3]
    same = vectors(indices) and len({one.shape for one in indices}) == 1 and len(args) > 3 and args[3]
    same = same and len(values.shape) == 1 + len(x.shape) - len(indices)
    return [[SUM, SUM, *[Shard(0)] * len(indices), Shard(0)]] if same else []


def numbers_replace_maxima(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that one number, which is the same on all ranks, may be added to a pending maximum or sum."""
    _, indices, values = args[:3]
    return [[SUM, SUM, *[R] * len(indices), R]] if vectors(indices) and not values.shape else []


@pytest.mark.parametrize(
    ("op", "rules", "kinds"),
    [
        (aten.slice.Tensor, whole_up_to_zero(1), ["the last elements"]),
        (aten.slice_scatter.default, whole_up_to_zero(2), ["the last elements"]),
        (aten.index_put.default, each_adds_its_own, ["indices n, 1"]),
        (aten.index_put.default, rows_of_values, ["one row of"]),
        (aten.index_put_.default, numbers_replace_maxima, ["one of"]),
    ],
)
def test_a_class_of_input_shows_what_other_calls_do_not(op: Any, rules: Rules, kinds: list[str]) -> None:
    options = CheckOptions((MeshSpec((2,)),), sizes=1, claims_only=True, samples_called_again=0)
    with replaced_strategy(op):
        info = RuntimeSchemaInfo(1, needs_pytree=True)
        register_single_dim_strategy(op, schema_info=info, allow_uneven_sharding=True)(rules)
        (target,) = SOURCE.select([str(op)])
        samples = list(SOURCE.samples(target, SampleOptions()))
        wrong = [sample.origin for sample in samples if check_sample(sample, options).wrong]
    assert not [origin for origin in wrong if OWN not in origin and not any(kind in origin for kind in kinds)]
    assert all(any(kind in origin for origin in wrong) for kind in kinds)


def test_rules_of_torch_get_no_more_lists_of_indices() -> None:
    (target,) = SOURCE.select(["aten.index_put.default"])
    assert not [one for one in SOURCE.samples(target, SampleOptions()) if OWN in one.origin]
