"""The family of ``aten.embedding`` and its backward: lookups of rows in a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis.strategies import SearchStrategy
from torch.distributed.tensor import Shard

from strategies.embedding.inputs import BACKWARD, EMBEDDING, LOOKUP, embedding_cases
from verifier.cases import OpCase, Phase, Placements, Trial, Verdict, VerdictKind
from verifier.families import DrawContext
from verifier.placements import coordinates, local_shape

__all__ = ["FAMILY", "EmbeddingFamily"]


@dataclass(frozen=True)
class EmbeddingFamily:
    """What is known of ``aten.embedding.default`` and ``aten.embedding_dense_backward.default``."""

    name: str = "embedding"
    ops: tuple[str, ...] = (EMBEDDING, BACKWARD)
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

    def cases(self, context: DrawContext) -> SearchStrategy[OpCase]:
        """Return a generator of cases; see :func:`strategies.embedding.inputs.embedding_cases`."""
        return embedding_cases(context)

    def likely_cause(self, trial: Trial, verdict: Verdict) -> str:
        """Return a guess at the cause of a bad verdict from the structure of the call; empty if nothing suggests one."""
        tensors, indices = _table_and_indices(trial.case, trial.combination)
        ids = [index for tensor, _ in indices for index in tensor.flatten().tolist()]
        ids_cut = any(_cuts(placements) for _, placements in indices)
        if trial.case.op == BACKWARD:
            return _cause_in_backward(trial.case, verdict, ids, ids_cut)
        if tensors is None:
            return ""
        return _cause_in_lookup(trial, verdict, *tensors, ids, ids_cut)


FAMILY = EmbeddingFamily()


def _cause_in_backward(case: OpCase, verdict: Verdict, ids: Sequence[int], ids_cut: bool) -> str:
    scaled = len(case.args) == 5 and bool(case.args[4])
    if verdict.kind is VerdictKind.WRONG_VALUE and scaled and ids_cut and len(set(ids)) < len(ids):
        return "are frequencies counted per rank?"
    return ""


def _cause_in_lookup(
    trial: Trial, verdict: Verdict, weight: torch.Tensor, placements: Placements, ids: Sequence[int], ids_cut: bool
) -> str:
    options, rows = trial.case.kwargs, len(weight)
    row_wise = _cuts(placements, 0)
    if verdict.kind is VerdictKind.CRASH and row_wise and ids:
        if verdict.phase is Phase.GATHER_AGAIN or (
            trial.case.call.endswith(".used_twice") and verdict.phase is not Phase.SETUP
        ):
            return "the mask of a row-wise lookup is released by its first reduction"
        if verdict.phase is Phase.FORWARD and _has_empty_shard(weight, placements, trial.mesh.shape):
            return "a rank's shard of weight is empty and the local kernel refuses it"
        if trial.case.call.endswith(".two_pending"):
            return "do two pending row-wise lookups share one mask?"
    if verdict.kind is VerdictKind.SILENT_ERROR and row_wise and any(not 0 <= index < rows for index in ids):
        return "ids outside every rank's rows are masked and never checked"
    ...
    return ""
