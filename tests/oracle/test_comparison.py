"""What the ranks hold against what their placements promise."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Shard

from verifier.core.case import MeshSpec
from verifier.core.observation import DifferenceKind
from verifier.core.verdict import Phase
from verifier.oracle.comparison import Spot, check_shards, compare, tolerance

SPOT = Spot(Phase.FORWARD, "output")


def test_a_part_of_another_shape_is_a_difference_and_no_contribution() -> None:
    """Ranks that reduced such parts would abort in the collective, and the verdict would be a death."""
    locals_ = {0: torch.ones(1), 1: torch.ones(2)}
    differences, parts = check_shards(locals_, (Partial("sum"),), torch.ones(2), 0.0, MeshSpec((2,)), SPOT)
    assert [(d.kind, d.rank, d.got, d.expected) for d in differences] == [(DifferenceKind.SHAPE, 0, "[1]", "[2]")]
    assert parts == []


def test_parts_of_the_right_shape_are_contributions() -> None:
    locals_ = {0: torch.ones(2), 1: torch.zeros(2)}
    differences, parts = check_shards(locals_, (Partial("sum"),), torch.ones(2), 0.0, MeshSpec((2,)), SPOT)
    assert differences == []
    assert [part.rank for part in parts] == [0, 1]


def test_a_part_of_another_layout_is_a_difference_and_no_contribution() -> None:
    """It could not even be sent to where parts are reduced."""
    locals_ = {0: torch.ones(2), 1: torch.ones(2).to_sparse()}
    differences, parts = check_shards(locals_, (Partial("sum"),), torch.ones(2), 0.0, MeshSpec((2,)), SPOT)
    assert [(d.kind, d.rank, d.got, d.expected) for d in differences] == [
        (DifferenceKind.STRUCTURE, 1, "torch.sparse_coo", "torch.strided")
    ]
    assert parts == []


def test_a_result_without_a_placement_for_each_mesh_dim_is_wrongly_placed() -> None:
    locals_ = {0: torch.ones(2)}
    differences, parts = check_shards(locals_, (Shard(0),), torch.ones(4), 0.0, MeshSpec((2, 2)), SPOT)
    assert [(d.kind, d.got, d.expected) for d in differences] == [
        (DifferenceKind.PLACEMENT, "S(0)", "a placement for each of 2 mesh dims")
    ]
    assert parts == []


def test_a_wrong_shard_names_rank_and_element() -> None:
    locals_ = {0: torch.tensor([1.0, 2.0]), 1: torch.tensor([9.0])}
    differences, _ = check_shards(locals_, (Shard(0),), torch.tensor([1.0, 2.0, 3.0]), 0.0, MeshSpec((2,)), SPOT)
    assert [(d.rank, d.index, d.got, d.expected) for d in differences] == [(1, (0,), "9.0", "3.0")]


def test_nan_equals_nan_and_a_tolerance_is_absolute() -> None:
    assert compare(torch.tensor([float("nan")]), torch.tensor([float("nan")]), 0.0) is None
    assert compare(torch.tensor([1.5]), torch.tensor([1.0]), 0.5) is None
    assert compare(torch.tensor([1.6]), torch.tensor([1.0]), 0.5) is not None


@pytest.mark.parametrize("dtype", [torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_what_torch_has_no_comparison_of_is_compared(dtype: torch.dtype) -> None:
    one, other = torch.tensor([1.0, 2.0]).to(dtype), torch.tensor([1.0, 4.0]).to(dtype)
    assert compare(one, one.clone(), 0.0) is None
    kind, got, expected, index = compare(one, other, 0.0) or pytest.fail("no difference")
    assert (kind, index) == (DifferenceKind.VALUE, (1,))
    assert (complex(got), complex(expected)) == (2, 4)
    assert tolerance(other, 4, 0.0) > 0
