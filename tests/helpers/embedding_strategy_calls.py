"""For each mutant of our embedding strategy, a call that shows its defect and the error that the call raises."""

from __future__ import annotations

from collections.abc import Callable

import embedding_strategy_mutants as mutants
import torch

from strategies.tensors import filled
from verifier.calls.result import Crash, SilentError, VerificationError, WrongValue
from verifier.calls.verifier import Verifier
from verifier.core.verdict import VerdictKind

MESH = "simulated:2x2"
WEIGHT = filled((7, 3), torch.float64, 0)
GRADIENTS = filled((6, 3), torch.float64, 1)
IDS = torch.tensor([0, 6, 3, 4, 3, 1])

Call = tuple[tuple[object, ...], list[str]]

ROWS: Call = (WEIGHT, IDS), ["(R, S(0))", "(R, R)"]
ROWS_TWICE: Call = (WEIGHT, IDS), ["(S(0), S(0))", "(R, R)"]
FEW_ROWS: Call = (WEIGHT[:2], IDS % 2), ["(S(0), S(0))", "(R, R)"]
ILLEGAL: Call = (WEIGHT, IDS + 3), ["(S(0), R)", "(R, R)"]
PARTS: Call = (WEIGHT, IDS), ["(S(0), S(0))", "(P(sum), P(sum))"]
SCALED: Call = (GRADIENTS, IDS, 7, True), ["(S(0), R)", "(S(0), R)"]
LARGEST: Call = (GRADIENTS, IDS, 7, False), ["(P(max), P(max))", "(R, R)"]

MUTANTS: dict[Callable[..., torch.Tensor], tuple[Call, type[VerificationError]]] = {
    mutants.foreign_rows_kept: (ROWS, WrongValue),
    mutants.rows_by_one_mesh_dim: (ROWS_TWICE, Crash),  # a rank takes an id beyond its rows for its own
    mutants.ids_unchecked: (ILLEGAL, SilentError),
    mutants.partial_ids: (PARTS, Crash),
    mutants.frequencies_of_one_rank: (SCALED, WrongValue),
    mutants.replicas_counted: (SCALED, WrongValue),
    mutants.largest_gradient: (LARGEST, WrongValue),
}


def run(verify: Verifier, function: Callable[..., torch.Tensor], call: Call) -> dict[VerdictKind, int]:
    args, placements = call
    name = f"{function.__module__}.{function.__name__}"
    raises = call is ILLEGAL
    return verify(name, *args, mesh=MESH, placements=placements, exact=True, raises=raises, record=False).counts
