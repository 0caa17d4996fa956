"""Short programs around embedding lookups, where state that outlives one op would show.

Each needs torch alone, so that its source can stand in a reproduction. The first index tensor is called ``input``, as
``torch.nn.functional.embedding`` calls it, so that a table of placements has them all in one place.
"""

from __future__ import annotations

import torch

__all__ = ["shared_table", "two_pending", "used_twice"]


def two_pending(
    weight: torch.Tensor, input: torch.Tensor, second: torch.Tensor, padding_idx: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two lookups in one table; both are made before either result is used."""
    one = torch.nn.functional.embedding(input, weight, padding_idx)
    other = torch.nn.functional.embedding(second, weight, padding_idx)
    return one, other


def used_twice(weight: torch.Tensor, input: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """Return a lookup plus its rectified self, as a residual branch uses a result twice."""
    hidden = torch.nn.functional.embedding(input, weight, padding_idx)
    return hidden + torch.relu(hidden)


def shared_table(
    weight: torch.Tensor, input: torch.Tensor, positions: torch.Tensor, padding_idx: int | None = None
) -> torch.Tensor:
    """Return the sum of two lookups in one table, of shapes that broadcast: ``input[..., n]``, ``positions[n]``."""
    token = torch.nn.functional.embedding(input, weight, padding_idx)
    return token + torch.nn.functional.embedding(positions, weight)
