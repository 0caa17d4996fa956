"""Wrong rules of ops that run on stand-in kernels are accused at level 1, and true rules beside them are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from rule_mutants import short
from rule_strategies import SUM, R, Rule
from torch.distributed.tensor import Shard
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy, register_op_strategy

from strategies.opinfo.handmade import handmade_samples
from verifier.core.case import MeshSpec
from verifier.rules.check import check_sample
from verifier.rules.options import CheckOptions
from verifier.rules.samples import SampleOptions
from verifier.torch_internals.registries import replaced_strategy

aten = torch.ops.aten
MESHES = CheckOptions((MeshSpec((2,)), MeshSpec((3,))), claims_only=True, samples_called_again=0)
BATCH, HEADS, SEQUENCE = Shard(0), Shard(1), Shard(2)


@dataclass(frozen=True)
class Mutant:
    """A wrong rule of an op, and true rules of the same call: the placements of the results, then of the arguments."""

    fault: str
    op: str
    label: str
    wrong: Rule
    true: tuple[Rule, ...] = ()


def flash(out: Any, logsumexp: Any, query: Any, key: Any, value: Any, state: Any = R) -> Rule:
    return [out, logsumexp, None, None, None, None, state, None, R, query, key, value]


def efficient(out: Any, logsumexp: Any, query: Any, key: Any, value: Any, bias: Any) -> Rule:
    return [out, logsumexp, None, None, query, key, value, bias]


def backward(gradients: tuple[Any, Any, Any], grad: Any, query: Any, keys: Any, saved: Any) -> Rule:
    """Return a rule for the gradients; key and value lie alike, and so do what the forward pass has saved."""
    return [*gradients, grad, query, keys, keys, grad, saved, R, R]


FLASH, FLASH_BACKWARD = (
    "_scaled_dot_product_flash_attention.default",
    "_scaled_dot_product_flash_attention_backward.default",
)
EFFICIENT, CUDNN_BACKWARD = (
    "_scaled_dot_product_efficient_attention.default",
    "_scaled_dot_product_cudnn_attention_backward.default",
)
BY_BATCH = flash(BATCH, BATCH, BATCH, BATCH, BATCH)
BY_HEADS = flash(HEADS, HEADS, HEADS, HEADS, HEADS)
BY_QUERIES = flash(SEQUENCE, SEQUENCE, SEQUENCE, R, R)
CAUSAL, ROWS, BLOCKS = (
    "causal, scale, groups of 2 heads",
    "a scale for each row and column",
    "scales for blocks of 1 x 128",
)
MATRICES_3D, MATRICES_2D = "3-d by 3-d, the second by rows", "2-d by 2-d, the second by columns"

MUTANTS = (
    Mutant("keys sharded as the output", FLASH, "plain", flash(SEQUENCE, SEQUENCE, R, SEQUENCE, SEQUENCE),
           (BY_QUERIES,)),
    Mutant("keys sharded as pending", FLASH, "plain", flash(SUM, R, R, SEQUENCE, SEQUENCE), (BY_HEADS,)),
    Mutant("another dim of logsumexp", FLASH, "plain", flash(HEADS, SEQUENCE, HEADS, HEADS, HEADS), (BY_BATCH,)),
    Mutant("width of the values lost", FLASH, "plain", flash(R, R, R, R, Shard(3)),
           (BY_HEADS,)),
    Mutant("softmax taken for linear", FLASH, "plain", flash(SUM, R, SUM, R, R), (BY_QUERIES,)),
    Mutant("queries of a causal mask", FLASH, CAUSAL, BY_QUERIES, (BY_BATCH,)),
    Mutant("heads of groups", FLASH, "groups of 4 heads", BY_HEADS, (BY_BATCH, BY_QUERIES)),
    Mutant("bias replicated", EFFICIENT, "bias", efficient(HEADS, HEADS, HEADS, HEADS, HEADS, R),
           (efficient(HEADS, HEADS, HEADS, HEADS, HEADS, HEADS),)),
    Mutant("gradient of keys not pending", FLASH_BACKWARD, "plain",
           backward((SEQUENCE, R, R), SEQUENCE, SEQUENCE, R, SEQUENCE),
           (backward((HEADS,) * 3, HEADS, HEADS, HEADS, HEADS),)),
    Mutant("gradient of values by batch", FLASH_BACKWARD, "plain",
           backward((HEADS, HEADS, BATCH), HEADS, HEADS, HEADS, HEADS),
           (backward((SEQUENCE, SUM, SUM), SEQUENCE, SEQUENCE, R, SEQUENCE),)),
    Mutant("logsumexp replicated", CUDNN_BACKWARD, "plain", backward((HEADS,) * 3, HEADS, HEADS, HEADS, R),
           (backward((BATCH,) * 3, BATCH, BATCH, BATCH, BATCH),)),
    Mutant("scale of rows replicated", "_scaled_mm.default", ROWS, [Shard(0), Shard(0), R, R, R],
           ([Shard(0), Shard(0), R, Shard(0), R], [Shard(1), R, Shard(1), R, Shard(1)])),
    Mutant("inner dim not pending", "_scaled_mm.default", ROWS, [R, Shard(1), Shard(0), R, R],
           ([Shard(0), Shard(0), R, Shard(0), R],)),
    Mutant("scale of blocks replicated", "_scaled_mm.default", BLOCKS, [SUM, Shard(1), Shard(0), R, R],
           ([Shard(0), Shard(0), R, Shard(0), R],)),
    Mutant("inner dim not pending", "_grouped_mm.default", MATRICES_3D, [R, Shard(2), Shard(1)],
           ([Shard(1), Shard(1), R], [Shard(0), Shard(0), Shard(0)])),
    Mutant("inner dim of groups", "_grouped_mm.default", MATRICES_2D, [SUM, Shard(1), Shard(0), R],
           ([Shard(1), Shard(0), R, R], [Shard(2), R, Shard(1), R])),
    Mutant("gradient of weights not pending", "_fused_rms_norm_backward.default", "with weight, 1 dims",
           [Shard(0), R, Shard(0), Shard(0), Shard(0), R], ([Shard(1), SUM, Shard(1), Shard(1), Shard(1), R],)),
)  # fmt: skip


def register(op: Any, rules: list[Rule]) -> None:
    """Tell DTensor of rules as torch does for attention, which has results that are no tensors."""

    def strategy(schema: OpSchema) -> OpStrategy:
        mesh = schema.get_mesh_from_args(validate=False)
        return expand_to_full_mesh_op_strategy(mesh, schema, rules, input_index=len(op._schema.returns))

    register_op_strategy(op)(strategy)


def text(op: Any, rule: Rule) -> str:
    """Return the input placements of a rule."""
    results = len(op._schema.returns)
    return ", ".join(str(placement) for placement in rule[results:])


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.op.partition('.')[0]}-{mutant.fault}")
def test_the_wrong_rule_is_accused_and_no_other(mutant: Mutant) -> None:
    op = getattr(aten, mutant.op.partition(".")[0]).default
    (sample,) = [
        one
        for one in handmade_samples(f"aten.{mutant.op}", SampleOptions())
        if one.origin.endswith(f", {mutant.label}")
    ]
    replicated: Rule = [None if placement is None else R for placement in mutant.wrong]
    with replaced_strategy(op):
        register(op, [replicated, *mutant.true, mutant.wrong])
        report = check_sample(sample, MESHES)
    assert {short(one.rule).partition(" -> ")[0] for one in report.wrong} == {text(op, mutant.wrong)}
    confirmed = {short(rule).partition(" -> ")[0] for rule in report.confirmed}
    assert {text(op, rule) for rule in mutant.true} <= confirmed
