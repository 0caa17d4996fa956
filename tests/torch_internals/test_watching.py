"""What those that watch each op know of its tensors."""

from __future__ import annotations

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from verifier.torch_internals.watching import RedistributionWatch, memory_of


def test_a_tensor_that_a_collective_is_writing_to_has_the_memory_of_what_it_stands_in_for() -> None:
    """Redistributions with ``async_op=True`` leave such tensors, which have no memory of their own."""
    local, other = torch.ones(3), torch.ones(3)
    pending = AsyncCollectiveTensor(local)
    with pytest.raises(RuntimeError, match="python storage"):
        pending.untyped_storage().data_ptr()
    assert memory_of(pending) == memory_of(local) == memory_of(local[1:])
    assert memory_of(other) != memory_of(local)


def test_a_redistribution_of_such_a_tensor_is_watched() -> None:
    local = torch.ones(3)
    with RedistributionWatch(AsyncCollectiveTensor(local)) as watch:
        assert watch.peak(local) == 12
