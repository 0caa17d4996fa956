"""The family of ``aten.embedding`` and its backward: lookups of rows of a table."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis.strategies import SearchStrategy
from torch.distributed.tensor import Shard

from strategies.embedding.inputs import BACKWARD, EMBEDDING, embedding_cases
from verifier.core.case import OpCase, Trial
from verifier.core.ops import argument_names
from verifier.core.verdict import Phase, Verdict, VerdictKind
from verifier.placements.algebra import coordinates, local_shape
from verifier.planning.families import DrawContext, NarrowFamily
from verifier.torch_internals.placements import Placements

__all__ = ["FAMILY", "EmbeddingFamily"]


@dataclass(frozen=True)
class EmbeddingFamily(NarrowFamily):
    """The cases of ``aten.embedding.default`` and ``aten.embedding_dense_backward.default``."""

    name: str = "embedding"
    ops: tuple[str, ...] = (EMBEDDING, BACKWARD)
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

    def cases(self, context: DrawContext) -> SearchStrategy[OpCase]:
        """Return a generator of cases; see :func:`strategies.embedding.inputs.embedding_cases`."""
        return embedding_cases(context)

    def likely_cause(self, trial: Trial, verdict: Verdict) -> str:
        """Return a guess at the cause of a bad verdict, or an empty text.

        The guess depends on values, shapes, flags and placements, and not on messages, which differ between versions.
        """
        signs = _signs(trial)
        if trial.case.op == BACKWARD:
            counted_wrong = verdict.kind is VerdictKind.WRONG_VALUE and signs.scaled and signs.repeated_across_ranks
            return "are frequencies counted per rank?" if counted_wrong else ""
        match verdict.kind:
            case VerdictKind.CRASH:
                return _cause_of_crash(signs, verdict.phase)
            case VerdictKind.SILENT_ERROR if signs.row_wise and signs.out_of_range:
                return "ids outside every rank's rows are masked and never checked"
            case VerdictKind.WRONG_GRADIENT if signs.scaled and signs.repeated_across_ranks:
                return "are frequencies counted per rank?"
            case VerdictKind.WRONG_GRADIENT if signs.row_wise and signs.padded:
                return "is padding_idx used as a local row index?"
            case VerdictKind.WRONG_VALUE | VerdictKind.MUTATED_INPUT if signs.renormed and signs.column_wise:
                return "are norms taken over a rank's own columns?"
            case VerdictKind.WRONG_VALUE | VerdictKind.MUTATED_INPUT if signs.renormed and signs.indices_cut:
                return "does each rank renormalise only the rows that it looks up itself?"
            case _:
                return ""


FAMILY = EmbeddingFamily()


@dataclass(frozen=True)
class _Signs:
    """Facts of a trial that may explain a bad verdict."""

    program: str = ""
    row_wise: bool = False
    column_wise: bool = False
    empty_shard: bool = False
    indices_cut: bool = False
    looked_up: bool = False
    out_of_range: bool = False
    repeated: bool = False
    padded: bool = False
    scaled: bool = False
    renormed: bool = False

    @property
    def repeated_across_ranks(self) -> bool:
        return self.repeated and self.indices_cut


def _cause_of_crash(signs: _Signs, phase: Phase) -> str:
    if not signs.row_wise or not signs.looked_up:
        return ""
    if phase is Phase.FORWARD and signs.empty_shard:
        return "a rank's shard of weight is empty and the local kernel refuses it"
    if signs.program == "used_twice":
        return "the mask of a row-wise lookup is released by its first reduction"
    if signs.program == "two_pending":
        return "do two pending lookups share one mask?"
    return ""


def _signs(trial: Trial) -> _Signs:
    case = trial.case
    tensors = [value for value in (*case.args, *case.kwargs.values()) if isinstance(value, torch.Tensor)]
    names = argument_names(case)
    named = dict(zip(names, zip(tensors, trial.combination, strict=True), strict=True))
    lookups = [pair for name, pair in named.items() if name not in ("weight", "grad_output")]
    ids = [index for indices, _ in lookups for index in indices.flatten().tolist()]
    signs = _Signs(
        indices_cut=any(_cuts(placements) for _, placements in lookups),
        looked_up=bool(ids),
        repeated=len(set(ids)) < len(ids),
        scaled=bool(case.args[4] if case.op == BACKWARD else case.kwargs.get("scale_grad_by_freq")),
        padded=case.kwargs.get("padding_idx") is not None,
        renormed=case.kwargs.get("max_norm") is not None,
    )
    if "weight" not in named:
        return signs
    weight, placements = named["weight"]
    shape, mesh_shape = tuple(weight.shape), trial.mesh.shape
    rows = [local_shape(shape, placements, mesh_shape, at)[0] for at in coordinates(mesh_shape)]
    return replace(
        signs,
        program=case.call.rpartition(".")[2],
        row_wise=_cuts(placements, 0),
        column_wise=_cuts(placements, 1),
        empty_shard=not min(rows),
        out_of_range=any(not 0 <= index < shape[0] for index in ids),
    )


def _cuts(placements: Placements, tensor_dim: int | None = None) -> bool:
    """Return whether a mesh dim shards the tensor, along ``tensor_dim`` if given."""
    return any(isinstance(p, Shard) and tensor_dim in (None, p.dim) for p in placements)
