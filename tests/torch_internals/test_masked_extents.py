"""What masked partials of right and of wrong rules say of the dim that is looked up."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import _MaskPartial

from verifier.torch_internals.placements import masked_extent


@pytest.mark.parametrize(("dim", "extent"), [(0, 7), (1, 5), (-1, 5), (2, 0), (-3, 0)])
def test_a_dim_that_the_tensor_lacks_has_no_extent(dim: int, extent: int) -> None:
    assert masked_extent(_MaskPartial(offset_shape=torch.Size([7, 5]), offset_dim=dim)) == extent


def test_other_partials_have_none() -> None:
    assert masked_extent(Partial()) is None
