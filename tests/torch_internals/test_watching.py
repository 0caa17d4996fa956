"""What the amendments that see each op know of its tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from verifier.torch_internals.amending.watching import _memory


def memory_of(local: torch.Tensor) -> int:
    return _memory(cast(DTensor, SimpleNamespace(_local_tensor=local)))


def test_a_tensor_that_a_collective_is_writing_to_has_the_memory_of_what_it_stands_in_for() -> None:
    """Redistributions with ``async_op=True`` leave such tensors, which have no memory of their own."""
    local, other = torch.ones(3), torch.ones(3)
    assert memory_of(AsyncCollectiveTensor(local)) == memory_of(local) == memory_of(local[1:])
    assert memory_of(other) != memory_of(local)
