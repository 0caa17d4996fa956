"""Programs of several lookups, which ranks import by their dotted path."""

from __future__ import annotations

import torch
from torch.nn.functional import embedding


def of_two_tables(weight: torch.Tensor, taller: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Return the sum of lookups of the same ids in both tables.

    The gradients of the two are calls with the same tensors, apart from the number of rows.
    """
    return embedding(input, weight) + 2 * embedding(input, taller, padding_idx=1)


def normalized(weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Return a lookup with rows scaled to length 1."""
    return torch.nn.functional.normalize(embedding(input, weight), dim=-1)


def filled(weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Return the sum of a lookup and another lookup whose values were replaced."""
    return 2 * embedding(input, weight) + embedding(input, weight).fill_(3.0)


def filled_with_a_tensor(weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Do as :func:`filled`."""
    return 2 * embedding(input, weight) + embedding(input, weight).fill_(torch.tensor(3.0))


def clamped(weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Return a lookup with values above 2 replaced by 2."""
    rows = embedding(input, weight)
    return rows.masked_fill_(rows > 2, 2.0)


def clamped_to_a_tensor(weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Do as :func:`clamped`."""
    rows = embedding(input, weight)
    return rows.masked_fill_(rows > 2, torch.tensor(2.0))
