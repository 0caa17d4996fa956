"""A program that never ends if its argument is sharded; ranks import it by its dotted path."""

import torch
from torch.distributed.tensor import DTensor, Shard


def spins(x: torch.Tensor) -> torch.Tensor:
    while isinstance(x, DTensor) and isinstance(x.placements[0], Shard):
        pass
    return x + x
