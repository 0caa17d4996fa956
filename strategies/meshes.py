"""Generators of mesh shapes."""

from __future__ import annotations

from itertools import product
from math import prod

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

__all__ = ["mesh_shapes"]


def mesh_shapes(max_ranks: int = 8, max_dims: int = 3) -> SearchStrategy[tuple[int, ...]]:
    """Return a generator of mesh shapes of one to ``max_dims`` mesh dims and at most ``max_ranks`` ranks.

    Shrinks to fewer ranks, then to fewer mesh dims, in the end to ``(1,)``. A shape has at most one mesh dim of size 1:
    further ones would add nothing.

    Raises
    ------
    ValueError
        If ``max_ranks`` is not positive or ``max_dims`` is not 1, 2 or 3.
    """
    if max_ranks < 1:
        raise ValueError(f"max_ranks={max_ranks} must be at least 1")
    if max_dims not in (1, 2, 3):
        raise ValueError(f"max_dims={max_dims} is none of 1, 2 and 3")
    shapes = [
        shape
        for ndim in range(1, max_dims + 1)
        for shape in product(range(1, max_ranks + 1), repeat=ndim)
        if prod(shape) <= max_ranks and shape.count(1) <= 1
    ]
    return st.sampled_from(sorted(shapes, key=lambda shape: (prod(shape), len(shape), shape)))
