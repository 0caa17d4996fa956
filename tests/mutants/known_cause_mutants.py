"""Wrong rules for ops of which the committed baseline knows a cause; each function registers them."""

from __future__ import annotations

from typing import Any

import torch
from rule_strategies import SUM, R, Rule, per_mesh_dim, publicly
from torch.distributed.tensor import Shard

aten = torch.ops.aten


def scan_left_cut() -> None:
    """Let every dim of a scan stay cut, the one that it runs along as well."""
    publicly(aten.cumsum.default, lambda tensor, *_: [[Shard(d), Shard(d)] for d in range(len(tensor.shape))])


def sequence_cut() -> None:
    """Let the sequence of a search be cut where no sorter is given, which is right: places in parts add up."""

    def rules(*args: Any, sorter: Any = None, **_: object) -> list[Rule]:
        return [[SUM, Shard(0), R]] if sorter is None else []

    per_mesh_dim(aten.searchsorted.Tensor, rules)


def sorter_cut() -> None:
    """Let the sorter of a search be cut with its sequence, though it has places in all of it."""
    per_mesh_dim(aten.searchsorted.Tensor, lambda *args, **_: [[SUM, Shard(0), R, Shard(0)]])


def weight_gradient_replicated() -> None:
    """Call the gradient of a convolution's weight replicated, which each rank has of its own images."""

    def rules(*args: Any, **_: object) -> list[Rule]:
        return [[Shard(0), R, None if args[3] is None else SUM, Shard(0), Shard(0), R]]

    per_mesh_dim(aten.convolution_backward.default, rules)
