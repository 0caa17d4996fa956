"""Extents of calls that are changed at every size: calls of one size may have one extent where others have several."""

from __future__ import annotations

import pytest
import torch

from strategies.opinfo.calls.call import Call
from strategies.opinfo.samples.asking.tensors import other_tensors
from strategies.opinfo.samples.extents import Extents

flip = torch.ops.aten.flip.default


def flipped(*shape: int) -> Call:
    return Call(flip, (torch.ones(shape, dtype=torch.float64), [0]), {})


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 4)])
def test_a_long_dim_is_one_dim_at_every_size(shape: tuple[int, ...]) -> None:
    """All dims of one element have the same extent, so that they would all become long."""
    (long,) = (one for one in other_tensors(flipped(1, 3, 4)) if one.label == "extent 0 is 4099")
    changed = long.apply(flipped(1, 3, 4))
    assert changed is not None
    assert changed.tensors[0].shape == (4099, 3, 4)
    assert long.apply(flipped(*shape)) is None


def test_no_call_has_more_elements_than_a_worker_has_memory_for() -> None:
    extents = Extents.of(flipped(1, 1, 1, 1))
    (group,) = extents.groups
    assert extents.elements({group: 100}) == 100**4
    assert extents.other(group, 100) is None
    smaller = extents.other(group, 10)
    assert smaller is not None
    assert smaller.tensors[0].shape == (10, 10, 10, 10)
