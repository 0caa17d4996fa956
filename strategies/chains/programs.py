"""Programs of functions in a row, for plain tensors and for DTensors.

Each imports only torch, so that its source can stand in a reproduction.
"""

from __future__ import annotations

from typing import Any

import torch

from strategies.chains.simpler import simpler_steps
from strategies.chains.steps import left_over, run_steps
from verifier.core.case import OpCase
from verifier.planning.boundary import declares
from verifier.programs import simplifies

__all__ = ["CHAIN", "chain"]

CHAIN = "strategies.chains.programs.chain"


def chain(steps: list[list[Any]], /, **tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that ``steps`` make and none of them takes; see :func:`strategies.chains.steps.run_steps`.

    A pending tensor that a step takes is no result, so that only the step reduces it.
    """
    return list(left_over(steps, run_steps(steps, dict(tensors))).values())


def _called(case: OpCase) -> list[str]:
    """Return the dotted paths of the functions that a chain calls."""
    steps: Any = case.args[0]
    return [path for _, path, _, _ in steps]


declares(CHAIN, _called)
simplifies(CHAIN, simpler_steps)
