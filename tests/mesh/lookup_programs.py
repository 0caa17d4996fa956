"""Programs of several lookups, which ranks import by their dotted path."""

from __future__ import annotations

import torch
from torch.nn.functional import embedding


def of_two_tables(weight: torch.Tensor, taller: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Return the sum of lookups of the same ids in both tables.

    The gradients of the two are calls with the same tensors, apart from the number of rows.
    """
    return embedding(input, weight) + 2 * embedding(input, taller, padding_idx=1)
