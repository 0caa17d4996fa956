"""The causes of the committed baseline explain torch's own defects on ranks, and no wrong rule of a user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import known_cause_mutants
import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch_versions import HERE, torch_is

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.findings.attribution import Attribution
from verifier.findings.failures import Failure
from verifier.gate.baseline import load_baseline
from verifier.gate.entries import Cause
from verifier.meshes.pool import Pool, PoolSet
from verifier.meshes.remedied import run_remedied
from verifier.meshes.tasks import Task
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.placements.parsing import parse_placements
from verifier.records.values import load_trial

pytestmark = pytest.mark.ranks

BASELINE = load_baseline(Path(__file__).resolve().parents[2] / "reports" / "baseline.toml")
MESH = MeshSpec((2,))


@pytest.fixture(scope="module")
def pools() -> Iterator[PoolSet]:
    """Ranks of this module alone, since they have wrong rules for a while."""
    pools = PoolSet(Pool)
    yield pools
    pools.close()


def scan(dim: int) -> Trial:
    case = OpCase("aten.cumsum.default", "torch.cumsum", (torch.arange(1.0, 9.0).view(2, 4), dim))
    return Trial(case, MESH, (parse_placements("S(1)"),))


def convolution(weight: str) -> Trial:
    generator = torch.Generator().manual_seed(0)
    shapes = (4, 1, 5, 5), (2, 1, 3, 3)
    tensors = [torch.randint(1, 4, shape, generator=generator).double().requires_grad_() for shape in shapes]
    case = OpCase("aten.convolution.default", "torch.nn.functional.conv2d", tuple(tensors))
    placements = parse_placements("S(0)"), parse_placements(weight)
    return Trial(case, MESH, placements, ((((Replicate(),),)),))


def images(placement: str, cotangent: str) -> Trial:
    """Return a convolution whose borders DTensor's handler can exchange, forward and backward."""
    generator = torch.Generator().manual_seed(1)
    shapes = (4, 2, 4, 6), (3, 2, 3, 3), (3,)
    tensors = [torch.randint(1, 4, shape, generator=generator).double().requires_grad_() for shape in shapes]
    options = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    case = OpCase("aten.convolution.default", "torch.ops.aten.convolution.default", (*tensors, *options))
    placements = tuple(map(parse_placements, (placement, "R", "R")))
    return Trial(case, MESH, placements, ((parse_placements(cotangent),),))


def search(sequence: str, sorter: str) -> Trial:
    """Return a search in a sequence that is sorted by the places which a keyword argument gives."""
    order = torch.tensor([3, 1, 2, 0, 4, 5])
    given = torch.empty(6, dtype=torch.float64)
    given[order] = torch.arange(0.0, 12.0, 2.0, dtype=torch.float64)
    name = "aten.searchsorted.Tensor"
    values = torch.tensor([1.0, 5.0, 9.0], dtype=torch.float64)
    case = OpCase(name, f"torch.ops.{name}", (given, values), {"sorter": order})
    return Trial(case, MESH, tuple(map(parse_placements, (sequence, "R", sorter))))


def explained(pools: PoolSet, trial: Trial) -> list[str]:
    """Return the causes that explain the failure of ``trial``."""
    observation = pools.run_alone(trial)
    failure = Failure(trial, observation, judge(observation, make_reference(trial.case)))
    assert failure.verdict.kind.bad, failure.verdict
    attribution = Attribution.of(BASELINE, lambda trial, remedies: run_remedied(pools, trial, remedies))
    return [cause.remedy for cause in attribution.explain(failure)]


BY_OTHER_TRIALS = {
    "casts-of-complex-parts", "dtypes-of-reductions-cached", "empty-lists-of-dims", "fills-that-round",
    "outputs-that-share-memory",
}  # fmt: skip
"""Causes whose smallest trial torch 2.14 and later refuses or runs rightly; trials of other ops show them there."""


