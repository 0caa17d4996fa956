"""Programs of the family ``sharded_tensor`` with kernels that are wrong on purpose."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import torch
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

from strategies.sharded_tensor import programs

_OPS = "torch.distributed._shard.sharding_spec.chunk_sharding_spec_ops"
COMMON, LOOKUP, BAG = (importlib.import_module(f"{_OPS}.{name}") for name in ("_common", "embedding", "embedding_bag"))


def rows_in_ascending_order(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Take the shard of a rank for that of its number, in whatever order the spec lists them."""
    mask = LOOKUP._handle_row_wise_mask

    def wrong(ids: torch.Tensor, padding_idx: int | None, weight: Any, world_size: int, rank: int) -> Any:
        listed = [placement.rank() for placement in weight._sharding_spec.placements]
        return mask(ids, padding_idx, weight, world_size, listed[rank])

    with mock.patch.object(LOOKUP, "_handle_row_wise_mask", wrong):
        return programs.embedding(*args, **kwargs)


def columns_in_ascending_order(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Leave the columns in the order of the ranks."""
    distribute = COMMON._result_distribute_with_col_rearrange

    def wrong(results: Any, ids: torch.Tensor, world_size: int, weight: Any, group: Any) -> Any:
        ascending = mock.MagicMock(wraps=weight)
        ascending.size = weight.size
        ascending._sharding_spec = ChunkShardingSpec(1, [f"rank:{rank}/cpu" for rank in range(world_size)])
        return distribute(results, ids, world_size, ascending, group)

    with mock.patch.object(COMMON, "_result_distribute_with_col_rearrange", wrong):
        return programs.embedding(*args, **kwargs)


def own_rows_only(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Return what a rank finds in its own rows, and add nothing from the others."""
    reduce_scatter = LOOKUP.reduce_scatter

    def wrong(output: torch.Tensor, parts: list[torch.Tensor], **options: Any) -> torch.Tensor:
        return reduce_scatter(output, parts, **options) * 0 + parts[0]

    with mock.patch.object(LOOKUP, "reduce_scatter", wrong):
        return programs.embedding(*args, **kwargs)


def doubled_gradient(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Return the right values, with twice their gradient."""
    reduce_scatter = BAG.reduce_scatter

    def wrong(*args: Any, **options: Any) -> Any:
        result = reduce_scatter(*args, **options)
        return result * 2 - result.detach()

    with mock.patch.object(BAG, "reduce_scatter", wrong):
        return programs.embedding_bag(*args, **kwargs)


def forgotten_step(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Leave out the last step of the optimizer."""
    calls = []

    def wrong(self: torch.optim.SGD, closure: None = None) -> None:
        calls.append(self)
        if len(calls) == 1:
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.sub_(2.0 * parameter.grad)

    distributed = type(args[0]).__name__ == "DTensor"
    with mock.patch.object(torch.optim.SGD, "step", wrong if distributed else torch.optim.SGD.step):
        return programs.trained(*args, **kwargs)
