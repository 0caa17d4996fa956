"""Wrong styles, rules of users and state dicts are caught by the programs that use them, and torch's own are mended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import style_mutants
import torch
from torch.distributed.tensor import Replicate, Shard
from torch_versions import mended_here

from strategies.chains import entry_points, handing_over, parallel, second_gradients, styles
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.verdict import VerdictKind
from verifier.execution.remedies import installed_remedies
from verifier.meshes.pool import PoolSet
from verifier.meshes.remedied import run_remedied
from verifier.meshes.tasks import Task
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.torch_internals.placements import strided_shard

MESH = MeshSpec((2,))
SQUARE = torch.arange(1.0, 17.0, dtype=torch.float64).reshape(4, 4)
OUTPUTS = {"output_layouts": [Replicate()] * 2, "desired_output_layouts": [Shard(0)] * 2, "use_local_output": False}
BY_KEYWORD = {"input_kwarg_layouts": {"input": Replicate()}, "desired_input_kwarg_layouts": {"input": Shard(0)}}
KEPT = {"use_local_output": False}
LAYERS = {"0": ["ColwiseParallel", KEPT], "1": ["RowwiseParallel", {**KEPT, "output_layouts": Replicate()}]}
Program = Callable[..., Any]

MUTANTS: dict[Callable[[], None], tuple[Program, tuple[object, ...], int]] = {
    style_mutants.inputs_by_keyword_forgotten: (styles.called_by_keyword, ("PrepareModuleInput", BY_KEYWORD), 1),
    style_mutants.inputs_negated: (
        styles.laid_out_otherwise,
        ("PrepareModuleInput", Shard(0), Replicate(), Shard(0), True),
        1,
    ),
    style_mutants.buffers_of_modules_doubled: (styles.distributed_module, ("plain", True), 1),
    style_mutants.products_mapped_twice: (styles.mapped, ("list", [Shard(0)]), 2),
    style_mutants.sums_registered_as_averages: (styles.registered, ("int", 0, 1), 1),
    style_mutants.exponentials_forgotten: (styles.asked_for_explicitly, ("torch.exp", []), 1),
    style_mutants.state_dicts_negated: (handing_over.loaded, (False, [Shard(0)]), 1),
    style_mutants.cosines_forgotten: (second_gradients.transformed, ("grad", "torch.sin", []), 1),
    style_mutants.wholes_negated: (parallel.miscounted, ("distribute_tensor", 1), 1),
}
"""For each mutant a program, its arguments and the number of its tensors."""
BESIDE = (parallel.beside_the_mesh, ("torch.exp", []), 1)


def trial_of(program: Program, args: tuple[object, ...], tensors: int = 1) -> Trial:
    given = dict.fromkeys("xy"[:tensors], SQUARE / 16)
    case = OpCase("composite.given", f"{program.__module__}.{program.__name__}", args, given, "chains", False)
    return Trial(case, MESH, tuple((Shard(0),) for _ in given))


@pytest.mark.ranks
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_wrong_style_is_seen(mutant: Callable[[], None], pools_of_mutants: PoolSet) -> None:
    trials = [trial_of(*MUTANTS[mutant])]
    trials += [trial_of(*BESIDE)] if mutant is style_mutants.exponentials_forgotten else []
    for trial in trials:
        assert judge(pools_of_mutants.run_alone(trial), make_reference(trial.case)).kind is VerdictKind.PASS
    outcome = pools_of_mutants.of(MESH).call(
        Task("rules_in_ranks.register", (f"{mutant.__module__}.{mutant.__name__}",), MESH)
    )
    assert outcome.ok, outcome
    for trial in trials:
        assert judge(pools_of_mutants.run_alone(trial), make_reference(trial.case)).kind is VerdictKind.WRONG_VALUE


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("remedies", "program", "args", "wrong"),
    [
        (
            ("layouts-taken-for-granted",),
            styles.laid_out_otherwise,
            ("PrepareModuleInput", Replicate(), Replicate(), Shard(0), True),
            VerdictKind.CRASH,
        ),
        (
            ("layouts-taken-for-granted",),
            styles.laid_out_otherwise,
            ("PrepareModuleOutput", Shard(1), Shard(1), Shard(0), True),
            VerdictKind.CRASH,
        ),
        (("lists-of-outputs",), styles.called_by_keyword, ("list", OUTPUTS), VerdictKind.CRASH),
        (("lists-of-outputs",), styles.called_by_keyword, ("named", OUTPUTS), VerdictKind.CRASH),
        (
            ("inputs-by-keyword",),
            styles.called_by_keyword,
            ("ColwiseParallel", {"output_layouts": Replicate()}),
            VerdictKind.CRASH,
        ),
        (("ties-that-come-apart",), styles.distributed_module, ("tied", True), VerdictKind.WRONG_VALUE),
        (("ties-that-come-apart",), styles.distributed_module, ("tied", False), VerdictKind.WRONG_VALUE),
        (("styles-of-nested-modules",), entry_points.styled, ("parametrized", LAYERS, [4, 4]), VerdictKind.CRASH),
        (("styles-of-nested-modules",), entry_points.styled, ("adapted", LAYERS, [4, 4]), VerdictKind.CRASH),
        (
            ("states-without-tensors",),
            handing_over.restored,
            ({"full_state_dict": True}, True, [Shard(0)], False, 0.0),
            VerdictKind.CRASH,
        ),
        (
            ("states-without-tensors", "flat-states-of-optimisers"),
            handing_over.restored,
            ({"full_state_dict": True, "flatten_optimizer_state_dict": True}, False, [Shard(1)], False, 0.0),
            VerdictKind.CRASH,
        ),
        (("registered-rules-not-asked",), styles.registered, ("first", 0, 1), VerdictKind.CRASH),
        (("registered-rules-not-asked",), styles.registered, ("later", 0, 1), VerdictKind.CRASH),
        (
            ("arguments-of-registered-rules-cached",),
            styles.registered,
            ("int[]", [0], [1]),
            VerdictKind.WRONG_SHAPE,
        ),
        (("argmax-handler",), styles.asked_for_explicitly, ("torch.argmax", []), VerdictKind.CRASH),
        (("placements-not-counted",), parallel.miscounted, ("redistribute", 1), VerdictKind.CRASH),
        (("placements-not-counted",), parallel.miscounted, ("from_local", -1), VerdictKind.CRASH),
        (("handlers-beside-the-mesh",), parallel.beside_the_mesh, ("torch.argmax", []), VerdictKind.CRASH),
        (
            ("pending-results-stored",),
            handing_over.stored,
            ("weights", "torch.linalg.vector_norm", []),
            VerdictKind.CRASH,
        ),
        (("pending-results-stored",), handing_over.stored, ("pickle", "embedding", [0, 1, 1]), VerdictKind.CRASH),
        (
            ("state-dicts-of-strided-shards",),
            handing_over.loaded,
            (False, [strided_shard(0, 2)]),
            VerdictKind.WRONG_VALUE,
        ),
        (
            tuple(installed_remedies()),
            second_gradients.transformed,
            ("hessian", "torch.sin", []),
            VerdictKind.CRASH,
        ),
    ],
)
def test_what_torch_itself_does_wrong_is_seen_and_mended(
    remedies: tuple[str, ...], program: Program, args: tuple[object, ...], wrong: VerdictKind, pools: PoolSet
) -> None:
    trial = trial_of(program, args)
    kind = judge(run_remedied(pools, trial, ()), make_reference(trial.case)).kind
    assert kind is (VerdictKind.PASS if mended_here().issuperset(remedies) else wrong)
    assert not judge(run_remedied(pools, trial, remedies), make_reference(trial.case)).kind.bad


@pytest.mark.ranks
def test_placements_in_a_tuple_are_seen_and_taken(pools: PoolSet) -> None:
    trial = trial_of(styles.mapped, ("tuple", [Shard(0)]), 2)
    assert judge(run_remedied(pools, trial, ()), make_reference(trial.case)).kind is VerdictKind.CRASH
    mended = run_remedied(pools, trial, ("tuples-of-placements",))
    assert judge(mended, make_reference(trial.case)).kind is VerdictKind.PASS