@pytest.mark.parametrize("cause", [one for one in BASELINE.causes if one.mesh == str(MESH)], ids=lambda one: one.remedy)
def test_the_trial_of_a_cause_is_mended_by_its_remedy_alone(cause: Cause, pools: PoolSet) -> None:
    """A trial that another cause fails as well would leave the entry untested in every run."""
    trial = load_trial(cause.trial())
    observation = pools.run_alone(trial)
    failure = Failure(trial, observation, judge(observation, make_reference(trial.case)))
    attribution = Attribution.of(BASELINE, lambda trial, remedies: run_remedied(pools, trial, remedies))
    if HERE in cause.mended:
        assert failure.verdict.kind != cause.verdict, failure.verdict  # another defect may have taken its place
        return
    if cause.remedy in BY_OTHER_TRIALS and torch_is(">=2.14"):
        pytest.skip("torch 2.14 and later refuses this trial or runs it rightly; trials of other ops show the cause")
    assert failure.verdict.kind.bad, failure.verdict
    causes = [cause]
    if cause.remedy == "products-of-complex-parts" and torch_is(">=2.15"):  # what is right is refused by an assertion
        causes += [one for one in BASELINE.causes if one.remedy == "complex-reductions-that-assert"]
    assert attribution.is_mended(failure, causes)


def written_view() -> Trial:
    """Return a view of rows that do not end with the shards, which is then written to."""
    given = {"self": torch.arange(36.0, dtype=torch.float64).view(12, 3), "size": [6, -1, 3]}
    case = OpCase(
        "aten.view.default", "strategies.opinfo.programs.written_view", ("aten.view.default", "self", 3), given
    )
    return Trial(case, MeshSpec((2, 2)), (parse_placements("S(0),S(0)"),))


def test_a_view_that_is_refused_once_it_is_written_to_is_explained_by_both_causes(pools: PoolSet) -> None:
    assert explained(pools, written_view()) == ["local-sizes-of-views", "views-of-copies"]


@pytest.mark.parametrize("turned", [False, True], ids=["watched first", "watched last"])
def test_remedies_that_handle_one_op_are_in_force_together(turned: bool, pools: PoolSet) -> None:
    names = ["views-of-copies", "views-in-inference-mode", "local-sizes-of-views"]
    seen = judge(
        run_remedied(pools, written_view(), tuple(names[:: -1 if turned else 1])), make_reference(written_view().case)
    )
    assert "is not supported on a view of a redistributed tensor" in seen.message


def test_torch_s_own_defects_are_explained(pools: PoolSet) -> None:
    if torch_is("<2.14"):  # a later one gathers the dim of a scan however it is counted
        assert explained(pools, scan(-1)) == ["negative-dim-of-scans"]
    assert explained(pools, convolution("S(2)")) == ["convolution-handler"]
    nothing = torch.ones(2, 0, 1)
    for case in (
        OpCase("aten.amin.default", "torch.amin", (torch.ones(2, 1, 1), [2])),
        OpCase(
            "aten.amin.default", "torch.amin", (nothing, [2])
        ),  # nothing is in it, and one rank has no dim to reduce
    ):
        assert explained(pools, Trial(case, MESH, (parse_placements("S(2)"),))) == ["empty-shards"]
    for placement, cotangent in [("S(3)", "R"), ("S(3)", "S(3)"), ("S(1)", "S(0)"), ("P(sum)", "R")]:
        assert explained(pools, images(placement, cotangent)) == ["convolution-handler"]
    whole = images("S(1)", "R")
    nested = replace(
        whole,
        mesh=MeshSpec((2, 2)),
        cotangents=(((Shard(0), Partial()),),),
        combination=tuple(map(parse_placements, ("(S(0), R)", "(P(sum), S(0))", "(R, R)"))),
    )
    assert explained(pools, nested) == ["convolution-handler"]
    assert judge(pools.run_alone(scan(1)), make_reference(scan(1).case)).kind == "PASS"


@pytest.mark.parametrize(
    ("rules", "trial"),
    [
        (known_cause_mutants.scan_left_cut, scan(1)),
        (known_cause_mutants.scan_left_cut, scan(-1)),
        (known_cause_mutants.weight_gradient_replicated, convolution("R")),
        (known_cause_mutants.sorter_cut, search("S(0)", "S(0)")),
    ],
)
def test_a_wrong_rule_beside_a_known_cause_is_new(rules: Callable[[], None], trial: Trial, pools: PoolSet) -> None:
    with registered(rules, pools):
        assert explained(pools, trial) == []


def test_what_torch_leaves_undone_of_a_right_rule_of_the_user_s_is_explained(pools: PoolSet) -> None:
    """The rule asks for a replicated sorter, and torch redistributes no keyword arguments."""
    with registered(known_cause_mutants.sequence_cut, pools):
        assert explained(pools, search("R", "S(0)")) == ["keyword-tensors-not-redistributed"]


