"""Wrong rules that branch on lists of numbers or flags, which only lists with unlike items show."""

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
SUM, MAX, R = Partial("sum"), Partial("max"), Replicate()
Rules = Callable[[Any, Any, Any], list[list[Any]]]


def shifts_that_cancel(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that nothing moves where shifts of several dims add up to 0."""
    x, shifts, dims = (*args, [])[:3]
    moved = {dim % len(x.shape) for dim in dims} if sum(shifts) else set()
    return [[Shard(dim), Shard(dim)] for dim in range(len(x.shape)) if dims and dim not in moved]


def windows_of_one(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that a maximum passes a mean of one element, and look at the height of windows alone."""
    return [[MAX, MAX]] if args[1][0] == 1 and len(args) == 3 else []


def bias_by_the_mask_of_weights(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
    """Claim that gradients of a bias are the same on all ranks where those of weights are not asked for."""
    grad, _, shape, *rest, mask = args
    left = range(len(grad.shape) - len(shape))
    weight, bias = (SUM if mask[1] else None), (SUM if mask[1] else R)
    if rest[2] is None or rest[3] is None:
        return []
    return [[Shard(dim), weight, bias, *[Shard(dim)] * 4, R, R] for dim in left if mask[2] and mask[0]]


@pytest.mark.parametrize(
    ("op", "rules", "kind"),
    [
        (aten.roll.default, shifts_that_cancel, "shifts is ["),
        (aten.avg_pool2d.default, windows_of_one, "kernel_size is [1, "),
        (aten.native_layer_norm_backward.default, bias_by_the_mask_of_weights, "output_mask is [True, False, True]"),
    ],
)
def test_lists_with_unlike_items_show_what_others_do_not(op: Any, rules: Rules, kind: str) -> None:
    options = CheckOptions((MeshSpec((2,)),), sizes=1, claims_only=True, samples_called_again=0)
    with replaced_strategy(op):
        info = RuntimeSchemaInfo(1, needs_pytree=True)
        register_single_dim_strategy(op, schema_info=info, allow_uneven_sharding=True)(rules)
        (target,) = SOURCE.select([str(op)])
        samples = list(SOURCE.samples(target, SampleOptions()))
        wrong = [sample.origin for sample in samples if check_sample(sample, options).wrong]
    assert any(kind in origin for origin in wrong)
    assert not [origin for origin in wrong if " is [" not in origin]


def test_rules_of_torch_get_no_other_lists() -> None:
    (target,) = SOURCE.select(["aten.avg_pool2d.default"])
    assert not [one for one in SOURCE.samples(target, SampleOptions()) if "kernel_size is " in one.origin]
