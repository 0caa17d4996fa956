"""A dense gradient of a DTensor, where the local call has a sparse one, is compared by its values."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.distributed.tensor import DTensor

from verifier.core.case import MeshSpec, OpCase, Trial
from verifier.core.verdict import VerdictKind
from verifier.meshes.crew import PoolKey
from verifier.meshes.pool import Pool
from verifier.oracle.reference import make_reference
from verifier.oracle.verdicts import judge
from verifier.placements.parsing import parse_placements

MESH = MeshSpec((2,), "simulated")
WEIGHT = torch.arange(1.0, 13.0, dtype=torch.float64).view(6, 2)
IDS = torch.tensor([1, 4, 1])

Program = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def rows(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return rows of ``weight``, whose gradient is dense for a DTensor."""
    return torch.nn.functional.embedding(ids, weight, sparse=not isinstance(weight, DTensor))


def doubled_rows(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Do the same, with twice the gradient for a DTensor: wrong on purpose."""
    found = rows(weight, ids)
    return 2 * found - found.detach() if isinstance(weight, DTensor) else found


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(PoolKey.of(MESH)) as started:
        yield started


@pytest.mark.parametrize("placements", ["R", "S(1)"])
@pytest.mark.parametrize(
    ("program", "kind"), [(rows, VerdictKind.PASS), (doubled_rows, VerdictKind.WRONG_GRADIENT)], ids=["right", "wrong"]
)
@pytest.mark.parametrize("cotangent", ["R", "P(sum)"])
def test_values_decide(pool: Pool, program: Program, kind: VerdictKind, placements: str, cotangent: str) -> None:
    case = OpCase("test.rows", f"{__name__}.{program.__name__}", (WEIGHT.clone().requires_grad_(), IDS))
    given = (parse_placements(placements), parse_placements("R"))
    [observation] = pool.run([Trial(case, MESH, given, ((parse_placements(cotangent),),))])
    verdict = judge(observation, make_reference(case))
    assert (verdict.kind, verdict.subject) == (kind, "weight.grad" if verdict.kind.bad else verdict.subject)
