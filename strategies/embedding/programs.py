"""Short programs around embedding lookups, where state that outlives one op would show.

Each needs torch alone, so that its source can stand in a reproduction.
"""

from __future__ import annotations

import torch

__all__ = ["lookup_then_double", "shared_table", "two_pending", "used_twice"]


def two_pending(weight: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two lookups in one table; both are made before either result is used."""
    one = torch.nn.functional.embedding(first, weight)
    other = torch.nn.functional.embedding(second, weight)
    return one, other


def lookup_then_double(weight: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return twice the lookup, as models that scale their embeddings do."""
    return torch.nn.functional.embedding(indices, weight) * 2


def used_twice(weight: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return a lookup plus its rectified self, as a residual branch uses a result twice."""
    hidden = torch.nn.functional.embedding(indices, weight)
    return hidden + torch.relu(hidden)


def shared_table(weight: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the sum of two lookups in one table, of shapes that broadcast: ``tokens[..., n]``, ``positions[n]``."""
    return torch.nn.functional.embedding(tokens, weight) + torch.nn.functional.embedding(positions, weight)
