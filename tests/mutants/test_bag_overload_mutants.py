"""Wrong rules for pooled bags, norms of rows and their gradients are accused at level 1, and true ones hold.

Torch has no rules for these overloads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from rule_mutants import short
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.opinfo.handmade import handmade_samples
from verifier.core.case import MeshSpec
from verifier.core.ops import resolve
from verifier.rules.check import check_sample
from verifier.rules.options import CheckOptions
from verifier.rules.samples import SampleOptions
from verifier.torch_internals.registries import replaced_strategy

OPTIONS = CheckOptions((MeshSpec((2,)),), sizes=1, claims_only=True, products=0, samples_called_again=0)
R, S0, S1, SUM, MAX = Replicate(), Shard(0), Shard(1), Partial("sum"), Partial("max")
RENORM = "embedding_renorm_.default"
BAG, INFERENCE = "_embedding_bag.default", "_embedding_bag_forward_only.default"
COMPOSITE, PADDED = "embedding_bag.default", "embedding_bag.padding_idx"
DENSE, TRAINED = "_embedding_bag_dense_backward.default", "_embedding_bag_backward.default"
SAMPLES = "_embedding_bag_per_sample_weights_backward.default"
LOOKUP = "embedding_backward.default"


@dataclass(frozen=True)
class Mutant:
    """A wrong rule on one mesh dim, results first, the call that shows it, and rules that hold for this call."""

    fault: str
    op: str
    label: str
    wrong: list[Placement]
    true: tuple[list[Placement], ...] = field(default=())


MUTANTS = (
    Mutant("norms of a rank's own columns", RENORM, "norm 2.0", [S1, S1, R]),
    Mutant("largest entry of a rank's own columns", RENORM, "norm inf", [S1, S1, R]),
    Mutant("only the rows that a rank looks up", RENORM, "norm 2.0", [R, R, S0]),
    Mutant("norms of parts of a sum", RENORM, "norm 1.0", [SUM, SUM, R]),
    Mutant("ids of all rows for a rank's own", RENORM, "ids of two dims", [S0, S0, R]),
    Mutant("norms out of place", "embedding_renorm.default", "norm 3.0", [S1, S1, R]),
    Mutant("winners of columns replicated", BAG, "max", [S1, R, R, R, S1, R, R]),
    Mutant("maxima of parts of a sum", INFERENCE, "max", [SUM, R, R, R, SUM, R, R]),
    Mutant("ids of all rows for a rank's own", BAG, "sum", [SUM, R, R, R, S0, R, R], ([SUM, R, R, R, SUM, R, R],)),
    Mutant("offsets without the next rank's", BAG, "mean, even bags", [S0, R, S0, R, R, R, S0]),
    Mutant(
        "weights and samples both partial", BAG, "sum, sample weights", [SUM, R, R, R, SUM, R, R, SUM],
        ([SUM, R, R, R, R, R, R, SUM], [SUM, R, R, R, SUM, R, R, R]),
    ),
    Mutant("columns not sharded", COMPOSITE, "mean", [R, R, R, R, S1, R, R]),
    Mutant("winners of columns replicated", PADDED, "max, padding", [S1, R, R, R, S1, R, R]),
    Mutant("gradients of positions not pending", DENSE, "sum", [R, R, S0, S0, R, R], ([SUM, SUM, R, R, R, R],)),
    Mutant("winners counted on every rank", DENSE, "max", [SUM, R, S0, S0, R, R], ([S1, S1, R, R, R, S1],)),
    Mutant(
        "rows of the batch", TRAINED, "sum, sample weights", [S0, R, S0, R, S0, R, R, S0],
        ([SUM, SUM, R, R, R, R, R, R],),
    ),
    Mutant("products of columns not pending", SAMPLES, "sum, padding", [R, S1, S1, R, R, R], ([S0, R, R, S0, R, S0],)),
    Mutant("frequencies of a rank's own ids", LOOKUP, "by frequency", [SUM, S0, S0], ([S1, S1, R],)),
    Mutant("parts of a batch not pending", LOOKUP, "padding", [R, S0, S0], ([SUM, SUM, R],)),
)  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: f"{one.op.partition('.')[0]}-{one.fault}")
def test_the_wrong_rule_is_accused_and_no_other(mutant: Mutant) -> None:
    name = f"aten.{mutant.op}"
    (sample,) = [one for one in handmade_samples(name, SampleOptions()) if one.origin == f"handmade, {mutant.label}"]
    op = resolve(f"torch.ops.{name}")
    with replaced_strategy(op, lambda *_: [*mutant.true, mutant.wrong]):
        report = check_sample(sample, OPTIONS)
    results = len(op._schema.returns)
    assert {short(one.rule) for one in report.wrong} == {text(mutant.wrong, results)}
    assert {text(rule, results) for rule in mutant.true} <= {short(rule) for rule in report.confirmed}


def text(rule: list[Placement], results: int) -> str:
    return f"{', '.join(map(str, rule[results:]))} -> {', '.join(map(str, rule[:results]))}"


@pytest.mark.parametrize("name", [RENORM, BAG, INFERENCE, COMPOSITE, PADDED, DENSE, TRAINED, SAMPLES, LOOKUP])
def test_calls_are_calls_of_the_op_at_every_size(name: str) -> None:
    op = resolve(f"torch.ops.aten.{name}")
    for sample in handmade_samples(f"aten.{name}", SampleOptions()):
        for size in range(SampleOptions().sizes):
            case = sample.draw(size, 0)
            assert case is not None
            args = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in case.args]
            op(*args, **case.kwargs)
