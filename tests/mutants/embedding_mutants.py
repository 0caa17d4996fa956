"""Sharding strategies of ``aten.embedding`` and its backward: true ones, and mutants that are wrong in one way each.

A rank imports this file by the dotted path of one of the functions below, as ``embedding_mutants.missing_mask``, which
registers that set of rules in its process, in place of torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement, _MaskPartial

aten = torch.ops.aten

Rule = tuple[Placement, list[Placement]]
"""Placement of the result, and of the two tensor arguments, on one mesh dim."""


def masked(rows: int) -> Placement:
    """Return the placement of a row-wise lookup in a table of ``rows`` rows: each rank masks the ids of other ranks."""
    placement: Placement = _MaskPartial(offset_shape=torch.Size([rows]), offset_dim=0)  # type: ignore[no-untyped-call]
    return placement


def row_wise(rows: int) -> Rule:
    mask = masked(rows)  # one object for both: the ids write the mask that the result is reduced with
    return mask, [Shard(0), mask]


@dataclass(frozen=True)
class Rules:
    """One function for each rule that a mutant can get wrong.

    ``columns`` and ``batch`` take the number of dims of the indices (``batch`` also which of them is cut), ``rows`` the
    rows of the table.
    """

    replicated: Rule = (Replicate(), [Replicate(), Replicate()])
    columns: Callable[[int], Rule] = lambda ndim: (Shard(ndim), [Shard(1), Replicate()])
    rows: Callable[[int], Rule] = row_wise
    batch: Callable[[int, int], Rule] = lambda ndim, dim: (Shard(dim), [Replicate(), Shard(dim)])
    gradient_columns: Callable[[int], Rule] = lambda ndim: (Shard(1), [Shard(ndim), Replicate()])
    gradient_batch: Callable[[int, int], Rule] = lambda ndim, dim: (Partial(), [Shard(dim), Shard(dim)])
    gradient_pending: Rule = (Partial(), [Partial(), Replicate()])

    def register(self) -> None:
        """Make DTensor use these rules in this process."""

        @register_sharding(aten.embedding.default)  # type: ignore[untyped-decorator]
        def lookup(weight: torch.Tensor, indices: torch.Tensor, *rest: object) -> Sequence[object]:
            ndim = len(indices.shape)
            rules = [self.replicated, self.columns(ndim), self.rows(weight.shape[0])]
            rules += [self.batch(ndim, dim) for dim in range(ndim)]
            return _acceptable(rules, rest)

        @register_sharding(aten.embedding_dense_backward.default)  # type: ignore[untyped-decorator]
        def gradient(grad_output: torch.Tensor, indices: torch.Tensor, *rest: object) -> Sequence[object]:
            ndim = len(indices.shape)
            rules = [Rules.replicated, self.gradient_columns(ndim), self.gradient_pending]
            rules += [self.gradient_batch(ndim, dim) for dim in range(ndim)]
            return _acceptable(rules, rest)


def _acceptable(rules: Sequence[Rule], rest: Sequence[object]) -> Sequence[object]:
    return [([output], [*inputs, *(None for _ in rest)]) for output, inputs in rules]


TRUE = Rules()


def true_rules() -> None:
    TRUE.register()


def output_shard_on_wrong_dim() -> None:
    """The columns of the result are its last dim, not the one before."""
    replace(TRUE, columns=lambda ndim: (Shard(max(ndim - 1, 0)), [Shard(1), Replicate()])).register()


def partial_where_replicated() -> None:
    """Every rank has the whole result, so that their sum is too large."""
    replace(TRUE, replicated=(Partial(), [Replicate(), Replicate()])).register()


def replicated_where_partial() -> None:
    """After a masked lookup, each rank has some of the rows only."""

    def rows(rows: int) -> Rule:
        mask = masked(rows)
        return Replicate(), [Shard(0), mask]

    replace(TRUE, rows=rows).register()


def missing_mask() -> None:
    """The ids are global rows, and a rank's shard has its own numbering."""
    replace(TRUE, rows=lambda rows: (Partial(), [Shard(0), Replicate()])).register()


def wrong_offset() -> None:
    """Ranks after the first take their rows to start too late."""
    replace(TRUE, rows=lambda rows: row_wise(rows + 2)).register()


def gradient_not_reduced() -> None:
    """Each rank has the contributions of its own ids only."""
    replace(TRUE, gradient_batch=lambda ndim, dim: (Replicate(), [Shard(dim), Shard(dim)])).register()


def gradient_shard_on_wrong_dim() -> None:
    """The columns of the table's gradient are its second dim."""
    replace(TRUE, gradient_columns=lambda ndim: (Shard(0), [Shard(ndim), Replicate()])).register()


def gradient_averaged() -> None:
    """The ranks' contributions add up; their average is too small."""
    replace(TRUE, gradient_batch=lambda ndim, dim: (Partial("avg"), [Shard(dim), Shard(dim)])).register()
