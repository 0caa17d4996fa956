"""What changes weights under ``fully_shard`` between passes is seen, and mended by its remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sharding_mutants
import torch
from torch.distributed.tensor import Replicate
from torch_versions import mended_here

from strategies.chains.sharding import weights
from strategies.remedies.interfaces import sharding
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.verdict import VerdictKind
from verifier.meshes.pool import PoolSet
from verifier.meshes.remedied import run_remedied
from verifier.meshes.tasks import Task
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge

NUMBERS = torch.arange(20.0, dtype=torch.float64).reshape(5, 4) % 7 - 3
LOW = [torch.bfloat16, torch.float32]
TWO, FOUR, SQUARE = MeshSpec((2,)), MeshSpec((4,)), MeshSpec((2, 2))
Program = Callable[..., Any]

MUTANTS: dict[Callable[[], None], tuple[Program, tuple[object, ...]]] = {
    sharding_mutants.divisors_forgotten: (weights.changed, ({}, ["halve", "train"])),
    sharding_mutants.shared_gradients_not_reduced: (weights.across, ([], [[3.0, 1.0]])),
}
"""For each mutant a program and its arguments."""


def trial_of(
    program: Program, args: tuple[object, ...], mesh: MeshSpec = TWO, rows: int = 5, low: bool = False
) -> Trial:
    given = {"x": NUMBERS} if program is weights.across else {"x": NUMBERS, "y": -NUMBERS[:rows]}
    if low:
        given = {name: tensor.float() for name, tensor in given.items()}
    case = OpCase("composite.given", f"{program.__module__}.{program.__name__}", args, given, "chains", False)
    return Trial(case, mesh, ((Replicate(),) * mesh.ndim,) * len(given))


@pytest.mark.ranks
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_wrong_fully_shard_is_seen_whatever_is_mended(mutant: Callable[[], None], pools_of_mutants: PoolSet) -> None:
    trial = trial_of(*MUTANTS[mutant])
    assert judge(pools_of_mutants.run_alone(trial), make_reference(trial.case)).kind is VerdictKind.PASS
    outcome = pools_of_mutants.of(TWO).call(
        Task("rules_in_ranks.register", (f"{mutant.__module__}.{mutant.__name__}",), TWO)
    )
    assert outcome.ok, outcome
    for remedies in ((), tuple(remedy.name for remedy in sharding.REMEDIES)):
        verdict = judge(run_remedied(pools_of_mutants, trial, remedies), make_reference(trial.case))
        assert verdict.kind is VerdictKind.WRONG_VALUE, remedies


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("remedy", "trial", "wrong"),
    [
        (
            "gradients-that-are-not-taken-back",
            trial_of(weights.changed, ({"hybrid": True}, ["wait", "zero", "train"])),
            VerdictKind.WRONG_VALUE,
        ),
        (
            "gradients-divided-twice",
            trial_of(weights.changed, ({"hybrid": True, "apart": True}, ["train", "halve", "train"])),
            VerdictKind.WRONG_VALUE,
        ),
        (
            "hooks-of-sharded-parameters",
            trial_of(weights.changed, ({"apart": True}, ["train", "hook", "wait", "train"])),
            VerdictKind.WRONG_VALUE,
        ),
        (
            "dtypes-of-gradients-lost",
            trial_of(weights.changed, ({"precise": True}, ["wait", "train"]), low=True),
            VerdictKind.WRONG_DTYPE,
        ),
        (
            "weights-written-in-the-forward-pass",
            trial_of(weights.changed, ({"written": True, "dim": 1}, ["train"])),
            VerdictKind.WRONG_VALUE,
        ),
        (
            "gathered-weights-of-another-dtype",
            trial_of(weights.changed, ({}, ["train", "float", "train"])),
            VerdictKind.CRASH,
        ),
        (
            "rows-after-the-forward-pass",
            trial_of(weights.changed, ({"fewer": True}, ["train", "shown", "train"]), FOUR),
            VerdictKind.WRONG_VALUE,
        ),
        (
            "rows-after-the-forward-pass",
            trial_of(weights.changed, ({"fewer": True, "dim": 1}, ["shown"]), FOUR),
            VerdictKind.CRASH,
        ),
        (
            "weights-gathered-before-a-step",
            trial_of(weights.changed, ({"hybrid": True}, ["train", "shown", "step", "shown"])),
            VerdictKind.WRONG_VALUE,
        ),
        (
            "gradients-without-elements",
            trial_of(weights.changed, ({"apart": True}, ["train"]), rows=0),
            VerdictKind.CRASH,
        ),
        (
            "gradients-of-two-dtypes",
            trial_of(weights.across, (LOW, [[256.0, 1.0], [-256.0]])),
            VerdictKind.WRONG_VALUE,
        ),
        (
            "gradients-of-two-dtypes",
            trial_of(weights.across, (LOW, [[-512.0, 3.0], [512.0]]), SQUARE),
            VerdictKind.WRONG_VALUE,
        ),
    ],
)
def test_what_fully_shard_itself_does_wrong_is_seen_and_mended(
    remedy: str, trial: Trial, wrong: VerdictKind, pools: PoolSet
) -> None:
    kind = judge(run_remedied(pools, trial, ()), make_reference(trial.case)).kind
    assert kind is (VerdictKind.PASS if remedy in mended_here() else wrong)
    assert judge(run_remedied(pools, trial, (remedy,)), make_reference(trial.case)).kind is VerdictKind.PASS


@pytest.mark.ranks
def test_two_remedies_go_together_where_fewer_ranks_shard_columns(pools: PoolSet) -> None:
    trial = trial_of(weights.changed, ({"fewer": True, "dim": 1}, ["shown", "train"]), FOUR)
    remedies = ("rows-after-the-forward-pass", "columns-of-fewer-ranks")
    kinds = [
        judge(run_remedied(pools, trial, names), make_reference(trial.case)).kind for names in (remedies[:1], remedies)
    ]
    assert kinds == [VerdictKind.CRASH, VerdictKind.PASS]


def test_every_mutant_is_tried() -> None:
    own = {f for name, f in vars(sharding_mutants).items() if callable(f) and name[0] != "_"}
    assert {f for f in own if f.__module__ == sharding_mutants.__name__} == {*MUTANTS}
