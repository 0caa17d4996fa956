"""Extents of calls that are changed at every size: calls of one size may have one extent where others have several."""

from __future__ import annotations

import pytest
import torch

from strategies.opinfo.calls.call import Call
from strategies.opinfo.samples.asking.arguments import other_values
from strategies.opinfo.samples.asking.extents import other_extents
from strategies.opinfo.samples.asking.lists import other_lists
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


@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 0, 3), (0, 2, 3, 4), ()])
def test_all_changes_of_a_call_can_be_tried_though_it_has_no_elements_or_no_dims(shape: tuple[int, ...]) -> None:
    """A change may be none; it does not raise, because that would end the check of the op."""
    tensor = torch.ones(shape, dtype=torch.float64)
    for op in (torch.ops.aten.mul.Tensor, torch.ops.aten.nextafter.default):
        call = Call(op, (tensor, tensor.clone()), {})
        changes = [one for source in (other_extents, other_tensors, other_lists) for one in source(call)]
        changes += [one.variation for one in other_values(call)]
        assert changes
        for change in changes:
            made = change.apply(call)
            assert made is None or len(made.tensors) == 2
