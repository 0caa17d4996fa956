"""Generators of index tensors into a table, and of padding indices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from math import prod

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from strategies.tensors import chunk_sizes, seeds

__all__ = ["edge_rows", "index_shapes", "index_tensors", "padding_indices"]

MODES = ("random", "duplicates", "edge rows", "all-same", "ascending")
DRAWN_ONE_BY_ONE = 8
"""Number of elements that are drawn one by one, so that Hypothesis can shrink each; a seed fills the rest.

Hypothesis shrinks to fewer choices, and would prefer a large tensor that only a seed fills to a small tensor.
"""


def edge_rows(num_embeddings: int, world_size: int) -> tuple[int, ...]:
    """Return the first and the last row of each rank's shard of a table, ascending.

    >>> edge_rows(7, 3)
    (0, 2, 3, 5, 6)
    """
    sizes = chunk_sizes(num_embeddings, world_size)
    ends = accumulate(sizes)
    return tuple(sorted({row for size, end in zip(sizes, ends, strict=True) if size for row in (end - size, end - 1)}))


@cache
def index_shapes(world_size: int, *, min_elements: int = 0, max_elements: int = 32) -> SearchStrategy[tuple[int, ...]]:
    """Return a generator of shapes of index tensors, 0-d to 4-d, from one palette per world size.

    Shrinks to ``(1,)``. Shapes without elements are rare; only shapes of several elements shrink to them.

    Raises
    ------
    ValueError
        If no shape of the palette has ``min_elements`` to ``max_elements`` elements.
    """
    m = world_size
    some: set[tuple[int, ...]] = {(), (1,), (2,), (3,), (5,), (m,), (m + 1,), (2 * m - 1,), (1, 1), (2, 3), (m, 2)}
    some |= {(2 * m,), (2, 2 * m - 1), (3, m + 1), (2, 1, 3), (m, 2, 2), (2, 3, 1, 2), (1, 2, 2, 4)}
    # A limit of elements shortens this list and keeps its order, so a shape stays while Hypothesis shrinks other draws.
    ordinary = sorted([*some, *some], key=lambda shape: (prod(shape), len(shape) == 0, len(shape), shape))
    single = [shape for shape in ordinary if prod(shape) == 1]
    palette = [*single, (0,), (2, 0), *ordinary[len(single) :]]
    fitting = [shape for shape in palette if min_elements <= prod(shape) <= max_elements]
    if not fitting:
        raise ValueError(f"no index shape has {min_elements} to {max_elements} elements; allow 1 element")
    return st.sampled_from(fitting)


@st.composite
def index_tensors(
    draw: st.DrawFn,
    num_embeddings: int,
    shape: Sequence[int] | None = None,
    world_size: int = 1,
    *,
    dtype: torch.dtype | None = None,
    max_elements: int = 32,
    favoured: Sequence[int] = (),
    out_of_range: bool = False,
) -> torch.Tensor:
    """Return a generator of index tensors into a table of ``num_embeddings`` rows.

    Parameters
    ----------
    num_embeddings
        Rows of the table. If it is 0, only index tensors without elements are in range.
    shape
        Shape of the index tensor; drawn by :func:`index_shapes` if None.
    world_size
        Number of ranks that shard the rows; the first and the last row of each rank's shard are drawn on purpose.
    dtype
        ``torch.int64`` or ``torch.int32``. If None, ``int64`` is drawn three out of four times.
    max_elements
        Largest number of elements of a drawn shape.
    favoured
        Rows that should occur, such as the padding row.
    out_of_range
        True makes at least one index negative or too large, so that the local call raises.

    Returns
    -------
    SearchStrategy[torch.Tensor]
        Shrinks to ``[0]`` of dtype ``int64`` (``[num_embeddings]`` if ``out_of_range``).

    Raises
    ------
    ValueError
        If ``shape`` has elements but the table has no rows, or has no element but one must be out of range.
    """
    if shape is None:
        most = max_elements if num_embeddings or out_of_range else 0
        shape = draw(index_shapes(world_size, min_elements=int(out_of_range), max_elements=most))
    count = prod(shape)
    if count and not num_embeddings and not out_of_range:
        raise ValueError(f"shape={tuple(shape)} has {count} elements, but num_embeddings=0 has no row; use shape=(0,)")
    if not count and out_of_range:
        raise ValueError(f"shape={tuple(shape)} has no element that could be out of range; use shape=(1,)")
    if dtype is None:
        dtype = draw(st.sampled_from((torch.int64, torch.int64, torch.int64, torch.int32)))
    ids = _ids(draw, num_embeddings, count, world_size, favoured)
    if out_of_range:
        beyond = (num_embeddings, -1, num_embeddings + 1, 2 * num_embeddings + 3, -num_embeddings - 1)
        ids[draw(st.integers(0, count - 1))] = draw(st.sampled_from(beyond))
    return torch.tensor(ids, dtype=dtype).reshape(tuple(shape))


def _ids(draw: st.DrawFn, num_embeddings: int, count: int, world_size: int, favoured: Sequence[int]) -> list[int]:
    """Return ``count`` drawn rows; zeros if there is no row."""
    # Favoured rows come first in every pool, so that Hypothesis shrinks ids to them.
    rows: Sequence[int] = range(max(1, num_embeddings))
    if favoured:
        rows = [*favoured, *(row for row in rows if row not in favoured)]
    mode = draw(st.sampled_from((*MODES, "favoured", "favoured") if favoured else MODES))
    pool = rows
    if mode == "edge rows":
        edges = edge_rows(num_embeddings, world_size)
        pool = [row for row in rows if row in edges] or rows
    elif mode == "all-same":
        pool = [draw(st.sampled_from(rows))]
    elif mode == "duplicates":
        pool = [draw(st.sampled_from(rows)) for _ in range(2)]
    elif mode == "favoured":
        pool = [*favoured, draw(st.sampled_from(rows))]
    # An id is drawn even for an empty tensor, so that Hypothesis does not shrink to empty tensors: they prove nothing.
    ids = [draw(st.sampled_from(pool)) for _ in range(max(1, min(count, DRAWN_ONE_BY_ONE)))][:count]
    if rest := count - len(ids):
        generator = torch.Generator().manual_seed(draw(seeds()))
        ids += [pool[position] for position in torch.randint(len(pool), (rest,), generator=generator).tolist()]
    return sorted(ids) if mode == "ascending" else ids


@st.composite
def padding_indices(draw: st.DrawFn, num_embeddings: int, world_size: int) -> int | None:
    """Return a generator of padding indices: None, or the first or last row of a rank's shard.

    Row ``r`` is spelled ``r`` or ``r - num_embeddings``. Shrinks to None, which is most frequent, and the only choice
    for a table without rows. Rows shrink to the last row: row 0 is on another rank, whatever size the table shrinks to.
    """
    rows = edge_rows(num_embeddings, world_size)
    spelling = draw(st.sampled_from(("none", "none", "none", "positive", "negative")))
    if not rows or spelling == "none":
        return None
    row = draw(st.sampled_from(rows[::-1]))
    return row if spelling == "positive" else row - num_embeddings
