"""What the kernels of our own strategies do with numbers that no drawn call is large enough for."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard

from strategies.embedding.sharding import check_ids, divided_by_counts, gradient, lookup
from strategies.embedding_bag.ops import BAG_OPS
from verifier.torch_internals.dtensors import is_fake
from verifier.torch_internals.sharded_ops import RankView

R, S0 = Replicate(), Shard(0)
MANY = 70_000
"""More than the largest float16, 65504."""
ROWS = 2**31 + 2
"""More than int32 counts, of which each of two ranks has half."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_counts_may_be_more_than_the_dtype_has(dtype: torch.dtype) -> None:
    ids = torch.zeros(MANY, dtype=torch.int64)
    rows = torch.zeros(MANY, 1, dtype=dtype)
    rows[:8] = 10_000
    view = RankView((1,), (0,), ((MANY, 1), (MANY,)), ((R,), (R,)))
    scaled = gradient(view, rows, ids, 1, -1, True)
    assert scaled.dtype == dtype
    assert scaled.item() == pytest.approx(80_000 / MANY, rel=1e-2)
    assert divided_by_counts(rows[:1], torch.tensor([0])).item() == rows[0].item()


def test_a_mean_of_more_ids_than_float16_has() -> None:
    (op,) = (sharded for sharded in BAG_OPS if "sum_bags" in str(sharded.op))
    weight = torch.full((2, 1), 0.5, dtype=torch.float16)
    ids = torch.zeros(MANY, dtype=torch.int64)
    ids[:100] = 1
    starts, stops, counts = (torch.tensor([value]) for value in (0, MANY, MANY))
    # a table of which this rank has the last row: its part of the sum is 50
    shapes = ((4, 1), (MANY,), (1,), (1,), (1,))
    view = RankView((2,), (1,), shapes, ((S0,), *((R,),) * 4))
    part = op.kernel(view, weight, ids + 2, starts, stops, None, counts, 3, False)
    assert isinstance(part, torch.Tensor)
    assert part.item() == pytest.approx(0.5 * (MANY - 100) / MANY, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rank", [0, 1])
def test_int32_ids_into_a_table_of_more_rows_than_int32_has(dtype: torch.dtype, rank: int) -> None:
    ids = torch.tensor([0, 5, 2**31 - 1], dtype=dtype)
    weight = torch.full((1, 1), 3.0).expand(ROWS // 2, 1)
    view = RankView((2,), (rank,), ((ROWS, 1), (3,)), ((S0,), (R,)))
    assert lookup(view, weight, ids).flatten().tolist() == ([3.0, 3.0, 0.0] if rank == 0 else [0.0, 0.0, 3.0])
    check_ids(ids, ROWS)
    with pytest.raises(IndexError, match=r"ids from -1 to -1 in a table"):
        check_ids(torch.tensor([-1], dtype=dtype), ROWS)


def test_shapes_stand_for_results_only_where_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is traced would be a graph that makes empty tensors."""
    with FakeTensorMode():
        fake = torch.empty(2)
    assert is_fake(fake)
    assert not is_fake(torch.empty(2))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not is_fake(fake)
