"""What becomes of a trial does not depend on earlier trials; where DTensor makes it depend, that is the finding."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from verifier.campaign.history import Answer, Past
from verifier.campaign.investigation import Investigation
from verifier.campaign.outcomes import Outcomes
from verifier.campaign.request import Request, make_plan
from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.observation import Observation
from verifier.core.verdict import Verdict, VerdictKind
from verifier.events import FindingReported
from verifier.gate.baseline import Baseline
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.records.schema import FindingRecord
from verifier.records.values import load_trial
from verifier.torch_internals.recording import forget_calls

MESH = MeshSpec((2,))
HELPERS = Path(__file__).resolve().parents[1] / "helpers"
X = torch.tensor([2.0, 3.0, 1.0, 1.0, -1.0], dtype=torch.float64)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(PoolKey.of(MESH), trial_limit=60.0) as pool:
        yield pool


def trial(call: str, *args: object, tensors: int = 1) -> Trial:
    op = call.removeprefix("torch.ops.")
    family = "opinfo" if op != call else ""
    return Trial(OpCase(op, call, args, family=family, exact=True), MESH, ((Replicate(),),) * tensors)


def verdict(observation: Observation) -> Verdict:
    return judge(observation, make_reference(observation.trial.case))


def histogram(bins: int) -> Trial:
    return trial("torch.ops.aten.histc.default", X, bins, 0, 10)


# ----------------------------------------------------------------------------------------------- what DTensor remembers
def investigated(pool: Pool, known: bool) -> FindingRecord:
    """Return the finding of a histogram of 3 bins that failed, in a run that has the trial before it, or has not."""
    plan = make_plan(Request(["aten.histc.default"], ["2"]), Baseline())
    told: list[FindingReported] = []
    outcomes = Outcomes(lambda event: None)

    def run(one: Trial) -> Observation:
        (observation,) = pool.run([one], fresh=True)
        return observation

    def tell(event: object) -> None:
        if isinstance(event, FindingReported):
            told.append(event)

    observations = list(pool.run([histogram(100), histogram(3)], fresh=True))
    assert [verdict(one).kind for one in observations] == [VerdictKind.PASS, VerdictKind.WRONG_SHAPE]
    for observation in observations[0 if known else 1 :]:
        outcomes.take(Answer("", observation))
    assert verdict(run(observations[1].trial)).kind is VerdictKind.PASS  # by itself it is right
    Investigation(plan, Past(), outcomes, run, tell).investigate()
    (reported,) = told
    return reported.finding


def test_what_only_an_earlier_call_makes_fail_becomes_a_finding_of_both(pool: Pool) -> None:
    """The key of DTensor's cache has only what comes after the bins of ``histc`` (torch 2.13.0)."""
    found = investigated(pool, known=True)
    assert (found.confirmed.text, found.script_status) == ("confirmed on gloo, 2 ranks", "fails as described")
    assert (
        "likely: does DTensor take both calls for one, because the key of its cache leaves out bins?" in found.message
    )
    assert load_trial(found.trial).case.args == ("aten.histc.default", [["bins", 3]])


def test_without_a_call_before_it_that_explains_it_a_failure_is_unconfirmed(pool: Pool) -> None:
    found = investigated(pool, known=False)
    assert found.confirmed.unsure
    assert not found.minimised


def caches() -> Iterator[functools._lru_cache_wrapper[object]]:
    """Yield each cache that a module of DTensor's, or a class of it, has from functools."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor"):
            classes = [one for one in vars(module).values() if inspect.isclass(one) and one.__module__ == name]
            for owner in (module, *classes):
                for value in vars(owner).values():
                    if isinstance(value, functools._lru_cache_wrapper) and value.__module__ == name:
                        yield value


def test_nothing_is_left_in_a_cache_of_dtensors_once_calls_are_forgotten() -> None:
    """Whichever caches there are: those of a later torch count as well."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    names = {f"{one.__module__.rpartition('.')[2]}.{one.__name__}" for one in caches()}
    assert {"_redistribute._gen_transform_infos", "_sharding_prop._propagate_tensor_meta_cached"} <= names
    world = FakeStore()
    dist.init_process_group("fake", store=world, rank=0, world_size=2)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        placed = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)], run_check=False)
        (placed + placed).redistribute(mesh, [Replicate()])
    finally:
        dist.destroy_process_group()
    assert sum(one.cache_info().currsize for one in caches())
    forget_calls()
    assert [f"{one.__module__}.{one.__qualname__}" for one in caches() if one.cache_info().currsize] == []
    assert propagator.propagate_op_sharding.cache_info().currsize == 0


# -------------------------------------------------------------------------------------------------------------- mutants
def test_random_numbers_that_one_rank_has_drawn_are_of_its_trial_alone(pool: Pool) -> None:
    drawing = trial("state_programs.draws_on_the_first_rank", X)
    apart = trial("state_programs.adds_how_far_draws_are_apart", X)
    assert [verdict(o).kind for o in pool.run([drawing, apart, apart], fresh=True)] == [VerdictKind.PASS] * 3


@pytest.mark.ranks
def test_a_trial_that_changes_what_the_next_ones_begin_with_is_an_error() -> None:
    """Were pieces of a case's values not copied, as here, a call in place would write to them."""
    mesh = MeshSpec((1,))
    written = replace(trial("torch.ops.aten.add_.Scalar", X.clone(), 1.0), mesh=mesh)
    with Pool(PoolKey.of(mesh), imports=(str(HELPERS / "converter_that_copies_nothing.py"),), trial_limit=60.0) as pool:
        (observation,) = pool.run([written])
    seen = verdict(observation)
    assert seen.kind is VerdictKind.TOOL_ERROR
    assert "wrote to values of its case" in seen.message
