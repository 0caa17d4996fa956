"""Rules that only chains show to be wrong are caught, and no remedy explains them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chain_mutants
import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch_versions import torch_is

from strategies.chains.programs import CHAIN
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.verdict import VerdictKind
from verifier.findings.attribution import Attribution
from verifier.findings.failures import Failure
from verifier.gate.baseline import load_baseline
from verifier.meshes.pool import Pool, PoolSet
from verifier.meshes.remedied import run_remedied
from verifier.meshes.tasks import Task
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.torch_internals.placements import Placements

MESH = MeshSpec((2,))
BASELINE = load_baseline(Path(__file__).resolve().parents[2] / "reports" / "baseline.toml")
TABLE = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(4, 3)
LOOKUP = ["step1", "torch.ops.aten.embedding.default", ["x", "y", -1], {}]
COPY = ["step1", "torch.ops.aten.clone.default", ["x"], {}]

CHAINS: dict[Callable[[], None], tuple[list[list[Any]], dict[str, torch.Tensor], list[Placements]]] = {
    chain_mutants.norms_negated: (
        [
            ["step1", "torch.ops.aten.linalg_vector_norm.default", ["x", 2, [0]], {}],
            ["step2", "torch.ops.aten.neg.default", ["step1"], {}],
        ],
        {"x": TABLE},
        [(Shard(0),)],
    ),
    chain_mutants.masks_left_behind: (
        [LOOKUP, ["step2", "torch.ops.aten.flip.default", ["step1", [0]], {}]],
        {"x": TABLE, "y": torch.tensor([3, 0, 1])},
        [(Shard(0),), (Replicate(),)],
    ),
    chain_mutants.slices_of_copies: (
        [
            COPY,
            ["step2", "torch.ops.aten.slice.Tensor", ["step1", 1, 0, 2], {}],
            ["step3", "torch.ops.aten.mul_.Scalar", ["step2", 3], {}],
            ["step4", "torch.ops.aten.mul.Scalar", ["step1", 2], {}],
        ],
        {"x": TABLE},
        [(Shard(0),)],
    ),
}
"""For each mutant the steps, the tensors and the placements of a chain that shows it."""

SINGLE: dict[Callable[[], None], tuple[str, tuple[object, ...]]] = {
    chain_mutants.norms_negated: ("aten.neg.default", (TABLE,)),
    chain_mutants.masks_left_behind: ("aten.flip.default", (TABLE, [0])),
    chain_mutants.slices_of_copies: ("aten.slice.Tensor", (TABLE, 1, 0, 2)),
}


@pytest.fixture(scope="module")
def pools() -> Iterator[PoolSet]:
    pools = PoolSet(Pool)
    yield pools
    pools.close()


def run(pools: PoolSet, trial: Trial) -> Failure:
    observation = pools.run_alone(trial)
    return Failure(trial, observation, judge(observation, make_reference(trial.case)))


@pytest.mark.parametrize("mutant", CHAINS, ids=lambda mutant: mutant.__name__)
def test_a_wrong_rule_is_seen_in_a_chain_alone_and_is_new(mutant: Callable[[], None], pools: PoolSet) -> None:
    def call(task: str, *args: str) -> None:
        outcome = pools.of(MESH).call(Task(f"rules_in_ranks.{task}", args, MESH))
        assert outcome.ok, outcome

    steps, tensors, placements = CHAINS[mutant]
    chain = Trial(OpCase("chain.given", CHAIN, (steps,), tensors, "chains", False), MESH, tuple(placements))
    op, args = SINGLE[mutant]
    alone = OpCase(op, f"torch.ops.{op}", args)
    assert run(pools, chain).verdict.kind is VerdictKind.PASS
    call("register", f"{mutant.__module__}.{mutant.__name__}")
    try:
        for placement in (Replicate(), Shard(0), Shard(1), Partial(), Partial("avg"), Partial("max"), Partial("min")):
            assert run(pools, Trial(alone, MESH, ((placement,),))).verdict.kind is VerdictKind.PASS
        failure = run(pools, chain)
        assert failure.verdict.kind is VerdictKind.WRONG_VALUE
        attribution = Attribution.of(BASELINE, lambda trial, remedies: run_remedied(pools, trial, remedies))
        assert attribution.explain(failure) == ()
    finally:
        call("take_back")


LONE = torch.tensor([[1.0, 2.0], [3.0, 4.0], [float("nan"), 6.0]], dtype=torch.float64)
LARGE = torch.tensor([[300.0], [400.0], [500.0]], dtype=torch.float16)


BESIDE: dict[Callable[[], None], tuple[str, list[Any], torch.Tensor, str]] = {
    chain_mutants.largest_is_smallest: ("torch.amax", [[0]], LONE, "nan-lost-in-extremes"),
    chain_mutants.norms_are_added: ("torch.linalg.vector_norm", [2, [0]], LARGE, "norms-of-16-bits"),
}
"""For each mutant a call that a known cause fails as well, and its remedy."""


@pytest.mark.parametrize("mutant", BESIDE, ids=lambda mutant: mutant.__name__)
def test_values_that_only_a_collective_loses_are_explained_and_a_wrong_rule_beside_them_is_new(
    mutant: Callable[[], None], pools: PoolSet
) -> None:
    path, rest, tensor, remedy = BESIDE[mutant]

    def call(task: str, *args: str) -> None:
        outcome = pools.of(MESH).call(Task(f"rules_in_ranks.{task}", args, MESH))
        assert outcome.ok, outcome

    case = OpCase("chain.given", CHAIN, ([["step1", path, ["x", *rest], {}]],), {"x": tensor}, "chains", False)
    attribution = Attribution.of(BASELINE, lambda trial, remedies: run_remedied(pools, trial, remedies))
    trial = Trial(case, MESH, ((Shard(0),),))
    failure = run(pools, trial)
    assert failure.verdict.kind is VerdictKind.WRONG_VALUE
    assert [cause.remedy for cause in attribution.explain(failure)] == [remedy]
    call("register", f"{mutant.__module__}.{mutant.__name__}")
    try:
        failure = run(pools, trial)
        assert failure.verdict.kind is VerdictKind.WRONG_VALUE
        assert attribution.explain(failure) == ()
    finally:
        call("take_back")


MASKS_REDUCED = {"<2.14": VerdictKind.CRASH, ">=2.14": VerdictKind.PASS}
"""Until 2.13 these ops pass a masked result through as any pending sum; later ones have it reduced first."""


@pytest.mark.parametrize(
    ("step", "kinds"),
    [
        (("torch.tile", ["step1", [2, 2]]), {"": VerdictKind.CRASH}),
        (("torch.ops.aten.select.int", ["step1", 0, 1]), MASKS_REDUCED),
        (("torch.stack", [["step1"]]), {"": VerdictKind.CRASH}),
        (("torch.unbind", ["step1"]), {"<2.15": VerdictKind.CRASH, ">=2.15": VerdictKind.UNSUPPORTED}),
        (("torch.ops.aten.sum.dim_IntList", ["step1", [0]]), MASKS_REDUCED),
        (("torch.nansum", ["step1", 0]), MASKS_REDUCED),
        (("torch.any", ["step1"]), MASKS_REDUCED),
    ],
)
def test_a_mask_that_no_longer_fits_is_one_cause(
    step: tuple[str, list[Any]], kinds: dict[str, VerdictKind], pools: PoolSet
) -> None:
    """``kinds`` has the verdict under the versions that a key names."""
    steps = [LOOKUP, ["step2", *step, {}]]
    tall = torch.arange(1.0, 31.0, dtype=torch.float64).reshape(10, 3)  # to replicate it would be dear
    tensors = {"x": tall, "y": torch.tensor([7, 2])}
    failure = run(
        pools,
        Trial(OpCase("chain.lookup", CHAIN, (steps,), tensors, "chains", False), MESH, ((Shard(0),), (Replicate(),))),
    )
    (kind,) = (kind for versions, kind in kinds.items() if torch_is(versions))
    assert failure.verdict.kind is kind
    if not kind.bad:
        return
    attribution = Attribution.of(BASELINE, lambda trial, remedies: run_remedied(pools, trial, remedies))
    assert [cause.remedy for cause in attribution.explain(failure)] == ["masks-of-views"]


def test_what_is_written_to_the_base_of_a_copy_is_the_same_cause_as_what_is_written_to_the_view(pools: PoolSet) -> None:
    steps = [
        COPY,
        ["step2", "torch.ops.aten.tensor_split.sections", ["step1", 3, 1], {}],
        ["step3", "torch.ops.aten.add_.Scalar", ["step1", 5], {}],
    ]
    failure = run(
        pools, Trial(OpCase("chain.given", CHAIN, (steps,), {"x": TABLE}, "chains", False), MESH, ((Shard(1),),))
    )
    assert failure.verdict.kind is VerdictKind.WRONG_VALUE
    attribution = Attribution.of(BASELINE, lambda trial, remedies: run_remedied(pools, trial, remedies))
    assert [cause.remedy for cause in attribution.explain(failure)] == ["views-of-copies"]


def test_under_its_remedy_what_a_formula_writes_to_a_view_of_a_pending_gradient_reaches_the_gradient(
    pools: PoolSet,
) -> None:
    """Without the remedy the backward pass raises; if the write got lost, the gradient would be wrong."""
    steps = [
        COPY,
        ["step2", "torch.ops.aten.slice.Tensor", ["step1", 1, 0, 2], {}],
        ["step3", "torch.ops.aten.fill_.Scalar", ["step2", 6], {}],
        ["step4", "torch.ops.aten.mul.Scalar", ["step1", 2], {}],
    ]
    case = OpCase("chain.given", CHAIN, (steps,), {"x": TABLE.clone().requires_grad_()}, "chains", False)
    cotangents = ((Replicate(), Shard(0)), (Partial(), Replicate()))
    failure = run(pools, Trial(case, MeshSpec((2, 2)), ((Replicate(), Replicate()),), (cotangents,)))
    if torch_is(">=2.14"):  # a later one runs it rightly
        assert failure.verdict.kind is VerdictKind.PASS
        return
    assert failure.verdict.kind is VerdictKind.CRASH
    attribution = Attribution.of(BASELINE, lambda trial, remedies: run_remedied(pools, trial, remedies))
    assert [cause.remedy for cause in attribution.explain(failure)] == ["pending-gradients-written-to"]


def test_every_mutant_is_tried() -> None:
    own = {f for name, f in vars(chain_mutants).items() if callable(f) and name[0] != "_"}
    assert {f for f in own if f.__module__ == chain_mutants.__name__} == {*CHAINS, *BESIDE}
    assert {*CHAINS} == {*SINGLE}
