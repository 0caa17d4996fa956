"""Generators of calls of ``aten.embedding`` and of its backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from strategies.indices import index_tensors, padding_indices
from strategies.tensors import dim_sizes, rarely, shard_classes, shard_sizes, tensors
from verifier.cases import OpCase
from verifier.families import DrawContext

__all__ = ["BACKWARD", "EMBEDDING", "INPUT_CLASSES", "LOOKUP", "embedding_cases"]

EMBEDDING = "aten.embedding.default"
BACKWARD = "aten.embedding_dense_backward.default"
LOOKUP = "torch.nn.functional.embedding"

# Programs by name, with the class of input that each stands for.
PROGRAMS = {
    "two_pending": "two pending results",
    "lookup_then_double": "ops in a row",
    "used_twice": "result used twice",
    "shared_table": "one table, two shapes",
}

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
"""Every tag that a case of this family can have. Cuts without a qualifier are cuts of the rows of the table."""


# A row of the gradient is a sum over all occurrences of its id. Under P(sum) a rank's part of one term reaches about 64
# in bfloat16, which has all integers up to 256, and 256 in float16, which has all up to 2048.
MOST_IDS = {torch.bfloat16: 4, torch.float16: 8}
MOST_IDS_OTHERWISE = 32


def embedding_cases(context: DrawContext) -> SearchStrategy[OpCase]:
    """Return a generator of calls of the ops in ``context``: lookups, gradients and, once in six, short programs.

    Shrinks to one lookup of row 0 in a table ``[1, 1]`` of the first dtype, without padding and without flags. About
    one call in twenty is illegal (an id is out of range), and only on a CPU: elsewhere such an id aborts the process.

    Raises
    ------
    ValueError
        If ``context`` names no op or no dtype.
    """
    if not context.ops or not context.dtypes:
        raise ValueError(f"ops={context.ops} and dtypes={context.dtypes} must each have an entry")
    unknown = set(context.ops) - {EMBEDDING, BACKWARD}
    assert not unknown, f"not ops of this family: {unknown}"
    kinds = [*["lookup"] * 10, *["program"] * 2] if EMBEDDING in context.ops else []
    kinds += ["gradient"] * 5 if BACKWARD in context.ops else []
    generators = {"lookup": _lookups(context), "program": _programs(context), "gradient": _gradients(context)}
    return st.sampled_from(kinds).flatmap(generators.__getitem__)


@st.composite
def _lookups(draw: st.DrawFn, context: DrawContext) -> OpCase:
    """Draw a call of ``torch.nn.functional.embedding``; its keywords put the weight before the indices."""
    ranks = context.mesh.world_size
    hazards = ["out of range"] * 2 if context.mesh.device == "cpu" else []
    # One special feature at a time: two at once would only hide each other.
    feature = draw(st.sampled_from([*["none"] * 18, *["scale"] * 4, *hazards, *["sparse", "max_norm"] * 2]))
    weight = _draw_weight(draw, context)
    rows = len(weight)
    kwargs: dict[str, object] = {"weight": weight}
    padding_idx = draw(padding_indices(rows, ranks))
    indices = draw(
        index_tensors(
            rows,
            world_size=ranks,
            max_elements=MOST_IDS.get(weight.dtype, MOST_IDS_OTHERWISE),
            favoured=[] if padding_idx is None else [padding_idx % rows],
            out_of_range=feature == "out of range",
        )
    )
    kwargs["input"] = indices
    tags: set[str] = set()
    if padding_idx is not None:
        kwargs["padding_idx"] = padding_idx
        tags |= _padding_tags(padding_idx, rows, indices, context)
    if feature == "scale":
        kwargs["scale_grad_by_freq"] = True
        tags.add("scale_grad_by_freq")
    elif feature == "sparse":
        kwargs["sparse"] = True
        tags.add("sparse")
    elif feature == "max_norm":
        kwargs["max_norm"] = draw(st.sampled_from((3.0, 1.0)))
        tags.add("max_norm")
    elif feature == "out of range":
        tags.add("out-of-range ids")
    exact = feature != "max_norm" and (feature != "scale" or _divides_exactly(indices))
    tags |= _weight_tags(weight, context) | _index_tags([indices], rows, context)
    return OpCase(EMBEDDING, LOOKUP, (), kwargs, "embedding", exact, frozenset(tags))


@st.composite
def _programs(draw: st.DrawFn, context: DrawContext) -> OpCase:
    """Draw a call of one of the functions in :mod:`strategies.embedding.programs`."""
    ranks = context.mesh.world_size
    name = draw(st.sampled_from(list(PROGRAMS)))
    weight = _draw_weight(draw, context)
    rows = len(weight)
    # Two lookups, or one that is used twice: half as many ids give gradients of the same size.
    most = MOST_IDS.get(weight.dtype, MOST_IDS_OTHERWISE) // 2
    indices = [draw(index_tensors(rows, world_size=ranks, max_elements=most))]
    if name in ("two_pending", "shared_table"):
        first = indices[0]
        shape = first.shape if name == "two_pending" else first.shape[-1:]
        indices.append(draw(index_tensors(rows, shape, ranks, dtype=first.dtype)))
    tags = {PROGRAMS[name]} | _weight_tags(weight, context) | _index_tags(indices, rows, context)
    call = f"strategies.embedding.programs.{name}"
    return OpCase(EMBEDDING, call, (weight, *indices), {}, "embedding", True, frozenset(tags))


@st.composite
def _gradients(draw: st.DrawFn, context: DrawContext) -> OpCase:
    """Draw a call of ``aten.embedding_dense_backward``.

    Its ids are always in range: the CPU kernel drops others without a word, so there is no error to expect.
    """
    ranks = context.mesh.world_size
    dtype = draw(st.sampled_from(context.dtypes))
    rows = draw(dim_sizes(ranks))
    columns = draw(_row_lengths(ranks))
    padding_idx = draw(padding_indices(rows, ranks).map(lambda p: -1 if p is None else p % rows))
    most = MOST_IDS.get(dtype, MOST_IDS_OTHERWISE)
    favoured = [] if padding_idx < 0 else [padding_idx]
    indices = draw(index_tensors(rows, world_size=ranks, max_elements=most, favoured=favoured))
    gradient = draw(tensors((*indices.shape, columns), dtype))
    scale = draw(rarely(6))
    tags = _table_tags(rows, columns, context) | _index_tags([indices], rows, context)
    if padding_idx >= 0:
        tags |= _padding_tags(padding_idx, rows, indices, context)
    if scale:
        tags.add("scale_grad_by_freq")
    if not gradient.is_contiguous():
        tags.add("non-contiguous gradient")
    exact = not scale or _divides_exactly(indices)
    args = (gradient, indices, rows, padding_idx, scale)
    return OpCase(BACKWARD, f"torch.ops.{BACKWARD}", args, {}, "embedding", exact, frozenset(tags))


def _draw_weight(draw: st.DrawFn, context: DrawContext) -> torch.Tensor:
    """Draw a table ``[num_embeddings, embedding_dim]``."""
    ranks = context.mesh.world_size
    dtype = draw(st.sampled_from(context.dtypes))
    rows = draw(dim_sizes(ranks))
    columns = draw(_row_lengths(ranks))
    return draw(tensors((rows, columns), dtype, trainable=True))


def _row_lengths(world_size: int) -> SearchStrategy[int]:
    """Return a generator of embedding_dim: 1 to 8, and more where 8 columns cannot be cut unevenly."""
    return dim_sizes(world_size, smallest=1, largest=max(8, 2 * world_size - 1))


def _divides_exactly(indices: torch.Tensor) -> bool:
    """Return whether dividing by how often each id occurs is exact: every count is a power of two."""
    counts = Counter(indices.flatten().tolist())
    return all(count & (count - 1) == 0 for count in counts.values())


# --------------------------------------------------------------------------------------------------------------- tags
def _table_tags(rows: int, columns: int, context: DrawContext) -> set[str]:
    tags = set(shard_classes(rows, context.mesh.shape))
    tags |= {f"{kind.split()[0]} column shard" for kind in shard_classes(columns, context.mesh.shape)}
    if rows == 0:
        tags.add("size-0 table")
    if rows == 1:
        tags.add("one-row table")
    if columns == 1:
        tags.add("size-1 rows")
    if rows == columns:
        tags.add("square table")
    return tags


def _weight_tags(weight: torch.Tensor, context: DrawContext) -> set[str]:
    tags = _table_tags(weight.shape[0], weight.shape[1], context)
    if not weight.is_contiguous():
        tags.add("non-contiguous weight")
    if not weight.requires_grad:
        tags.add("no grad")
    if isinstance(weight, torch.nn.Parameter):
        tags.add("parameter")
    return tags


def _index_tags(tensors: Sequence[torch.Tensor], rows: int, context: DrawContext) -> set[str]:
    tags: set[str] = set()
    starts = _first_rows(rows, context)
    for indices in tensors:
        ids = indices.flatten().tolist()
        if indices.ndim == 0:
            tags.add("0-d indices")
        if not ids:
            tags.add("empty indices")
        if indices.dtype == torch.int32:
            tags.add("int32 ids")
        if len(set(ids)) < len(ids):
            tags.add("duplicate ids" if len(set(ids)) > 1 else "all-same ids")
        if any(start in ids and start - 1 in ids for start in starts):
            tags.add("edge rows")
        for size in indices.shape:
            tags |= {f"{kind.split()[0]} index shard" for kind in shard_classes(size, context.mesh.shape)}
    return tags


def _padding_tags(padding_idx: int, rows: int, indices: torch.Tensor, context: DrawContext) -> set[str]:
    tags = {"padding_idx"}
    if padding_idx < 0:
        tags.add("negative padding_idx")
    row = padding_idx % rows
    if bool((indices == row).any()):
        tags.add("padding id looked up")
    starts = _first_rows(rows, context)
    if starts and row >= min(starts):
        tags.add("padding on another shard")  # than the first rank's, on which local and global rows coincide
    return tags


def _first_rows(rows: int, context: DrawContext) -> set[int]:
    """Return the rows at which a shard other than the first begins when all mesh dims cut the table."""
    starts, row = set(), 0
    for size in shard_sizes(rows, context.mesh.shape)[:-1]:
        row += size
        starts.add(row)
    return starts - {0, rows}
