"""What makes our own strategy of embeddings wrong is caught, by the right verdict; what it is made from passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import embedding_strategy_mutants as mutants
import pytest
import torch
from embedding_strategy_calls import FEW_ROWS, GRADIENTS, MUTANTS, run
from rule_mutants import check, short
from torch.distributed.tensor import Shard

from strategies.embedding.sharding import GRADIENT, LOOKUP
from strategies.fill_rules import FILLING_OPS
from verifier.calls.result import Crash
from verifier.calls.verifier import Verifier
from verifier.core.verdict import VerdictKind
from verifier.torch_internals.registries import has_own_handler, replaced_sharded_op

FILL, _, MASKED, _ = FILLING_OPS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutant_is_caught(verify: Verifier, mutant: Callable[..., torch.Tensor]) -> None:
    call, expected = MUTANTS[mutant]
    with pytest.raises(expected):
        run(verify, mutant, call)
    true = mutants.true_gradient if call[0][0] is GRADIENTS else mutants.true_lookup
    assert run(verify, true, call) == {VerdictKind.PASS: 1}


def test_a_rank_without_rows(verify: Verifier) -> None:
    assert run(verify, mutants.true_lookup, FEW_ROWS) == {VerdictKind.PASS: 1}
    with pytest.raises(Crash, match="index_select"):
        run(verify, mutants.ids_unchecked, FEW_ROWS)


def test_every_mutant_is_tried() -> None:
    functions = {f for name, f in vars(mutants).items() if callable(f) and name.islower() and name[0] != "_"}
    own = {f for f in functions if getattr(f, "__module__", "") == mutants.__name__}
    assert own == set(MUTANTS) | {mutants.true_lookup, mutants.true_gradient}


# ------------------------------------------------------------------------------------------------------------- level 1
def test_rule_check_runs_the_kernel() -> None:
    with replaced_sharded_op(LOOKUP):
        assert not has_own_handler(LOOKUP.op)
        reports = check("aten.embedding.default", 1, claims_only=True)
    confirmed = {short(rule) for report in reports for rule in report.confirmed}
    assert {"S(0), R -> P(sum)", "(S(0), S(0)), (R, R) -> (P(sum), P(sum))"} <= confirmed
    assert not [wrong for report in reports for wrong in report.wrong]


@pytest.mark.parametrize(
    ("sharded", "accused"),
    [
        (replace(LOOKUP, kernel=mutants._foreign_rows_kept), "S(0), R -> P(sum)"),
        (replace(LOOKUP, kernel=mutants._one_mesh_dim), "(S(0), S(0)), (R, R) -> (P(sum), P(sum))"),
        (replace(GRADIENT, rules=lambda *_: [[Shard(0), Shard(0), Shard(0)]]), "S(0), S(0) -> S(0)"),
        (replace(FILL, kernel=lambda view, tensor, value: tensor.fill_(value)), "P(sum) -> P(sum)"),
        (replace(MASKED, kernel=lambda view, tensor, *rest: tensor.masked_fill_(*rest)), "P(sum), R -> P(sum)"),
    ],
    ids=[
        "foreign rows kept",
        "rows by one mesh dim",
        "gradient cut by rows",
        "filled on each rank",
        "filled by a mask",
    ],
)
def test_rule_check_accuses_a_wrong_kernel_or_rule(sharded: mutants.ShardedOp, accused: str) -> None:
    with replaced_sharded_op(sharded):
        reports = check(str(sharded.op), 1, claims_only=True)
    assert accused in {short(wrong.rule) for report in reports for wrong in report.wrong}


@pytest.mark.parametrize("sharded", [FILL, MASKED], ids=lambda sharded: str(sharded.op))
def test_what_is_filled_in_place_is_right_of_every_kind_of_partial(sharded: mutants.ShardedOp) -> None:
    with replaced_sharded_op(sharded):
        reports = check(str(sharded.op), 8, claims_only=True)
    confirmed = {short(rule).split(",")[0].split(" ")[0] for report in reports for rule in report.confirmed}
    assert {"S(0)", "P(sum)", "P(avg)", "P(max)", "P(min)", "P(product)"} <= confirmed
    assert not [wrong for report in reports for wrong in report.wrong]
