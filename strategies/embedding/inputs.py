"""Generators of calls of ``aten.embedding`` and of its backward."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from strategies.indices import index_tensors, padding_indices
from strategies.tensors import Layout, dim_sizes, filled, layouts, rarely, seeds, shard_classes, shard_sizes
from verifier.core.case import MeshSpec, OpCase
from verifier.planning.boundary import declares
from verifier.planning.families import DrawContext

__all__ = ["BACKWARD", "EMBEDDING", "INPUT_CLASSES", "LOOKUP", "MAX_NORM", "NORM_TYPES", "embedding_cases"]

EMBEDDING = "aten.embedding.default"
BACKWARD = "aten.embedding_dense_backward.default"
LOOKUP = "torch.nn.functional.embedding"

MAX_NORM = 2.7
"""No norm of a few small integers is near 2.7, for any order, so rounding never decides whether a row is scaled."""
NORM_TYPES = (2.0, 0.0, 0.5, 1.0, 3.0, math.inf)

# Programs by name, each with its tag.
PROGRAMS = {
    "two_pending": "two pending results",
    "used_twice": "result used twice",
    "shared_table": "ops in a row",
}
for _name in PROGRAMS:
    declares(f"strategies.embedding.programs.{_name}")

INPUT_CLASSES = frozenset(PROGRAMS.values()) | {
    "0-d indices",
    "all-same ids",
    "duplicate ids",
    "edge rows",
    "empty indices",
    "empty column shard",
    "empty index shard",
    "empty shard",
    "even column shard",
    "even index shard",
    "even shard",
    "int32 ids",
    "max_norm",
    "negative padding_idx",
    "no grad",
    "non-contiguous gradient",
    "non-contiguous weight",
    "norm_type",
    "one-row table",
    "out-of-range ids",
    "padding id looked up",
    "padding on another shard",
    "padding_idx",
    "parameter",
    "scale_grad_by_freq",
    "size-0 table",
    "size-1 rows",
    "sparse",
    "square table",
    "uneven column shard",
    "uneven index shard",
    "uneven shard",
}
"""Every tag that a case of this family can have. Shards without a qualifier are shards of the table's rows."""


def embedding_cases(context: DrawContext) -> SearchStrategy[OpCase]:
    """Return a generator of calls of the ops in ``context``: lookups, gradients and, once in six, short programs.

    Shrinks to one lookup of row 0 in a table ``[1, 1]`` of the first dtype, without padding and without flags. On a CPU
    about one call in twenty is illegal, with an id out of range. On a GPU such an id would abort the process.

    Raises
    ------
    ValueError
        If ``context`` names no op or no dtype.
    """
    context.check({EMBEDDING, BACKWARD})
    kinds = [*["lookup"] * 9, *["program"] * 3] if EMBEDDING in context.ops else []
    kinds += ["gradient"] * 5 if BACKWARD in context.ops else []
    generators = {"lookup": _lookups(context), "program": _programs(context), "gradient": _gradients(context)}
    return st.sampled_from(kinds).flatmap(generators.__getitem__)


# The three generators below draw in the same order: the special feature, the table, the padding, the ids. So Hypothesis
# can shrink a program or a gradient to a plain lookup that also fails.
@st.composite
def _lookups(draw: st.DrawFn, context: DrawContext) -> OpCase:
    """Draw a call of ``torch.nn.functional.embedding``; its keywords put the weight before the indices."""
    hazards = ["out of range"] * 2 if context.mesh.device == "cpu" else []
    # One special feature at a time, because one could hide the effect of another.
    feature = draw(st.sampled_from([*["none"] * 14, *["scale"] * 3, *hazards, *["sparse", "max_norm"] * 2]))
    table = draw(_tables(context, trainable=True))
    indices = draw(table.indices(_most_ids(table.dtype), out_of_range=feature == "out of range"))
    flags: dict[str, dict[str, object]] = {
        "scale": {"scale_grad_by_freq": True},
        "sparse": {"sparse": True},
        "max_norm": {"max_norm": MAX_NORM},
    }
    if feature == "max_norm" and (order := draw(st.sampled_from(NORM_TYPES))) != NORM_TYPES[0]:
        flags["max_norm"]["norm_type"] = order
    kwargs = {"weight": table.weight(), "input": indices, **table.padding(), **flags.get(feature, {})}
    tags = table.tags() | _index_tags(table, indices) | set(flags.get(feature, {}))
    if feature == "out of range":
        tags.add("out-of-range ids")
    exact = feature != "max_norm" and (feature != "scale" or _divides_exactly(indices))
    return OpCase(EMBEDDING, LOOKUP, (), kwargs, "embedding", exact, frozenset(tags))