@contextmanager
def registered(rules: Callable[[], None], pools: PoolSet) -> Iterator[None]:
    def call(task: str, *args: str) -> None:
        outcome = pools.of(MESH).call(Task(f"rules_in_ranks.{task}", args, MESH))
        assert outcome.ok, outcome

    call("register", f"{rules.__module__}.{rules.__name__}")
    try:
        yield
    finally:
        call("take_back")


def test_a_gradient_that_the_handler_loses_is_a_crash_and_explained(pools: PoolSet) -> None:
    generator = torch.Generator().manual_seed(2)
    shapes = (4, 3, 4, 6), (4, 2, 4, 6), (3, 2, 3, 3)
    tensors = [torch.randint(1, 4, shape, generator=generator).double() for shape in shapes]
    options = ([3], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True])
    name = "aten.convolution_backward.default"
    case = OpCase(name, f"torch.ops.{name}", (*tensors, *options))
    trial = Trial(case, MESH, tuple(map(parse_placements, ("S(3)", "S(3)", "R"))))
    verdict = judge(pools.run_alone(trial), make_reference(case))
    assert (verdict.kind, verdict.phase) == ("CRASH", "forward")
    assert "returned 2 tensors, not 3" in verdict.message
    assert explained(pools, trial) == ["convolution-handler"]


BATCH, WIDTH = images("S(0)", "S(0)"), images("S(3)", "S(3)")


@pytest.mark.parametrize(
    ("trial", "function", "before", "after"),
    [
        (BATCH, "_requires_data_exchange", "dim_map[1:]", "dim_map"),
        (BATCH, "tp_convolution", "if not _requires", "if _requires"),
        (BATCH, "tp_convolution_backward", "if not _requires", "if _requires"),
        (BATCH, "convolution_backward_single_dim_strategy", "Partial('sum')", "Replicate()"),
        (BATCH, "convolution_backward_single_dim_strategy", "Partial('sum') if", "Replicate() if"),
        (BATCH, "convolution_single_dim_strategy", "_ShardingPlaceholder(0)", "_ShardingPlaceholder(1)"),
        (WIDTH, "tp_convolution", "weight.shape[-1] - 1", "weight.shape[-1] + 1"),
        (WIDTH, "tp_convolution", "d1 = d // 2", "d1 = d // 1"),
        (WIDTH, "tp_convolution", "padding_w:]", "0:]"),
        (WIDTH, "tp_convolution_backward", "weight.shape[3] - 1", "weight.shape[3] + 1"),
        (WIDTH, "tp_convolution_backward", "(0, padding_w)", "(padding_w, 0)"),
        (WIDTH, "_ring_send_recv_construct", "-d1:", ":d1"),
        (WIDTH, "_ring_send_recv_aggregate", "torch.add", "torch.sub"),
        (WIDTH, "convolution_rules", "input_spec.dim_map", "[-1, -1, -1, -1]"),
        (WIDTH, "convolution_backward_rules", "[0], tensor_meta=weight", "[], tensor_meta=weight"),
    ],
)
def test_a_wrong_convolution_beside_a_known_cause_is_new(
    trial: Trial, function: str, before: str, after: str, pools: PoolSet
) -> None:
    pool = pools.of(MESH)
    assert pool.call(Task("conv_mutants.edit", (function, before, after), MESH)).ok
    try:
        assert explained(pools, trial) == []
    finally:
        assert pool.call(Task("conv_mutants.restore", (), MESH)).ok


def test_a_complex_number_does_not_hide_what_else_mends_its_call(pools: PoolSet) -> None:
    """Once the rank without columns replicates, DTensor hashes the number; before, it asked a decomposition."""
    values = [torch.randint(1, 4, shape).to(torch.complex128) for shape in ((), (6, 4), (4,))]
    name = "aten.addmv.default"
    case = OpCase(name, f"torch.ops.{name}", tuple(values), {"beta": 0.5 - 1j, "alpha": 0.6})
    trial = Trial(case, MeshSpec((3,)), tuple(map(parse_placements, ("P(sum)", "S(1)", "S(0)"))))
    assert explained(pools, trial) == ["sums-of-nothing", "complex-numbers-hashed"]
