"""What depends on the hash seed of a process: each rank has its own, and the same one in every run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.verdict import Phase, VerdictKind
from verifier.findings.script.render import render_script, run_script
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool
from verifier.meshes.processes import Starter
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.placements.parsing import parse_placements
from verifier.records.schema import FAILS

pytestmark = pytest.mark.ranks

MESH = MeshSpec((2,))


def first_of_a_set(input: torch.Tensor) -> torch.Tensor:
    """Return ``input`` cut on one of two dims, whichever a set of texts has first."""
    if not isinstance(input, DTensor):
        return input.clone()
    dim = 0 if next(iter({"rows", "columns"})) == "rows" else 1
    mesh = input.device_mesh
    return DTensor.from_local(input.to_local().chunk(2, dim)[mesh.get_rank()], mesh, [Shard(dim)])


class _ByASet(torch.autograd.Function):
    """The identity, whose gradient is placed as :func:`first_of_a_set` places its result."""

    @staticmethod
    def forward(ctx, input):
        return input.view_as(input)

    @staticmethod
    def backward(ctx, gradient):
        return first_of_a_set(gradient)


def gradient_by_a_set(input: torch.Tensor) -> torch.Tensor:
    """Return ``input``, with a gradient that is placed by the order of a set."""
    return _ByASet.apply(input)


def trial() -> Trial:
    case = OpCase("test.set", f"{__name__}.first_of_a_set", (torch.arange(16.0).reshape(4, 4),))
    return Trial(case, MESH, ((Replicate(),),))


@pytest.fixture(scope="module")
def unharmed() -> Iterator[Pool]:
    """Ranks that no test harms, so that each has the process, and the hash seed, that it began with."""
    with Pool(PoolKey.of(MESH)) as pool:
        yield pool


@pytest.mark.parametrize("attempt", [1, 2])
def test_ranks_have_hash_seeds_of_their_own_and_the_same_in_each_run(attempt: int) -> None:
    asked = trial()
    with Pool(PoolKey.of(MESH)) as pool:
        [observation] = pool.run([asked])
    verdict = judge(observation, make_reference(asked.case))
    assert verdict.kind is VerdictKind.RANKS_DISAGREE
    assert "rank 0: S(0); rank 1: S(1)" in verdict.message


@pytest.mark.parametrize("killed", ["0", "1", "0,1"])
def test_a_process_that_takes_the_place_of_a_lost_rank_has_its_hash_seed(killed: str) -> None:
    asked = trial()
    with Pool(PoolKey.of(MESH)) as pool:
        died, again = pool.run([replace(asked, fault=f"kill:{killed}"), asked])
    assert judge(died, make_reference(asked.case)).kind is VerdictKind.DIED
    assert "rank 0: S(0); rank 1: S(1)" in judge(again, make_reference(asked.case)).message


def test_ranks_with_one_hash_seed_agree() -> None:
    asked = trial()
    with Pool(PoolKey.of(MESH), starter=Starter(hash_seeds=1)) as pool:
        list(pool.run([replace(asked, fault="kill:1")]))
        for fresh in (False, True):
            [observation] = pool.run([asked], fresh=fresh)
            assert judge(observation, make_reference(asked.case)).kind is VerdictKind.PASS


def test_gradients_that_ranks_place_otherwise_are_of_the_backward_pass(unharmed: Pool) -> None:
    whole = torch.arange(16.0).reshape(4, 4).requires_grad_()
    case = OpCase("test.gradient", f"{__name__}.gradient_by_a_set", (whole,))
    replicated = (Replicate(),)
    [observation] = unharmed.run([Trial(case, MESH, (replicated,), ((replicated,),))])
    verdict = judge(observation, make_reference(case))
    assert verdict.kind is VerdictKind.RANKS_DISAGREE
    assert (verdict.phase, verdict.subject, verdict.backward) == (Phase.BACKWARD, "input.grad", 0)


def test_the_script_of_such_a_finding_shows_it(unharmed: Pool) -> None:
    asked = Trial(trial().case, MESH, (parse_placements("R"),))
    [observation] = unharmed.run([asked])
    source = render_script(asked, judge(observation, make_reference(asked.case)))
    status, output = run_script(source)
    assert status == FAILS
    assert "ranks hold their results as ['(Shard(dim=0),)'] and as ['(Shard(dim=1),)']" in output