@st.composite
def _programs(draw: st.DrawFn, context: DrawContext) -> OpCase:
    """Draw a call of one of the functions in :mod:`strategies.embedding.programs`."""
    name = draw(st.sampled_from(list(PROGRAMS)))
    table = draw(_tables(context, trainable=True))
    # Two lookups, or one lookup used twice: half the ids give gradients of the same magnitude.
    indices = [draw(table.indices(_most_ids(table.dtype) // 2))]
    if name in ("two_pending", "shared_table"):
        first = indices[0]
        shape = first.shape if name == "two_pending" else first.shape[-1:]
        indices.append(draw(index_tensors(table.rows, shape, context.mesh.world_size, dtype=first.dtype)))
    tags = {PROGRAMS[name]} | table.tags() | _index_tags(table, *indices)
    call = f"strategies.embedding.programs.{name}"
    return OpCase(EMBEDDING, call, (table.weight(), *indices), table.padding(), "embedding", True, frozenset(tags))


@st.composite
def _gradients(draw: st.DrawFn, context: DrawContext) -> OpCase:
    """Draw a call of ``aten.embedding_dense_backward``.

    Its ids are always in range: the CPU kernel silently drops other ids, so there is no error to expect.
    """
    scale = draw(rarely(6))
    table = draw(_tables(context, trainable=False))
    indices = draw(table.indices(_most_ids(table.dtype)))
    gradient = filled((*indices.shape, table.columns), table.dtype, table.seed, table.layout)
    padding_idx = -1 if table.padding_idx is None else table.padding_idx % table.rows
    # Here -1 stands for no padding, so no padding index is negative.
    tags = (table.tags() | _index_tags(table, indices)) - {"negative padding_idx"}
    if scale:
        tags.add("scale_grad_by_freq")
    if not gradient.is_contiguous():
        tags.add("non-contiguous gradient")
    exact = not scale or _divides_exactly(indices)
    args = (gradient, indices, table.rows, padding_idx, scale)
    return OpCase(BACKWARD, f"torch.ops.{BACKWARD}", args, {}, "embedding", exact, frozenset(tags))


# -------------------------------------------------------------------------------------------------------------- table
@dataclass(frozen=True)
class _Table:
    """A drawn table ``[rows, columns]`` and its padding index."""

    mesh: MeshSpec
    trainable: bool
    dtype: torch.dtype
    rows: int
    columns: int
    seed: int
    layout: Layout
    padding_idx: int | None

    def weight(self) -> torch.Tensor:
        return filled((self.rows, self.columns), self.dtype, self.seed, self.layout)

    def padding(self) -> dict[str, object]:
        return {} if self.padding_idx is None else {"padding_idx": self.padding_idx}

    def indices(self, max_elements: int, *, out_of_range: bool = False) -> SearchStrategy[torch.Tensor]:
        favoured = [] if self.padding_idx is None else [self.padding_idx % self.rows]
        return index_tensors(
            self.rows,
            world_size=self.mesh.world_size,
            max_elements=max_elements,
            favoured=favoured,
            out_of_range=out_of_range,
        )

    def first_rows(self) -> set[int]:
        """Return the first row of each shard but the first, if all mesh dims shard the rows."""
        ends = accumulate(shard_sizes(self.rows, self.mesh.shape))
        return set(ends) - {0, self.rows}

    def tags(self) -> set[str]:
        tags = set(shard_classes(self.rows, self.mesh.shape))
        tags |= {f"{kind.split()[0]} column shard" for kind in shard_classes(self.columns, self.mesh.shape)}
        found = {
            "size-0 table": self.rows == 0,
            "one-row table": self.rows == 1,
            "size-1 rows": self.columns == 1,
            "square table": self.rows == self.columns,
        }
        if self.trainable:
            found["non-contiguous weight"] = not self.weight().is_contiguous()
            found["no grad"] = not self.layout.requires_grad
            found["parameter"] = self.layout.parameter
        if self.padding_idx is not None:
            found["padding_idx"] = True
            found["negative padding_idx"] = self.padding_idx < 0
            # On the first shard local and global rows are equal, so a mix-up of the two does not show.
            found["padding on another shard"] = self.padding_idx % self.rows >= min(
                self.first_rows(), default=self.rows
            )
        return tags | {tag for tag, holds in found.items() if holds}


@st.composite
def _tables(draw: st.DrawFn, context: DrawContext, trainable: bool) -> _Table:
    ranks = context.mesh.world_size
    dtype = draw(st.sampled_from(context.dtypes))
    rows = draw(dim_sizes(ranks))
    columns = draw(_row_lengths(ranks))
    seed = draw(seeds())
    layout = draw(layouts(trainable=trainable))
    padding_idx = draw(padding_indices(rows, ranks))
    return _Table(context.mesh, trainable, dtype, rows, columns, seed, layout, padding_idx)


def _row_lengths(world_size: int) -> SearchStrategy[int]:
    """Return a generator of embedding_dim: 1 to 8, and more if 8 columns cannot shard unevenly."""
    return dim_sizes(world_size, smallest=1, largest=max(8, 2 * world_size - 1))


def _divides_exactly(indices: torch.Tensor) -> bool:
    """Return whether division by the count of each id is exact: every count is a power of two."""
    counts = Counter(indices.flatten().tolist())
    return all(count & (count - 1) == 0 for count in counts.values())


def _most_ids(dtype: torch.dtype) -> int:
    """Return how many ids a call may have so that its gradients stay exact.

    A row of the gradient is a sum over all occurrences of its id. Under P(sum) a rank's summand of one term reaches
    about 64 in bfloat16, which is exact for integers up to 256, and 256 in float16, which is exact up to 2048.
    """
    return {torch.bfloat16: 4, torch.float16: 8}.get(dtype, 32)


def _index_tags(table: _Table, *tensors: torch.Tensor) -> set[str]:
    tags: set[str] = set()
    padding_row = None if table.padding_idx is None else table.padding_idx % table.rows
    for indices in tensors:
        ids = indices.flatten().tolist()
        found = {
            "0-d indices": indices.ndim == 0,
            "empty indices": not ids,
            "int32 ids": indices.dtype == torch.int32,
            "all-same ids": len(ids) > 1 and len(set(ids)) == 1,
            "duplicate ids": 1 < len(set(ids)) < len(ids),
            "edge rows": any(start in ids and start - 1 in ids for start in table.first_rows()),
            "padding id looked up": padding_row in ids,
        }
        tags |= {tag for tag, holds in found.items() if holds}
        for size in indices.shape:
            tags |= {f"{kind.split()[0]} index shard" for kind in shard_classes(size, table.mesh.shape)}
    return tags
