"""The operator's strategy under every combination of placements, with uneven shards."""

import torch
from scaled_rows.rules import scale


def test_rows_are_scaled_on_every_rank(verify):
    verify(scale, rows=torch.randn(5, 3, dtype=torch.float64), factors=torch.randn(5, dtype=torch.float64))
