"""The smallest calls in which the legacy kernels differ from the local op in torch 2.13.0."""

from __future__ import annotations

from math import inf

import torch

from strategies.sharded_tensor.inputs import OPS
from strategies.sharded_tensor.programs import BAG, EMBEDDING, TRAINED
from strategies.tensors import filled
from verifier.core.case import OpCase
from verifier.core.verdict import VerdictKind

ROWS, COLUMNS = 0, 1
CALLS = {"embedding": EMBEDDING, "embedding_bag": BAG, "training": TRAINED, "unequal_batches": EMBEDDING}


def lookup(
    kernel: str,
    dim: int,
    ids: list[object],
    *,
    table: tuple[int, int] | torch.Tensor = (4, 3),
    order: tuple[int, ...] = (0, 1),
    exact: bool = False,
    **options: object,
) -> OpCase:
    """Return a call of ``kernel``'s program on a table of this shape, sharded along ``dim``."""
    op = f"sharded_tensor.{kernel}.{('rows', 'columns')[dim]}"
    assert op in OPS
    weight = table if isinstance(table, torch.Tensor) else filled(table, torch.float64, 0)
    args = (weight.requires_grad_(weight.dtype == torch.float64), torch.tensor(ids), dim, list(order))
    return OpCase(op, CALLS[kernel], args, options, "sharded_tensor", exact)


TALL = filled((258, 2), torch.bfloat16, 0)
SAMPLES = torch.tensor([[1.0], [1.0]], dtype=torch.bfloat16)
LEARNT = torch.ones(2, dtype=torch.float64, requires_grad=True)

DISCREPANCIES: dict[str, tuple[OpCase, VerdictKind]] = {
    "embedding: negative padding_idx, rows": (
        lookup("embedding", ROWS, [0, 3], padding_idx=-1),
        VerdictKind.WRONG_GRADIENT,
    ),
    "embedding: padding_idx out of range, rows": (
        lookup("embedding", ROWS, [0, 3], padding_idx=9),
        VerdictKind.SILENT_ERROR,
    ),
    "embedding: max_norm, all ids of one rank, rows": (
        lookup("embedding", ROWS, [0, 1], max_norm=1.0),
        VerdictKind.WRONG_VALUE,
    ),
    "embedding: max_norm, gradient, columns": (
        lookup("embedding", COLUMNS, [0, 1], max_norm=1.0),
        VerdictKind.WRONG_GRADIENT,
    ),
    "embedding: norm_type=inf, columns": (
        lookup("embedding", COLUMNS, [0, 1], max_norm=2.0, norm_type=inf),
        VerdictKind.WRONG_VALUE,
    ),
    "bag: mean of an empty bag, rows": (
        lookup("embedding_bag", ROWS, [0, 3, 1, 2], mode="mean", offsets=[0, 0, 2, 2]),
        VerdictKind.WRONG_VALUE,
    ),
    "bag: mean counts padding, rows": (
        lookup("embedding_bag", ROWS, [0, 3, 1, 2], mode="mean", offsets=[0, 2], padding_idx=3),
        VerdictKind.WRONG_VALUE,
    ),
    "bag: mean of padding alone, rows": (
        lookup("embedding_bag", ROWS, [[3, 3], [1, 2]], mode="mean", padding_idx=3),
        VerdictKind.WRONG_VALUE,
    ),
    "bag: sum, negative padding_idx, rows": (
        lookup("embedding_bag", ROWS, [[0, 3], [1, 2]], padding_idx=-1),
        VerdictKind.WRONG_VALUE,
    ),
    "bag: mean, negative padding_idx, rows": (
        lookup("embedding_bag", ROWS, [[0, 3], [1, 2]], padding_idx=-1, mode="mean"),
        VerdictKind.WRONG_VALUE,
    ),
    "bag: padding_idx out of range, rows": (
        lookup("embedding_bag", ROWS, [[0, 3], [1, 2]], padding_idx=9),
        VerdictKind.SILENT_ERROR,
    ),
    "bag: gradient of max, rows": (
        lookup("embedding_bag", ROWS, [[0, 3], [1, 2]], mode="max"),
        VerdictKind.WRONG_GRADIENT,
    ),
    "bag: ids in bfloat16, rows": (
        lookup("embedding_bag", ROWS, [[257], [0]], table=TALL, per_sample_weights=SAMPLES, exact=True),
        VerdictKind.WRONG_VALUE,
    ),
    "bag: ids in bfloat16, columns": (
        lookup("embedding_bag", COLUMNS, [[257], [0]], table=TALL, per_sample_weights=SAMPLES, exact=True),
        VerdictKind.WRONG_VALUE,
    ),
    "bag: weights of samples under mean, rows": (
        lookup("embedding_bag", ROWS, [[0], [3]], mode="mean", per_sample_weights=SAMPLES.double()),
        VerdictKind.SILENT_ERROR,
    ),
    "bag: max_norm, gradient, columns": (
        lookup("embedding_bag", COLUMNS, [[0], [1]], max_norm=1.0),
        VerdictKind.WRONG_GRADIENT,
    ),
    "bag: norm_type=inf, columns": (
        lookup("embedding_bag", COLUMNS, [[0], [1]], max_norm=2.0, norm_type=inf),
        VerdictKind.WRONG_VALUE,
    ),
    "bag: max_norm, all ids of one rank, rows": (
        lookup("embedding_bag", ROWS, [[0], [1]], max_norm=1.0),
        VerdictKind.WRONG_VALUE,
    ),
    "bag: offsets and weights of samples with a gradient, rows": (
        lookup("embedding_bag", ROWS, [0, 3], offsets=[0, 1], per_sample_weights=LEARNT),
        VerdictKind.CRASH,
    ),
    "bag: offsets and weights of samples with a gradient, columns": (
        lookup("embedding_bag", COLUMNS, [0, 3], offsets=[0, 1], per_sample_weights=LEARNT),
        VerdictKind.CRASH,
    ),
    "bag: more bags than ids, rows": (
        lookup("embedding_bag", ROWS, [0, 3], offsets=[0, 0, 1, 1]),
        VerdictKind.CRASH,
    ),
    "bag: more bags than ids, columns": (
        lookup("embedding_bag", COLUMNS, [0, 3], offsets=[0, 0, 1, 1]),
        VerdictKind.CRASH,
    ),
    "training: max_norm, all ids of one rank, rows": (
        lookup("training", ROWS, [[[0], [1]]], max_norm=1.0),
        VerdictKind.WRONG_VALUE,
    ),
    "training: max, rows": (
        lookup("training", ROWS, [[[0, 3], [1, 2]]], mode="max"),
        VerdictKind.WRONG_VALUE,
    ),
    "training: max_norm, columns": (
        lookup("training", COLUMNS, [[[0], [1]]], max_norm=1.0),
        VerdictKind.WRONG_VALUE,
    ),
    "training: three steps, negative padding_idx, rows": (
        lookup("training", ROWS, 3 * [[[0], [3]]], padding_idx=-1),  # two steps leave each row unchanged
        VerdictKind.WRONG_VALUE,
    ),
    "training: norm_type=inf, columns": (
        lookup("training", COLUMNS, [[[0], [1]]], max_norm=2.0, norm_type=inf),
        VerdictKind.WRONG_VALUE,
    ),
    "training: two steps with max_norm, columns": (
        lookup("training", COLUMNS, [[[0], [1]], [[0], [1]]], max_norm=1.0),
        VerdictKind.CRASH,
    ),
}
