"""Cases that the family of all ops draws, the same in each run."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, Phase, given, settings

from strategies.opinfo.family import FAMILY
from verifier.core.case import MeshSpec, OpCase
from verifier.planning.families import DrawContext
from verifier.torch_internals.names import pytree

MESH = MeshSpec((2,))


def context(*ops: str, dtypes: tuple[torch.dtype, ...] = (torch.float64,)) -> DrawContext:
    return DrawContext(MESH, dtypes, ops)


def drawn(where: DrawContext, examples: int = 60) -> list[OpCase]:
    cases: list[OpCase] = []

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(FAMILY.cases(where))
    def draw(case: OpCase) -> None:
        cases.append(case)

    draw()
    return cases


def tensors(case: OpCase) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves((case.args, dict(case.kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
