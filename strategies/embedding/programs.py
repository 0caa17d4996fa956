"""Short programs around embedding lookups, which show state that outlives one op.

Each imports only torch, so that its source can stand in a reproduction. The first index tensor is called ``input``, as
in ``torch.nn.functional.embedding``, so that placement tables have one column for both.
"""

from __future__ import annotations

import torch

__all__ = ["shared_table", "two_pending", "used_twice"]


def two_pending(
    weight: torch.Tensor, input: torch.Tensor, second: torch.Tensor, padding_idx: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of two lookups in one table, where the first result is used after the second lookup."""
    one = torch.nn.functional.embedding(input, weight, padding_idx)
    other = torch.nn.functional.embedding(second, weight, padding_idx)
    return one, other


def used_twice(weight: torch.Tensor, input: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """Return a lookup plus its ReLU, as a residual branch uses a result twice."""
    hidden = torch.nn.functional.embedding(input, weight, padding_idx)
    return hidden + torch.relu(hidden)


def shared_table(
    weight: torch.Tensor, input: torch.Tensor, positions: torch.Tensor, padding_idx: int | None = None
) -> torch.Tensor:
    """Return the sum of two lookups in one table, of shapes that broadcast: ``input[..., n]``, ``positions[n]``."""
    token = torch.nn.functional.embedding(input, weight, padding_idx)
    return token + torch.nn.functional.embedding(positions, weight)
